// Attention of many rows where `TileRows` does not serve, in float32 and on x86-64-v3: a slab of rows passes over tiles
// of 64 keys, each packed once for the whole slab, as matrix products of a few rows at a time. Keys lie in lanes: as
// rows do in `TileRows` they were three times slower on x86-64-v3.
#pragma once
#include "key_tiles.h"
#include "softmax.h"

namespace v4flash {

// Products are computed in P.
template <class T, class S, class P>
class PackedRows {
 public:
  using Product = RegisterProduct<P>;
  using Unit = typename Tile<P>::Unit;
  static constexpr int kRows = Product::kRows, kDepth = Tile<P>::kDepth;
  static constexpr int64_t kMaxSlabRows = kSlabRows / 2;
  static_assert(kSlabRows % kRows == 0 && kTileKeys % kLanes == 0);

  explicit PackedRows(const Layer<T, S>& layer)
      : layer_(layer),
        tiles_(layer),
        padded_((layer.head_dim + kLanes - 1) / kLanes * kLanes),
        units_((layer.head_dim + kDepth - 1) / kDepth),
        query_stride_((units_ + kLanes - 1) / kLanes * kLanes) {
    Scratch& scratch = Scratch::of_thread<PackedRows>();
    scratch.reset();
    query_ = scratch.take<Unit>(kSlabRows * query_stride_);
    values_ = scratch.take<float>(kSlabRows * padded_);
    max_ = scratch.take<float>(kSlabRows);
    sum_ = scratch.take<float>(kSlabRows);
    scores_ = scratch.take<float>(kRows * kTileKeys);
    probs_ = scratch.take<Unit>(kRows * kTileKeys);
    packed_keys_ = scratch.take<Unit>(units_ * kTileKeys);
    packed_values_ = scratch.take<Unit>(kTileKeys / kDepth * padded_);
    zeros_ = scratch.take<P>(padded_);
    line_ = scratch.take<P>(padded_);
    std::fill_n(zeros_, padded_, P(0.f));
  }

  // finish(row of the slab, partial) is called for each row.
  template <class Finish>
  void run(const ManyTask& task, Finish finish) {
    start(task);
    tiles_.each(task, [&](int64_t key, int count, auto is_exact) {
      pack_columns<P>(tiles_.keys, count, layer_.head_dim, packed_keys_);
      pack_rows<P>(tiles_.values, count, layer_.head_dim, zeros_, padded_, packed_values_);
      for (int64_t r = 0; r < task.num_rows; r += kRows) {
        const int64_t last = std::min(r + kRows, task.num_rows) - 1;  // it sees no less far than those before it
        const int64_t seen = std::min<int64_t>(count, static_cast<int64_t>(tiles_.ends[last]) - key);
        if (seen > 0 && tiles_.begins[r] < static_cast<float>(key + count)) {
          attend<is_exact>(r, key, static_cast<int>(seen));
        }
      }
    });
    for (int64_t r = 0; r < task.num_rows; ++r) finish(r, Partial{max_[r], sum_[r], values_ + r * padded_});
  }

 private:
  void start(const ManyTask& task) {
    const int64_t num_rows = (task.num_rows + kRows - 1) / kRows * kRows;
    std::fill_n(query_, num_rows * query_stride_, Unit{0});
    for (int64_t r = 0; r < task.num_rows; ++r) {
      const T* from =
          layer_.query_row(task.first_token + r / layer_.group, task.kv_head * layer_.group + r % layer_.group);
      const P* q = as_row_of(from, layer_.head_dim, line_);
      for (int64_t u = 0; u < units_; u += kLanes) {
        store(reinterpret_cast<float*>(query_ + r * query_stride_ + u),
              Tile<P>::units_of_row(q + u * kDepth, layer_.head_dim - u * kDepth));
      }
    }
    std::fill_n(values_, num_rows * padded_, 0.f);
    std::fill_n(max_, num_rows, kLowest);
    std::fill_n(sum_, num_rows, 0.f);
  }

  // Rows row .. row + kRows over the packed tile that begins at `key`, of which at most `seen` keys count.
  template <bool is_exact>
  void attend(int64_t row, int64_t key, int seen) {
    const int width = (seen + kLanes - 1) / kLanes * kLanes;
    Product::template multiply<false>(query_ + row * query_stride_, query_stride_, packed_keys_, kTileKeys, scores_,
                                      kTileKeys, units_, width);
    constexpr int64_t probs_stride = kTileKeys / kDepth;
    const auto in_tile = [&](float position) {
      return static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(position) - key, 0, seen));
    };
    for (int r = 0; r < kRows; ++r) {
      float* line = scores_ + r * kTileKeys;
      if (is_exact) std::fill_n(line, in_tile(tiles_.begins[row + r]), -std::numeric_limits<float>::infinity());
      const float shrink = soften<Tile<P>::kPrecision>(line, width, in_tile(tiles_.ends[row + r]), layer_.scale,
                                                       max_[row + r], sum_[row + r]);
      scale_row(values_ + (row + r) * padded_, padded_, shrink);
      Tile<P>::store_floats(probs_ + r * probs_stride, line);
    }
    Product::template multiply<true>(probs_, probs_stride, packed_values_, padded_, values_ + row * padded_, padded_,
                                     width / kDepth, padded_);
  }

  const Layer<T, S>& layer_;
  KeyTiles<T, S, P> tiles_;
  int64_t padded_, units_, query_stride_;
  Unit *query_, *probs_, *packed_keys_, *packed_values_;
  float *values_, *max_, *sum_, *scores_;
  P *zeros_, *line_;
};

}  // namespace v4flash
