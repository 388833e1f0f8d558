// Attention of many rows (prefill, or the sharers of a prefix) over stored blocks: codes are packed as they are, since
// int8 is exact in bfloat16, and scales act on scores and probabilities. The rows' own blocks come last.
#pragma once
#include "attention_many.h"
#include "stored_kv.h"

namespace v4flash {

// Products are computed in P: T, or float where the body holds more digits than T does.
template <class T, class S, class P, class Product>
class StoredMany {
 public:
  using Unit = typename Tile<P>::Unit;
  static constexpr int kRows = Product::kRows;
  static_assert(kSlabRows % kRows == 0 && kTileKeys % Product::kColumns == 0 && kTileKeys <= kScaleStride);

  explicit StoredMany(const StoredKV<T, S>& kv)
      : kv_(kv),
        group_dim_(std::min(kv.group_size, kv.head_dim)),
        padded_((group_dim_ + kLanes - 1) / kLanes * kLanes),
        depth_(((group_dim_ + Tile<P>::kDepth - 1) / Tile<P>::kDepth + Product::kStep - 1) / Product::kStep *
               Product::kStep),
        query_stride_((depth_ + kLanes - 1) / kLanes * kLanes),
        width_(kv.num_groups * padded_) {
    const int64_t groups = kv.num_groups, row_units = kTileKeys / Tile<P>::kDepth, dim = kv.head_dim + kLanes;
    Scratch& scratch = Scratch::of_thread<StoredMany>();
    scratch.reset(Scratch::padded<Unit>(groups * kSlabRows * query_stride_) + Scratch::padded<float>(kSlabRows * width_) +
                  2 * Scratch::padded<float>(kSlabRows) + 2 * Scratch::padded<float>(kRows * kTileKeys) +
                  Scratch::padded<Unit>(kRows * kTileKeys) + Scratch::padded<float>(kTileKeys) +
                  Scratch::padded<Unit>(groups * depth_ * kTileKeys) + Scratch::padded<Unit>(groups * row_units * padded_) +
                  Scratch::padded<P>(padded_) + 2 * Scratch::padded<P>(kTileKeys * dim) +
                  2 * Scratch::padded<float>(groups * kScaleStride) + Scratch::padded<const S*>(kTileKeys) +
                  Scratch::padded<const T*>(kTileKeys) + Scratch::padded<const P*>(kTileKeys));
    query_ = scratch.take<Unit>(groups * kSlabRows * query_stride_);
    values_ = scratch.take<float>(kSlabRows * width_);
    max_ = scratch.take<float>(kSlabRows);
    sum_ = scratch.take<float>(kSlabRows);
    scores_ = scratch.take<float>(kRows * kTileKeys);
    part_ = scratch.take<float>(kRows * kTileKeys);
    probs_ = scratch.take<Unit>(kRows * kTileKeys);
    line_ = scratch.take<float>(kTileKeys);
    packed_keys_ = scratch.take<Unit>(groups * depth_ * kTileKeys);
    packed_values_ = scratch.take<Unit>(groups * row_units * padded_);
    zeros_ = scratch.take<P>(padded_);
    keys_ = scratch.take<P>(kTileKeys * dim);
    values_of_keys_ = scratch.take<P>(kTileKeys * dim);
    key_scales_ = scratch.take<float>(groups * kScaleStride);
    value_scales_ = scratch.take<float>(groups * kScaleStride);
    rows_ = scratch.take<const S*>(kTileKeys);
    own_rows_ = scratch.take<const T*>(kTileKeys);
    tile_rows_ = scratch.take<const P*>(kTileKeys);
    std::fill_n(zeros_, padded_, P(0.f));
    std::fill_n(packed_keys_, groups * depth_ * kTileKeys, Unit{0});  // what lies past the units of a row stays zero
    std::fill_n(packed_values_, groups * row_units * padded_, Unit{0});
    std::fill_n(key_scales_, groups * kScaleStride, 0.f);
    std::fill_n(value_scales_, groups * kScaleStride, 0.f);
  }

  // finish(row of the slab, partial) is called for each row.
  template <class Finish>
  void run(const ManyTask& task, Finish finish) {
    start(task);
    const int64_t end = task.first_key + task.num_keys;
    const int64_t last_position = position(task, task.num_rows - 1);
    const int64_t stored_end = task.causal ? std::min(end, kv_.block_start(last_position)) : end;
    for (int64_t key = task.first_key; key < stored_end; key += kTileKeys) {
      const int64_t count = std::min<int64_t>(kTileKeys, stored_end - key);
      kv_.body_rows(task.seq, task.kv_head, key, count, rows_);
      if (kv_.scales) {
        kv_.read_scales(task.seq, 0, task.kv_head, key, count, key_scales_);
        kv_.read_scales(task.seq, 1, task.kv_head, key, count, value_scales_);
      }
      pack(rows_, static_cast<int>(count), kv_.body_layout().value_offset);
      each_rows(task, kv_.scales != nullptr, [&](int64_t row) {
        const int64_t own = task.causal ? kv_.block_start(position(task, row)) : end;
        return Window{0, static_cast<int>(std::clamp<int64_t>(own - key, 0, count))};
      });
    }
    if (task.causal) {
      const int64_t own_first = std::max(task.first_key, kv_.block_start(position(task, 0)));
      for (int64_t key = own_first; key <= last_position; key += kTileKeys) {
        const int64_t count = std::min<int64_t>(kTileKeys, last_position + 1 - key);
        kv_.exact_rows(task.seq, task.kv_head, key, count, own_rows_);
        pack(own_rows_, static_cast<int>(count), kv_.exact_layout().value_offset);
        each_rows(task, false, [&](int64_t row) {
          const int64_t at = position(task, row);
          return Window{static_cast<int>(std::clamp<int64_t>(kv_.block_start(at) - key, 0, count)),
                        static_cast<int>(std::clamp<int64_t>(at + 1 - key, 0, count))};
        });
      }
    }
    for (int64_t r = 0; r < task.num_rows; ++r) finish(r, Partial{max_[r], sum_[r], compact(values_ + r * width_)});
  }

 private:
  struct Window {  // keys of a tile that a row sees
    int begin, end;
  };

  int64_t position(const ManyTask& task, int64_t row) const {
    return task.first_token + std::min(row, task.num_rows - 1) / kv_.group + task.position_offset;
  }

  void start(const ManyTask& task) {
    std::fill_n(query_, kv_.num_groups * kSlabRows * query_stride_, Unit{0});
    for (int64_t r = 0; r < task.num_rows; ++r) {
      const T* q = kv_.query_row(task.first_token + r / kv_.group, task.kv_head * kv_.group + r % kv_.group);
      widen_row(q, kv_.head_dim, keys_);
      for (int64_t g = 0; g < kv_.num_groups; ++g) {
        const int64_t dim = kv_.group_dim(g);
        Unit* to = query_ + (g * kSlabRows + r) * query_stride_;
        for (int64_t u = 0; u * Tile<P>::kDepth < dim; u += kLanes) {
          const int64_t offset = u * Tile<P>::kDepth;
          store(reinterpret_cast<float*>(to + u),
                Tile<P>::units_of_row(keys_ + g * kv_.group_size + offset, dim - offset));
        }
      }
    }
    std::fill_n(values_, kSlabRows * width_, 0.f);
    std::fill_n(max_, kSlabRows, kLowest);
    std::fill_n(sum_, kSlabRows, 0.f);
  }

  template <class X>
  static void widen_row(const X* from, int64_t dim, P* to) {
    for_lanes(dim, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(from + i, lanes), lanes); });
  }

  // Keys and values of a tile in P, group by group.
  template <class X>
  void pack(const X* const* rows, int count, int64_t value_offset) {
    const int64_t dim = kv_.head_dim, row_units = kTileKeys / Tile<P>::kDepth;
    for (int j = 0; j < count; ++j) {
      widen_row(rows[j], dim, keys_ + j * dim);
      widen_row(rows[j] + value_offset, dim, values_of_keys_ + j * dim);
    }
    for (int64_t g = 0; g < kv_.num_groups; ++g) {
      for (int j = 0; j < count; ++j) tile_rows_[j] = keys_ + j * dim + g * kv_.group_size;
      pack_columns<P>(tile_rows_, count, kv_.group_dim(g), packed_keys_ + g * depth_ * kTileKeys);
      for (int j = 0; j < count; ++j) tile_rows_[j] = values_of_keys_ + j * dim + g * kv_.group_size;
      pack_rows<P>(tile_rows_, count, kv_.group_dim(g), zeros_, padded_, packed_values_ + g * row_units * padded_);
    }
  }

  template <class WindowOf>
  void each_rows(const ManyTask& task, bool is_scaled, WindowOf window) {
    for (int64_t r = 0; r < task.num_rows; r += kRows) {
      const int64_t last = std::min(r + kRows, task.num_rows) - 1;  // it sees no less far than those before it
      const int seen = window(last).end;
      if (seen > 0) attend(r, seen, is_scaled, window);
    }
  }

  // Rows row .. row + kRows over the packed tile, of which at most `seen` keys count.
  template <class WindowOf>
  void attend(int64_t row, int seen, bool is_scaled, WindowOf window) {
    const int width = (seen + Product::kColumns - 1) / Product::kColumns * Product::kColumns;
    for (int64_t g = 0; g < kv_.num_groups; ++g) {
      float* to = g == 0 ? scores_ : part_;
      product_.template multiply<false>(query_ + (g * kSlabRows + row) * query_stride_, query_stride_,
                                        packed_keys_ + g * depth_ * kTileKeys, kTileKeys, to, kTileKeys, depth_, width);
      if (!is_scaled && g == 0) continue;
      for (int r = 0; r < kRows; ++r) {
        for (int j = 0; j < width; j += kLanes) {
          Vec x = load(to + r * kTileKeys + j);
          if (is_scaled) x = x * load(key_scales_ + g * kScaleStride + j);
          store(scores_ + r * kTileKeys + j, g == 0 ? x : x + load(scores_ + r * kTileKeys + j));
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const Window sees = window(row + r);
      float* line = scores_ + r * kTileKeys;
      std::fill_n(line, sees.begin, -std::numeric_limits<float>::infinity());
      const float shrink = soften<precision>(line, width, std::min(sees.end, seen), kv_.scale, max_[row + r],
                                             sum_[row + r]);
      std::fill(line + width, line + kTileKeys, 0.f);
      scale_row(values_ + (row + r) * width_, width_, shrink);
    }
    constexpr int64_t probs_stride = kTileKeys / Tile<P>::kDepth;
    const int64_t depth = (width + Tile<P>::kDepth - 1) / Tile<P>::kDepth;
    for (int64_t g = 0; g < kv_.num_groups; ++g) {
      for (int r = 0; r < kRows; ++r) {
        const float* from = scores_ + r * kTileKeys;
        if (is_scaled) {
          for (int j = 0; j < width; j += kLanes) {
            // a scale past the tile's keys belongs to other keys, and a probability of zero hides any number but NaN
            const Vec scales = keep_first(load(value_scales_ + g * kScaleStride + j), seen - j, zero());
            store(line_ + j, load(from + j) * scales);
          }
          std::fill(line_ + width, line_ + kTileKeys, 0.f);
          from = line_;
        }
        Tile<P>::store_floats(probs_ + r * probs_stride, from);
      }
      product_.template multiply<true>(probs_, probs_stride, packed_values_ + g * probs_stride * padded_, padded_,
                                       values_ + row * width_ + g * padded_, width_, depth, padded_);
    }
  }

  // Moves the groups of a row together.
  const float* compact(float* row) const {
    for (int64_t g = 1; g < kv_.num_groups && padded_ != kv_.group_size; ++g) {
      std::copy_n(row + g * padded_, kv_.group_dim(g), row + g * kv_.group_size);
    }
    return row;
  }

  static constexpr Precision precision = Tile<P>::kPrecision;
  const StoredKV<T, S>& kv_;
  Product product_;
  int64_t group_dim_, padded_, depth_, query_stride_, width_;
  Unit *query_, *probs_, *packed_keys_, *packed_values_;
  float *values_, *max_, *sum_, *scores_, *part_, *line_, *key_scales_, *value_scales_;
  P *zeros_, *keys_, *values_of_keys_;
  const S** rows_;
  const T** own_rows_;
  const P** tile_rows_;
};

}  // namespace v4flash
