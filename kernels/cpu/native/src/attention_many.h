// Attention of many rows (prefill, or the sharers of a prefix): a slab of rows passes over tiles of 64 keys, each packed
// once for the whole slab. Rows lie in lanes: scores are [keys, rows] and results [dimensions, rows], so that maxima and
// sums of rows need nothing across lanes.
#pragma once
#include "parallel.h"
#include "paged.h"
#include "tile.h"

namespace v4flash {

// Row r of the slab is head r % group of token first_token + r / group. Token t sees the keys up to position
// t + position_offset, if `causal`, and never beyond `num_keys`.
struct ManyTask {
  int64_t seq, kv_head, first_key, num_keys, first_token, num_rows, position_offset;
  bool causal;
};

constexpr int64_t kSlabRows = 192;

template <class T, class Product>
class ManyRows {
 public:
  using Unit = typename Tile<T>::Unit;
  static constexpr int kRows = Product::kRows, kDepth = Tile<T>::kDepth;
  static constexpr int kGroup = 32;  // rows that are columns of one product
  static constexpr int kKeyUnits = kTileKeys / kDepth;
  // What a row's scores are measured from follows their maximum only when that is so many powers of two higher: results
  // are the same, and those of earlier tiles seldom have to shrink.
  static constexpr float kSlack = 8;
  static_assert(kSlabRows % kGroup == 0 && kGroup % kLanes == 0 && kGroup % Product::kColumns == 0);

  explicit ManyRows(const Paged<T>& paged)
      : paged_(paged),
        depth_(up((paged.head_dim + kDepth - 1) / kDepth, Product::kStep)),
        key_stride_(up(depth_, kLanes)),
        value_rows_(up(paged.head_dim, kRows)),
        padded_(up(paged.head_dim, kLanes)) {
    Scratch& scratch = Scratch::of_thread<ManyRows>();
    constexpr int64_t key_rows = up(kTileKeys, kRows);
    scratch.reset(Scratch::padded<Unit>(kSlabRows * depth_) + Scratch::padded<float>(kSlabRows * value_rows_) +
                  3 * Scratch::padded<float>(kSlabRows) + Scratch::padded<Unit>(key_rows * key_stride_) +
                  Scratch::padded<Unit>(up(value_rows_, kLanes) * kKeyUnits) + Scratch::padded<float>(key_rows * kGroup) +
                  Scratch::padded<Unit>(kKeyUnits * kGroup) + Scratch::padded<float>(kLanes * padded_) +
                  Scratch::padded<T>(padded_) + Scratch::padded<const T*>(kTileKeys));
    query_ = scratch.take<Unit>(kSlabRows * depth_);
    values_ = scratch.take<float>(kSlabRows * value_rows_);
    max_ = scratch.take<float>(kSlabRows);
    sum_ = scratch.take<float>(kSlabRows);
    limits_ = scratch.take<float>(kSlabRows);
    keys_ = scratch.take<Unit>(key_rows * key_stride_);
    packed_values_ = scratch.take<Unit>(up(value_rows_, kLanes) * kKeyUnits);
    scores_ = scratch.take<float>(key_rows * kGroup);
    probs_ = scratch.take<Unit>(kKeyUnits * kGroup);
    result_ = scratch.take<float>(kLanes * padded_);
    zeros_ = scratch.take<T>(padded_);
    rows_ = scratch.take<const T*>(kTileKeys);
    std::fill_n(query_, kSlabRows * depth_, Unit{0});  // what lies past the units of a row stays zero
    std::fill_n(packed_values_, value_rows_ * kKeyUnits, Unit{0});
    std::fill_n(zeros_, padded_, T(0.f));
  }

  // finish(row of the slab, partial) is called for each row.
  template <class Finish>
  void run(const ManyTask& task, Finish finish) {
    start(task);
    const int64_t end = task.first_key + static_cast<int64_t>(limits_[task.num_rows - 1]);
    for (int64_t key = task.first_key; key < end; key += kTileKeys) {
      pack(task, key, static_cast<int>(std::min<int64_t>(kTileKeys, task.first_key + task.num_keys - key)));
      const auto passed = static_cast<float>(key - task.first_key);
      for (int64_t row = 0; row < task.num_rows; row += kGroup) {
        const float most = limits_[std::min(row + kGroup, task.num_rows) - 1] - passed;
        if (most > 0) attend(row, passed, static_cast<int>(std::min<float>(kTileKeys, most)));
      }
    }
    for (int64_t row = 0; row < task.num_rows; row += kLanes) {
      const float* from = values_ + row / kGroup * kGroup * value_rows_ + row % kGroup;
      for (int64_t d = 0; d < paged_.head_dim; d += kLanes) {
        Vec block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = d + i < value_rows_ ? load(from + (d + i) * kGroup) : zero();
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(result_ + i * padded_ + d, block[i]);
      }
      for (int64_t r = row; r < std::min(row + kLanes, task.num_rows); ++r) {
        finish(r, Partial{max_[r], sum_[r], result_ + (r - row) * padded_});
      }
    }
  }

 private:
  static constexpr int64_t up(int64_t n, int64_t size) { return (n + size - 1) / size * size; }

  // The query in columns; how many keys each row sees, from the first of the task on.
  void start(const ManyTask& task) {
    const int64_t all = task.first_key + task.num_keys;
    for (int64_t row = 0; row < task.num_rows; row += kGroup) {
      const auto count = static_cast<int>(std::min<int64_t>(kGroup, task.num_rows - row));
      for (int r = 0; r < kGroup; ++r) {
        const int64_t token = task.first_token + (row + r) / paged_.group, head = (row + r) % paged_.group;
        if (r < count) rows_[r] = paged_.query_row(token, task.kv_head * paged_.group + head);
        const int64_t end = task.causal ? std::min(all, token + task.position_offset + 1) : all;
        limits_[row + r] = r < count ? static_cast<float>(end - task.first_key) : 0.f;
      }
      pack_columns<T, kGroup>(rows_, count, paged_.head_dim, query_ + row * depth_);
    }
    std::fill_n(values_, kSlabRows * value_rows_, 0.f);
    std::fill_n(max_, kSlabRows, kLowest);
    std::fill_n(sum_, kSlabRows, 0.f);
  }

  void pack(const ManyTask& task, int64_t key, int count) {
    const int64_t dim = paged_.head_dim;
    paged_.key_rows(task.seq, task.kv_head, key, count, rows_);
    for (int j = 0; j < count; ++j) {
      for (int64_t u = 0; u < depth_; u += kLanes) {
        const int64_t left = std::max<int64_t>(0, dim - u * kDepth);
        store(reinterpret_cast<float*>(keys_ + j * key_stride_ + u), Tile<T>::units_of_row(rows_[j] + u * kDepth, left));
      }
    }
    for (int j = 0; j < count; ++j) rows_[j] += paged_.value_offset;
    pack_transposed<T>(rows_, count, dim, zeros_, packed_values_);
  }

  // C [num_rows, kGroup] += A [num_rows, depth] B [depth, kGroup], num_rows rounded up to whole steps of the product.
  template <bool accumulate>
  void multiply(const Unit* a, int64_t a_stride, int64_t num_rows, const Unit* b, int64_t depth, float* c) const {
    for (int64_t r = 0; r < num_rows; r += kRows) {
      product_.template multiply<accumulate>(a + r * a_stride, a_stride, b, kGroup, c + r * kGroup, kGroup, depth,
                                             kGroup);
    }
  }

  // Rows row .. row + kGroup over the packed tile, of which the last one sees `seen` keys; `passed` ones lie before it.
  void attend(int64_t row, float passed, int seen) {
    multiply<false>(keys_, key_stride_, seen, query_ + row * depth_, depth_, scores_);
    const int64_t depth = up((seen + kDepth - 1) / kDepth, Product::kStep), num_keys = depth * kDepth;
    const bool is_masked = limits_[row] - passed < static_cast<float>(num_keys);
    float* values = values_ + row * value_rows_;
    for (int i = 0; i < kGroup; i += kLanes) {
      is_masked ? soften<true>(row, i, passed, num_keys, values + i) : soften<false>(row, i, passed, num_keys, values + i);
    }
    multiply<true>(packed_values_, kKeyUnits, value_rows_, probs_, depth, values);
  }

  // Probabilities of the rows in lanes i .. of a group from their scores; what was gathered earlier shrinks as it must.
  template <bool is_masked>
  void soften(int64_t row, int i, float passed, int64_t num_keys, float* values) {
    float* scores = scores_ + i;
    const Vec hidden = set(-std::numeric_limits<float>::infinity()), factor = set(paged_.scale);
    const Vec limits = load(limits_ + row + i) - set(passed);
    Vec highest = hidden, other = hidden;
    for (int64_t j = 0; j < num_keys; j += kDepth) {
      for (int k = 0; k < kDepth; ++k) {
        Vec x = load(scores + (j + k) * kGroup);
        if constexpr (is_masked) {
          x = where_less(set(static_cast<float>(j + k)), limits, x, hidden);
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
        p[k] = Tile<T>::probability(fma(load(scores + (j + k) * kGroup), factor, below));
        (k ? rest : total) = (k ? rest : total) + p[k];
      }
      store(to, Tile<T>::units_of_floats(p));
    }
    store(max_ + row + i, top);
    store(sum_ + row + i, total + rest);
  }

  const Paged<T>& paged_;
  Product product_;
  int64_t depth_, key_stride_, value_rows_, padded_;
  Unit *query_, *probs_, *keys_, *packed_values_;
  float *values_, *max_, *sum_, *limits_, *scores_, *result_;
  T* zeros_;
  const T** rows_;
};

}  // namespace v4flash
