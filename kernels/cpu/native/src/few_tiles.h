// The tiles of keys that attention of a few rows reads from the body: while one is in use, the next is on its way from
// memory.
#pragma once
#include "coming.h"
#include "paged.h"
#include "parallel.h"

namespace v4flash {

// Rows are the heads of a group within tokens: row r is head r % group of token r / group of the sequence.
struct FewTask {
  int64_t seq, kv_head, num_kv_heads;  // these key heads, one after the other
  int64_t first, end;                  // keys first .. end of the sequence
};

template <class T, class S>
class FewTiles {
 public:
  static constexpr int kKeys = 32;  // of a tile
  static constexpr int kSome = 4;   // for so many keys of a head `fetch` is called once

  FewTiles(Scratch& scratch, const Layer<T, S>& layer)
      : rows(scratch.take<const S*>(kKeys)),
        layer_(layer),
        next_rows_(scratch.take<const S*>(kKeys)),
        coming_(scratch.take<Coming::Run>(2 * kKeys * layer.num_kv_heads)) {}

  // Where the keys end that are read from the body.
  int64_t end(const FewTask& task) const {
    return std::min(task.end, layer_.body_window(layer_.kv_lens[task.seq] - 1).end);
  }

  // Lets `rows` be those of the tile at `key` and gives their number; `next` is what comes after the task, if anything.
  int go_to(const FewTask& task, int64_t key, const FewTask* next) {
    if (key == task.first && prepared_ != &task) find(task, key);
    std::swap(rows, next_rows_);
    const int count = tile_len(task, key);
    coming_.clear();
    const bool is_last = key + kKeys >= end(task);
    prepared_ = is_last ? next : &task;
    if (!prepared_) return count;
    const int64_t first = is_last ? next->first : key + kKeys;
    const RowLayout layout = layer_.body_layout();
    const auto add = [&](const S* row, const F16*, int64_t n, int64_t) {
      for (const int64_t part : {int64_t{0}, layout.value_offset}) {
        for (int64_t h = 0; h < prepared_->num_kv_heads; ++h) {
          coming_.add(row + part + h * layout.head_stride, n * layer_.head_dim * static_cast<int64_t>(sizeof(S)));
        }
      }
    };
    find(*prepared_, first);
    layer_.each_block(prepared_->seq, false, prepared_->kv_head, first, tile_len(*prepared_, first), add);
    coming_.divide(task.num_kv_heads * ((count + kSome - 1) / kSome));
    return count;
  }

  void fetch() { coming_.fetch(); }

  const S** rows;

 private:
  int tile_len(const FewTask& task, int64_t key) const {
    return static_cast<int>(std::min<int64_t>(kKeys, end(task) - key));
  }
  void find(const FewTask& task, int64_t key) {
    layer_.body_rows(task.seq, task.kv_head, key, tile_len(task, key), next_rows_);
  }

  const Layer<T, S>& layer_;
  const S** next_rows_;
  Coming coming_;                      // the next tile
  const FewTask* prepared_ = nullptr;  // whose tile next_rows_ holds
};

}  // namespace v4flash
