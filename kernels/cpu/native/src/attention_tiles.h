// Attention of many rows by the tile unit: a slab of rows passes over tiles of 64 keys, each packed once for the whole
// slab. Rows lie in lanes: scores are [keys, rows] and results [dimensions, rows], so that maxima and sums of rows need
// nothing across lanes.
#pragma once
#include <limits>

#include "amx.h"
#include "key_tiles.h"

#if defined(__AMX_BF16__)
namespace v4flash {

template <class S>
class TileRows {
 public:
  using Unit = AmxProduct::Unit;
  using Mac = Tile<BF16>;
  static constexpr int kRows = AmxProduct::kRows, kDepth = Mac::kDepth;
  static constexpr int kGroup = 32;  // rows that are columns of one product
  static constexpr int kKeyUnits = kTileKeys / kDepth;
  // What a row's scores are measured from follows their maximum only when that is so many powers of two higher: results
  // are the same, and those of earlier tiles seldom have to shrink.
  static constexpr float kSlack = 8;
  static_assert(kSlabRows % kGroup == 0 && kGroup % kLanes == 0 && kGroup % AmxProduct::kColumns == 0);

  explicit TileRows(const Layer<BF16, S>& layer)
      : layer_(layer),
        tiles_(layer),
        depth_(up(layer.head_dim, kDepth * AmxProduct::kStep) / kDepth),
        value_rows_(up(layer.head_dim, kRows)) {
    Scratch& scratch = Scratch::of_thread<TileRows>();
    scratch.reset();
    query_ = scratch.take<Unit>(kSlabRows * depth_);
    values_ = scratch.take<float>(kSlabRows * value_rows_);
    max_ = scratch.take<float>(kSlabRows);
    sum_ = scratch.take<float>(kSlabRows);
    keys_ = scratch.take<Unit>(kTileKeys * depth_);
    packed_values_ = scratch.take<Unit>(value_rows_ * kKeyUnits);
    scores_ = scratch.take<float>(kTileKeys * kGroup);
    probs_ = scratch.take<Unit>(kKeyUnits * kGroup);
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
      for (int64_t row = 0; row < task.num_rows; row += kGroup) {
        const float seen = tiles_.ends[std::min(row + kGroup, task.num_rows) - 1] - first;
        if (seen <= 0 || tiles_.begins[row] >= first + static_cast<float>(count)) continue;
        attend<is_exact>(row, first, std::min(count, static_cast<int>(seen)));
      }
    });
    for (int64_t row = 0; row < task.num_rows; row += kLanes) {
      const float* from = values_ + row / kGroup * kGroup * value_rows_ + row % kGroup;
      for (int64_t d = 0; d < layer_.head_dim; d += kLanes) {
        Vec block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = load(from + (d + i) * kGroup);
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(result_ + i * value_rows_ + d, block[i]);
      }
      for (int64_t r = row; r < std::min(row + kLanes, task.num_rows); ++r) {
        finish(r, Partial{max_[r], sum_[r], result_ + (r - row) * value_rows_});
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
      pack_columns<BF16, kGroup>(rows, count, layer_.head_dim, query_ + row * depth_);
    }
    std::fill_n(values_, kSlabRows * value_rows_, 0.f);
    std::fill_n(max_, kSlabRows, kLowest);
    std::fill_n(sum_, kSlabRows, 0.f);
  }

  // Keys one after the other; of the values, line i has element i of all of them, zeros past the last.
  void pack(int count) {
    const int64_t dim = layer_.head_dim;
    const BF16 *const *keys = tiles_.keys, *const *values = tiles_.values;
    for (int j = 0; j < count; ++j) {
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
        transpose(block);
        for (int k = 0; k < kLanes && i + k < dim; ++k) {
          store(reinterpret_cast<float*>(packed_values_ + (i + k) * kKeyUnits + u), block[k]);
        }
      }
    }
  }

  // C [num_rows, kGroup] += A [num_rows, depth] B [depth, kGroup], num_rows rounded up to whole steps of the product.
  template <bool accumulate>
  static void multiply(const Unit* a, int64_t a_stride, int64_t num_rows, const Unit* b, int64_t depth, float* c) {
    for (int64_t r = 0; r < num_rows; r += kRows) {
      AmxProduct::multiply<accumulate>(a + r * a_stride, a_stride, b, kGroup, c + r * kGroup, kGroup, depth, kGroup);
    }
  }

  enum class Mask { kNone, kEnds, kBoth };

  // Rows row .. row + kGroup over the packed tile that begins at `first`, of which the last one sees `seen` keys.
  template <bool is_exact>
  void attend(int64_t row, float first, int seen) {
    multiply<false>(keys_, depth_, seen, query_ + row * depth_, depth_, scores_);
    const int64_t num_keys = up(seen, kDepth * AmxProduct::kStep);
    const bool is_masked = tiles_.ends[row] - first < static_cast<float>(num_keys);
    float* values = values_ + row * value_rows_;
    for (int i = 0; i < kGroup; i += kLanes) {
      if constexpr (is_exact) soften<Mask::kBoth>(row, i, first, num_keys, values + i);
      else if (is_masked) soften<Mask::kEnds>(row, i, first, num_keys, values + i);
      else soften<Mask::kNone>(row, i, first, num_keys, values + i);
    }
    multiply<true>(packed_values_, kKeyUnits, value_rows_, probs_, num_keys / kDepth, values);
  }

  // Probabilities of the rows in lanes i .. of a group from their scores; what was gathered earlier shrinks as it must.
  template <Mask mask>
  void soften(int64_t row, int i, float first, int64_t num_keys, float* values) {
    float* scores = scores_ + i;
    const Vec hidden = set(-std::numeric_limits<float>::infinity()), factor = set(layer_.scale);
    const Vec ends = load(tiles_.ends + row + i) - set(first), begins = load(tiles_.begins + row + i) - set(first);
    Vec highest = hidden, other = hidden;
    for (int64_t j = 0; j < num_keys; j += kDepth) {
      for (int k = 0; k < kDepth; ++k) {
        Vec x = load(scores + (j + k) * kGroup);
        if constexpr (mask != Mask::kNone) {
          x = where_less(set(static_cast<float>(j + k)), ends, x, hidden);
          if constexpr (mask == Mask::kBoth) x = where_less(begins, set(static_cast<float>(j + k + 1)), x, hidden);
          store(scores + (j + k) * kGroup, x);
        }
        (k ? other : highest) = max(k ? other : highest, x);
      }
    }
    const Vec before = load(max_ + row + i), now = max(highest, other) * factor;
    const Vec top = where_less(before + set(kSlack), now, now, before);
    Vec total = load(sum_ + row + i), rest = zero();
    if (any_less(before, top)) {
      const Vec shrink = exp2<Precision::kF32>(before - top);
      total = total * shrink;
      for (int64_t d = 0; d < value_rows_; ++d) store(values + d * kGroup, load(values + d * kGroup) * shrink);
    }
    const Vec below = zero() - top;
    float* to = reinterpret_cast<float*>(probs_) + i;
#pragma GCC unroll 2
    for (int64_t j = 0; j < num_keys; j += kDepth, to += kGroup) {
      Vec p[kDepth];
      for (int k = 0; k < kDepth; ++k) {
        p[k] = probability(fma(load(scores + (j + k) * kGroup), factor, below));
        (k ? rest : total) = (k ? rest : total) + p[k];
      }
      store(to, pairs_of(p[0], p[1]));
    }
    store(max_ + row + i, top);
    store(sum_ + row + i, total + rest);
  }

  // 2^x up to 2^127 as `exp2` gives it, at least 2^-126. The sum with `integers` has the exponent in its lowest bits,
  // which takes half the instructions of rounding and scaling.
  static Vec probability(Vec x) {
    const Vec integers = set(12582912.f);
    x = max(set(-126.f), x);
    const Vec n = x + integers, r = x - (n - integers);
    const Vec p = exp2_near_zero<Precision::kBF16>(r);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
  }
  // Units that pair one lane of each.
  static Vec pairs_of(Vec even, Vec odd) {
    const __m512i second =
        _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
                          0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    const auto halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(second, halves));
  }

  const Layer<BF16, S>& layer_;
  KeyTiles<BF16, S, BF16> tiles_;
  [[maybe_unused]] const AmxProduct set_up_;
  int64_t depth_, value_rows_;
  Unit *query_, *probs_, *keys_, *packed_values_;
  float *values_, *max_, *sum_, *scores_, *result_;
  BF16* zeros_;
};

}  // namespace v4flash
#endif
