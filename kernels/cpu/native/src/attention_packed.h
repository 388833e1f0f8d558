// Attention of many rows without a tile unit: a slab of rows passes over tiles of 64 keys, each packed once for the whole
// slab, as matrix products of a few rows at a time. Keys lie in lanes: as rows do in `ManyRows` they were three times
// slower on x86-64-v3.
#pragma once
#include "attention_many.h"
#include "softmax.h"

namespace v4flash {

template <class T, class Product>
class PackedRows {
 public:
  using Unit = typename Tile<T>::Unit;
  static constexpr int kRows = Product::kRows;
  static_assert(kSlabRows % kRows == 0 && kTileKeys % Product::kColumns == 0);

  explicit PackedRows(const Paged<T>& paged)
      : paged_(paged),
        padded_((paged.head_dim + kLanes - 1) / kLanes * kLanes),
        units_((paged.head_dim + Tile<T>::kDepth - 1) / Tile<T>::kDepth),
        depth_((units_ + Product::kStep - 1) / Product::kStep * Product::kStep),
        query_stride_((units_ + kLanes - 1) / kLanes * kLanes) {
    Scratch& scratch = Scratch::of_thread<PackedRows>();
    const int64_t row_units = kTileKeys / Tile<T>::kDepth;
    scratch.reset(Scratch::padded<Unit>(kSlabRows * query_stride_) + Scratch::padded<float>(kSlabRows * padded_) +
                  2 * Scratch::padded<float>(kSlabRows) + 2 * Scratch::padded<float>(kRows * kTileKeys) +
                  Scratch::padded<Unit>(depth_ * kTileKeys) + Scratch::padded<Unit>(row_units * padded_) +
                  Scratch::padded<T>(padded_) + 2 * Scratch::padded<const T*>(kTileKeys));
    query_ = scratch.take<Unit>(kSlabRows * query_stride_);
    values_ = scratch.take<float>(kSlabRows * padded_);
    max_ = scratch.take<float>(kSlabRows);
    sum_ = scratch.take<float>(kSlabRows);
    scores_ = scratch.take<float>(kRows * kTileKeys);
    probs_ = scratch.take<Unit>(kRows * kTileKeys);
    packed_keys_ = scratch.take<Unit>(depth_ * kTileKeys);
    packed_values_ = scratch.take<Unit>(row_units * padded_);
    zeros_ = scratch.take<T>(padded_);
    rows_ = scratch.take<const T*>(kTileKeys);
    std::fill_n(zeros_, padded_, T(0.f));
    std::fill_n(packed_keys_, depth_ * kTileKeys, Unit{0});  // what lies past the units of a row stays zero
  }

  // finish(row of the slab, partial) is called for each row.
  template <class Finish>
  void run(const ManyTask& task, Finish finish) {
    start(task);
    const int64_t last_seen = last_key(task, task.num_rows - 1);
    for (int64_t key = task.first_key; key <= last_seen; key += kTileKeys) {
      const auto count = static_cast<int>(std::min<int64_t>(kTileKeys, task.first_key + task.num_keys - key));
      paged_.key_rows(task.seq, task.kv_head, key, count, rows_);
      pack_columns<T>(rows_, count, paged_.head_dim, packed_keys_);
      for (int j = 0; j < count; ++j) rows_[j] += paged_.value_offset;
      pack_rows<T>(rows_, count, paged_.head_dim, zeros_, padded_, packed_values_);
      for (int64_t r = 0; r < task.num_rows; r += kRows) {
        const int64_t last = std::min(r + kRows, task.num_rows) - 1;
        const int64_t seen = std::min<int64_t>(count, last_key(task, last) + 1 - key);
        if (seen > 0) attend(task, r, key, static_cast<int>(seen));
      }
    }
    for (int64_t r = 0; r < task.num_rows; ++r) finish(r, Partial{max_[r], sum_[r], values_ + r * padded_});
  }

 private:
  int64_t last_key(const ManyTask& task, int64_t row) const {
    const int64_t end = task.first_key + task.num_keys - 1;
    return task.causal ? std::min(end, task.first_token + row / paged_.group + task.position_offset) : end;
  }

  void start(const ManyTask& task) {
    std::fill_n(query_, kSlabRows * query_stride_, Unit{0});
    for (int64_t r = 0; r < task.num_rows; ++r) {
      const int64_t token = task.first_token + r / paged_.group;
      const T* q = paged_.query_row(token, task.kv_head * paged_.group + r % paged_.group);
      for (int64_t u = 0; u < units_; u += kLanes) {
        const int64_t offset = u * Tile<T>::kDepth;
        store(reinterpret_cast<float*>(query_ + r * query_stride_ + u),
              Tile<T>::units_of_row(q + offset, paged_.head_dim - offset));
      }
    }
    std::fill_n(values_, kSlabRows * padded_, 0.f);
    std::fill_n(max_, kSlabRows, kLowest);
    std::fill_n(sum_, kSlabRows, 0.f);
  }

  // Rows row .. row + kRows over the packed tile that begins at `key`, of which at most `seen` keys count.
  void attend(const ManyTask& task, int64_t row, int64_t key, int seen) {
    const int width = (seen + Product::kColumns - 1) / Product::kColumns * Product::kColumns;
    product_.template multiply<false>(query_ + row * query_stride_, query_stride_, packed_keys_, kTileKeys, scores_,
                                      kTileKeys, depth_, width);
    constexpr int64_t probs_stride = kTileKeys / Tile<T>::kDepth;
    for (int r = 0; r < kRows; ++r) {
      const int64_t visible = std::min<int64_t>(seen, last_key(task, row + r) + 1 - key);
      float* line = scores_ + r * kTileKeys;
      const float shrink = soften<Tile<T>::kPrecision>(line, width, static_cast<int>(visible), paged_.scale,
                                                       max_[row + r], sum_[row + r]);
      scale_row(values_ + (row + r) * padded_, padded_, shrink);
      Tile<T>::store_floats(probs_ + r * probs_stride, line);
    }
    const int64_t depth = (width + Tile<T>::kDepth - 1) / Tile<T>::kDepth;
    product_.template multiply<true>(probs_, probs_stride, packed_values_, padded_, values_ + row * padded_, padded_,
                                     depth, padded_);
  }

  const Paged<T>& paged_;
  Product product_;
  int64_t padded_, units_, depth_, query_stride_;
  Unit *query_, *probs_, *packed_keys_, *packed_values_;
  float *values_, *max_, *sum_, *scores_;
  T* zeros_;
  const T** rows_;
};

}  // namespace v4flash
