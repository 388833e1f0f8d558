// Attention of many rows in bfloat16: a slab of rows passes over tiles of 64 keys, each packed once for the whole slab.
// Rows lie in lanes: scores are [keys, rows] and results [dimensions, rows], so that maxima and sums of rows need
// nothing across lanes. While vectors make probabilities of some rows, a tile unit gathers the values of those before
// and scores those behind them.
#pragma once
#include <limits>

#include "key_tiles.h"
#include "tile_softmax.h"
#include "tile_strips.h"
#include "vector_strips.h"

#if defined(__AVX512BF16__)
namespace v4flash {

// Strips multiplies: TileStrips or VectorStrips.
template <class S, class Strips>
class TileRows {
 public:
  using Unit = Strips::Unit;
  using Mac = Tile<BF16>;
  static constexpr int kRows = Strips::kRows, kDepth = Mac::kDepth, kStep = Strips::kStep;
  static constexpr int kGroup = Strips::kColumns;  // rows that are columns of one product
  static constexpr int kKeyUnits = kTileKeys / kDepth;
  static constexpr int64_t kMaxSlabRows = kSlabRows;
  static_assert(kSlabRows % kGroup == 0 && kGroup % kLanes == 0 && kDepth * kStep % TileSoftmax::kKeys == 0);

  explicit TileRows(const Layer<BF16, S>& layer)
      : layer_(layer),
        tiles_(layer),
        softmax_(layer.scale),
        depth_(up(layer.head_dim, kDepth * kStep) / kDepth),
        value_rows_(up(layer.head_dim, kRows)) {
    Scratch& scratch = Scratch::of_thread<TileRows>();
    scratch.reset();
    query_ = scratch.take<Unit>(kSlabRows * depth_);
    values_ = scratch.take<float>(kSlabRows * value_rows_);
    top_ = scratch.take<float>(kSlabRows);
    sum_ = scratch.take<float>(kSlabRows);
    keys_ = scratch.take<Unit>(kTileKeys * depth_);
    packed_values_ = scratch.take<Unit>(value_rows_ * kKeyUnits);
    for (float*& scores : scores_) scores = scratch.take<float>(kTileKeys * kGroup);
    for (Unit*& probs : probs_) probs = scratch.take<Unit>(kKeyUnits * kGroup);
    result_ = scratch.take<float>(kLanes * value_rows_);
    zeros_ = scratch.take<BF16>(layer.head_dim);
    std::fill_n(query_, kSlabRows * depth_, Unit{0});  // what lies past the units of a row stays zero
    std::fill_n(packed_values_, value_rows_ * kKeyUnits, Unit{0});
    std::fill_n(zeros_, layer.head_dim, BF16(0.f));
  }

  // finish(row of the slab, partial) is called for each row.
  template <class Finish>
  void run(const ManyTask& task, Finish finish) {
    start(task);
    tiles_.each(task, [&](int64_t key, int count, auto is_exact) {
      pack(count);
      const auto first = static_cast<float>(key);
      const auto seen = [&](int64_t row) {  // keys of the tile that one of a group sees, or none
        if (tiles_.begins[row] >= first + static_cast<float>(count)) return 0;
        const float end = tiles_.ends[std::min(row + kGroup, task.num_rows) - 1] - first;
        return std::min(count, static_cast<int>(std::max(0.f, end)));
      };
      const auto next = [&](int64_t row) {
        while (row < task.num_rows && seen(row) == 0) row += kGroup;
        return row;
      };
      int64_t row = next(0);
      if (row < task.num_rows) start_scores(row, seen(row));
      while (row < task.num_rows) {
        scoring_.finish();
        const int64_t after = next(row + kGroup), num_seen = seen(row);
        turn_ ^= 1;
        if (after < task.num_rows) start_scores(after, seen(after));
        attend<is_exact>(row, first, num_seen);
        row = after;
      }
      gathering_.finish();
    });
    for (int64_t row = 0; row < task.num_rows; row += kLanes) {
      const float* from = values_ + row / kGroup * kGroup * value_rows_ + row % kGroup;
      for (int64_t d = 0; d < layer_.head_dim; d += kLanes) {
        Vec block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = load(from + (d + i) * kGroup);
        Strips::keep_awake();
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(result_ + i * value_rows_ + d, block[i] * set(TileSoftmax::kOne));
      }
      for (int64_t r = row; r < std::min(row + kLanes, task.num_rows); ++r) {
        finish(r, Partial{top_[r] * layer_.scale, sum_[r] * TileSoftmax::kOne, result_ + (r - row) * value_rows_});
      }
    }
  }

 private:
  static constexpr int64_t up(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

  // The query in columns.
  void start(const ManyTask& task) {
    for (int64_t row = 0; row < task.num_rows; row += kGroup) {
      const auto count = static_cast<int>(std::min<int64_t>(kGroup, task.num_rows - row));
      const BF16* rows[kGroup];
      for (int r = 0; r < count; ++r) {
        const int64_t token = task.first_token + (row + r) / layer_.group, head = (row + r) % layer_.group;
        rows[r] = layer_.query_row(token, task.kv_head * layer_.group + head);
      }
      Strips::keep_awake();
      pack_columns<BF16, kGroup>(rows, count, layer_.head_dim, query_ + row * depth_);
    }
    const int64_t num_rows = up(task.num_rows, kGroup);
    std::fill_n(values_, num_rows * value_rows_, 0.f);
    std::fill_n(top_, num_rows, kLowest);
    std::fill_n(sum_, num_rows, 0.f);
  }

  // Keys one after the other; of the values, line i has element i of all of them, zeros past the last.
  void pack(int count) {
    const int64_t dim = layer_.head_dim;
    const BF16 *const *keys = tiles_.keys, *const *values = tiles_.values;
    for (int j = 0; j < count; ++j) {
      if (j % 16 == 0) Strips::keep_awake();
      for (int64_t u = 0; u < depth_; u += kLanes) {
        const int64_t left = std::max<int64_t>(0, dim - u * kDepth);
        store(reinterpret_cast<float*>(keys_ + j * depth_ + u), Mac::units_of_row(keys[j] + u * kDepth, left));
      }
    }
    for (int u = 0; u < kKeyUnits; u += kLanes) {
      for (int64_t i = 0; i < dim; i += kLanes) {
        Vec block[kLanes];
        for (int k = 0; k < kLanes; ++k) {
          const int j = (u + k) * kDepth;
          const BF16* pair[] = {j < count ? values[j] : zeros_, j + 1 < count ? values[j + 1] : zeros_};
          block[k] = Mac::units_of_rows(pair, i, static_cast<int>(std::min<int64_t>(kLanes, dim - i)));
        }
        Strips::keep_awake();
        transpose(block);
        for (int k = 0; k < kLanes && i + k < dim; ++k) {
          store(reinterpret_cast<float*>(packed_values_ + (i + k) * kKeyUnits + u), block[k]);
        }
      }
    }
  }

  // Scores of a group go where those of the group before do not lie.
  void start_scores(int64_t row, int64_t num_seen) {
    scoring_ = Strips(keys_, depth_, num_seen, query_ + row * depth_, depth_, scores_[turn_ ^ 1], false);
  }

  enum class Mask { kNone, kEnds, kBoth };

  // Rows row .. row + kGroup over the packed tile that begins at `first`, of which the last one sees `num_seen` keys.
  // Their scores are there; their values are still to be gathered afterwards.
  template <bool is_exact>
  void attend(int64_t row, float first, int64_t num_seen) {
    const int64_t num_keys = up(num_seen, kDepth * kStep);
    const bool is_masked = tiles_.ends[row] - first < static_cast<float>(num_keys);
    for (int i = 0; i < kGroup; i += kLanes) {
      if constexpr (is_exact) hide<Mask::kBoth>(row, i, first, num_keys);
      else if (is_masked) hide<Mask::kEnds>(row, i, first, num_keys);
      soften(row, i, num_keys);
    }
    gathering_.finish();
    gathering_ = Strips(packed_values_, kKeyUnits, value_rows_, probs_[turn_], num_keys / kDepth,
                        values_ + row * value_rows_, true);
  }

  // Scores of keys that the rows in lanes i .. of a group do not see.
  template <Mask mask>
  void hide(int64_t row, int i, float first, int64_t num_keys) {
    float* scores = scores_[turn_] + i;
    const Vec hidden = set(-std::numeric_limits<float>::infinity());
    const Vec ends = load(tiles_.ends + row + i) - set(first), begins = load(tiles_.begins + row + i) - set(first);
    for (int64_t j = 0; j < num_keys; ++j, scores += kGroup) {
      Vec x = where_less(set(static_cast<float>(j)), ends, load(scores), hidden);
      if constexpr (mask == Mask::kBoth) x = where_less(begins, set(static_cast<float>(j + 1)), x, hidden);
      store(scores, x);
    }
  }

  // Probabilities of the rows in lanes i .. of a group from their scores; what was gathered earlier shrinks as it must.
  void soften(int64_t row, int i, int64_t num_keys) {
    const float* scores = scores_[turn_] + i;
    Unit* to = probs_[turn_] + i;
    const Vec top = load(top_ + row + i), before = load(sum_ + row + i);
    Vec sum = before;
    const auto weigh = [&](Vec above) {
      return softmax_.weigh(scores, to, kGroup, num_keys, above, sum, [this] { multiply_some(); });
    };
    if (any_less(top, set(kLowest / 2)) || !weigh(top)) {  // a row that has seen no key has no top
      const Vec raised = softmax_.raised(top, scores, kGroup, num_keys);
      const Vec shrink = exp2<Precision::kF32>(softmax_.exponent(top, raised));
      float* values = values_ + row * value_rows_ + i;
      for (int64_t d = 0; d < value_rows_; ++d) store(values + d * kGroup, load(values + d * kGroup) * shrink);
      sum = before * shrink;
      weigh(raised);
      store(top_ + row + i, raised);
    }
    store(sum_ + row + i, sum);
  }

  void multiply_some() {
    if (!gathering_.is_done()) gathering_.step();
    else if (!scoring_.is_done()) scoring_.step();
    else Strips::keep_awake();
  }

  const Layer<BF16, S>& layer_;
  KeyTiles<BF16, S, BF16> tiles_;
  [[maybe_unused]] typename Strips::SetUp set_up_;
  const TileSoftmax softmax_;
  int64_t depth_, value_rows_;
  Strips gathering_, scoring_;
  int turn_ = 0;  // which scores and probabilities are those of the present group
  Unit *query_, *probs_[2], *keys_, *packed_values_;
  float *values_, *top_, *sum_, *scores_[2], *result_;
  BF16* zeros_;
};

}  // namespace v4flash
#endif
