// Attention of a few rows (decode): keys and values are read where they lie, each once for all heads of a group, while
// the next tile is on its way from memory.
#pragma once
#include "dot.h"
#include "parallel.h"
#include "softmax.h"

namespace v4flash {

// Rows are the heads of a group within tokens: row r is head r % group of token r / group of the sequence.
struct FewTask {
  int64_t seq, kv_head, first, end;  // keys first .. end of the sequence
};

template <class T>
class FewRows {
 public:
  static constexpr int kSlice = 4;     // rows that share one pass over a tile in registers
  static constexpr int kKeys = 64;     // of a tile
  static constexpr int kLineBytes = 64;

  FewRows(const Paged<T>& paged, int64_t max_rows)
      : paged_(paged), padded_((paged.head_dim + kLanes - 1) / kLanes * kLanes), scratch_(Scratch::of_thread<FewRows>()) {
    scratch_.reset(bytes(max_rows));
    query_ = scratch_.take<typename Dot<T>::Element>(max_rows * paged.head_dim);
    values_ = scratch_.take<float>(max_rows * padded_);
    max_ = scratch_.take<float>(max_rows);
    sum_ = scratch_.take<float>(max_rows);
    scores_ = scratch_.take<float>(kSlice * kKeys);
    rows_ = scratch_.take<const T*>(kKeys);
    next_rows_ = scratch_.take<const T*>(kKeys);
  }

  // finish(row, partial) is called for each row; `next` is what this thread does afterwards, if anything.
  template <class Finish>
  void run(const FewTask& task, const FewTask* next, Finish finish) {
    const int64_t num_tokens = paged_.query_len(task.seq), num_rows = num_tokens * paged_.group;
    start(task, num_rows);
    if (prepared_ != &task) paged_.key_rows(task.seq, task.kv_head, task.first, tile_len(task, task.first), next_rows_);
    const int64_t first_position = paged_.kv_lens[task.seq] - num_tokens;
    for (int64_t key = task.first; key < task.end; key += kKeys) {
      const int count = tile_len(task, key);
      std::swap(rows_, next_rows_);
      prepare(task, key + kKeys, next);
      for (int64_t r = 0; r < num_rows; r += kSlice) {
        const int64_t left = num_rows - r;
        const auto visible = [&](int64_t row) { return first_position + row / paged_.group + 1 - key; };
        if (left >= 4) slice<4>(r, count, visible);
        else if (left == 3) slice<3>(r, count, visible);
        else if (left == 2) slice<2>(r, count, visible);
        else slice<1>(r, count, visible);
      }
    }
    prepared_ = next;
    for (int64_t r = 0; r < num_rows; ++r) finish(r, Partial{max_[r], sum_[r], values_ + r * padded_});
  }

 private:
  int64_t bytes(int64_t max_rows) const {
    return Scratch::padded<float>(max_rows * paged_.head_dim) + Scratch::padded<float>(max_rows * padded_) +
           2 * Scratch::padded<float>(max_rows) + Scratch::padded<float>(kSlice * kKeys) +
           2 * Scratch::padded<const T*>(kKeys);
  }
  static int tile_len(const FewTask& task, int64_t key) {
    return static_cast<int>(std::min<int64_t>(kKeys, task.end - key));
  }

  void start(const FewTask& task, int64_t num_rows) {
    const int64_t dim = paged_.head_dim;
    for (int64_t r = 0; r < num_rows; ++r) {
      const T* q = paged_.query_row(paged_.query_starts[task.seq] + r / paged_.group,
                                    task.kv_head * paged_.group + r % paged_.group);
      for_lanes(dim, [&](int64_t i, int lanes) { store_lanes(query_ + r * dim + i, load_lanes(q + i, lanes), lanes); });
      max_[r] = kLowest;
      sum_[r] = 0;
    }
    std::fill_n(values_, num_rows * padded_, 0.f);
  }

  // Finds the rows of the tile that comes after the present one, so that it can be prefetched.
  void prepare(const FewTask& task, int64_t key, const FewTask* next) {
    const FewTask* of = key < task.end ? &task : next;
    num_next_ = 0;
    if (!of) return;
    const int64_t first = of == &task ? key : next->first;
    num_next_ = tile_len(*of, first);
    paged_.key_rows(of->seq, of->kv_head, first, num_next_, next_rows_);
  }

  void prefetch(int j, int64_t offset) const {
    if (j >= num_next_) return;
    const char* line = reinterpret_cast<const char*>(next_rows_[j] + offset);
    const int64_t size = paged_.head_dim * static_cast<int64_t>(sizeof(T));
    for (int64_t i = 0; i < size; i += kLineBytes) _mm_prefetch(line + i, _MM_HINT_T0);
  }

  template <int num_rows, class Visible>
  void slice(int64_t row, int count, Visible visible) {
    const bool first = row == 0;  // prefetching once is enough
    const int width = (count + kLanes - 1) / kLanes * kLanes;
    for (int j = 0; j < width; j += kLanes) {
      if (first) {
        for (int i = 0; i < kLanes; ++i) prefetch(j + i, 0);
      }
      for (int r = 0; r < num_rows; ++r) store(scores_ + r * kKeys + j, score(row + r, j, count));
    }
    for (int r = 0; r < num_rows; ++r) {
      const auto seen = static_cast<int>(std::min<int64_t>(count, visible(row + r)));
      const float shrink = soften<precision>(scores_ + r * kKeys, width, seen, paged_.scale, max_[row + r], sum_[row + r]);
      scale_row(values_ + (row + r) * padded_, padded_, shrink);
    }
    if (first) {
      for (int j = width; j < num_next_; ++j) prefetch(j, 0);
      for (int j = count; j < num_next_; ++j) prefetch(j, paged_.value_offset);
    }
    float* to = values_ + row * padded_;
    int64_t i = 0;
    for (; i + kPanel * kLanes <= paged_.head_dim; i += kPanel * kLanes) {
      add_values<num_rows, kPanel>(to, i, kLanes, count, first && i == 0);
    }
    for (; i < paged_.head_dim; i += kLanes) {
      add_values<num_rows, 1>(to, i, static_cast<int>(std::min<int64_t>(kLanes, paged_.head_dim - i)), count,
                              first && i == 0);
    }
  }

  // Products of one query row with kLanes keys of the tile.
  Vec score(int64_t row, int j, int count) const {
    constexpr int step = Dot<T>::kWidth;
    const int64_t dim = paged_.head_dim;
    const auto* q = query_ + row * dim;
    Vec sums[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const T* k = rows_[std::min(j + i, count - 1)];
      Vec sum = zero();
      int64_t d = 0;
      for (; d + step <= dim; d += step) sum = Dot<T>::mac(sum, k + d, q + d);
      if (d < dim) sum = Dot<T>::mac_n(sum, k + d, q + d, static_cast<int>(dim - d));
      sums[i] = sum;
    }
    return row_sums(sums);
  }

  // values[num_rows][offset ..] += probabilities [num_rows, count] times the values of the tile there.
  template <int num_rows, int vectors>
  void add_values(float* to, int64_t offset, int lanes, int count, bool with_prefetch) const {
    Vec sums[num_rows][vectors];
    for (int r = 0; r < num_rows; ++r) {
      for (int v = 0; v < vectors; ++v) sums[r][v] = load(to + r * padded_ + offset + v * kLanes);
    }
    for (int j = 0; j < count; ++j) {
      const T* value = rows_[j] + paged_.value_offset + offset;
      if (with_prefetch) prefetch(j, paged_.value_offset);
      Vec x[vectors];
      for (int v = 0; v < vectors; ++v) x[v] = load_lanes(value + v * kLanes, lanes);
      for (int r = 0; r < num_rows; ++r) {
        const Vec p = set(scores_[r * kKeys + j]);
        for (int v = 0; v < vectors; ++v) sums[r][v] = fma(p, x[v], sums[r][v]);
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      for (int v = 0; v < vectors; ++v) store(to + r * padded_ + offset + v * kLanes, sums[r][v]);
    }
  }

  static constexpr Precision precision = std::is_same_v<T, BF16> ? Precision::kBF16 : Precision::kF32;
  const Paged<T>& paged_;
  int64_t padded_;
  Scratch& scratch_;
  typename Dot<T>::Element* query_;
  float *values_, *max_, *sum_, *scores_;
  const T **rows_, **next_rows_;
  int num_next_ = 0;
  const FewTask* prepared_ = nullptr;  // whose first tile next_rows_ holds
};

}  // namespace v4flash
