// Feeds attention of many rows: tiles of 64 keys and values as rows of P, stored ones decoded once for a whole slab.
#pragma once
#include "paged.h"
#include "parallel.h"
#include "tile.h"

namespace v4flash {

// Row r of the slab is head r % group of token first_token + r / group. Token t is at position t + position_offset and
// sees the keys up to there, if `causal`, and never beyond `num_keys`.
struct ManyTask {
  int64_t seq, kv_head, first_key, num_keys, first_token, num_rows, position_offset;
  bool causal;
};

constexpr int64_t kSlabRows = 768;  // at most

// A row as one of P: itself, or a copy in `to`.
template <class P, class X>
inline const P* as_row_of(const X* from, int64_t dim, P* to) {
  if constexpr (std::is_same_v<P, X>) {
    return from;
  } else {
    for_lanes(dim, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(from + i, lanes), lanes); });
    return to;
  }
}

template <class T, class S, class P>
class KeyTiles {
 public:
  explicit KeyTiles(const Layer<T, S>& layer) : layer_(layer) {
    Scratch& scratch = Scratch::of_thread<KeyTiles>();
    scratch.reset();
    begins = scratch.take<float>(kSlabRows);
    ends = scratch.take<float>(kSlabRows);
    keys = scratch.take<const P*>(kTileKeys);
    values = scratch.take<const P*>(kTileKeys);
    if constexpr (Layer<T, S>::kHasExact) {
      decoded_keys_ = scratch.take<P>(kTileKeys * layer.head_dim);
      decoded_values_ = scratch.take<P>(kTileKeys * layer.head_dim);
    }
  }

  // Calls f(position of the first key, number of keys, whether they are exact ones) tile by tile. Rows of the slab see
  // the keys at begins .. ends; where keys are not exact, begins are zero.
  template <class F>
  void each(const ManyTask& task, F f) {
    const int64_t end = task.first_key + task.num_keys, last_row = task.num_rows - 1;
    const auto position = [&](int64_t row) {
      return task.first_token + std::min(row, last_row) / layer_.group + task.position_offset;
    };
    const auto body_window = [&](int64_t row) {
      return task.causal ? layer_.body_window(position(row)) : Window{0, end};
    };
    const int64_t num_rows = std::min(kSlabRows, (task.num_rows + kTileKeys - 1) / kTileKeys * kTileKeys);
    set_windows(num_rows, body_window);
    const int64_t body_end = std::min(end, body_window(last_row).end);
    for (int64_t key = task.first_key; key < body_end; key += kTileKeys) {
      const int64_t count = std::min<int64_t>(kTileKeys, body_end - key);
      find_body(task, key, count);
      f(key, static_cast<int>(count), std::false_type{});
    }
    if constexpr (Layer<T, S>::kHasExact) {
      if (!task.causal) return;
      const auto exact_window = [&](int64_t row) { return layer_.exact_window(position(row)); };
      set_windows(num_rows, exact_window);
      const int64_t exact_end = exact_window(last_row).end;
      for (int64_t key = std::max(task.first_key, exact_window(0).begin); key < exact_end; key += kTileKeys) {
        const int64_t count = std::min<int64_t>(kTileKeys, exact_end - key);
        find_exact(task, key, count);
        f(key, static_cast<int>(count), std::true_type{});
      }
    }
  }

  float *begins, *ends;      // by row of the slab
  const P **keys, **values;  // rows of the present tile

 private:
  template <class F>
  void set_windows(int64_t num_rows, F window) {
    for (int64_t r = 0, end = layer_.group; r < num_rows; end += layer_.group) {  // rows of a token see the same
      const Window sees = window(r);
      for (; r < std::min(end, num_rows); ++r) {
        begins[r] = static_cast<float>(sees.begin);
        ends[r] = static_cast<float>(sees.end);
      }
    }
  }

  void find_body(const ManyTask& task, int64_t first, int64_t count) {
    if constexpr (Layer<T, S>::kHasExact) {
      decode(task, false, first, count, decoded_keys_, keys);
      decode(task, true, first, count, decoded_values_, values);
    } else {
      layer_.body_rows(task.seq, task.kv_head, first, count, keys);
      for (int64_t j = 0; j < count; ++j) values[j] = keys[j] + layer_.body_layout().value_offset;
    }
  }

  void decode(const ManyTask& task, bool is_value, int64_t first, int64_t count, P* to, const P** rows) const {
    layer_.each_block(
        task.seq, is_value, task.kv_head, first, count, [&](const S* from, const F16* scales, int64_t n, int64_t i) {
          for (int64_t j = i; j < i + n; ++j, from += layer_.head_dim, scales += layer_.num_groups) {
            rows[j] = to + j * layer_.head_dim;
            for (int64_t g = 0; g < layer_.num_groups; ++g) {
              const int64_t channel = g * layer_.group_size;
              const Vec scale = set(Layer<T, S>::kHasScales ? static_cast<float>(scales[g]) : 1.f);
              for_lanes(layer_.group_dim(g), [&](int64_t d, int lanes) {
                const Vec x = load_lanes(from + channel + d, lanes);
                store_lanes(to + j * layer_.head_dim + channel + d, Layer<T, S>::kHasScales ? x * scale : x, lanes);
              });
            }
          }
        });
  }

  void find_exact(const ManyTask& task, int64_t first, int64_t count) {
    const T* rows[kTileKeys];
    layer_.exact_rows(task.seq, task.kv_head, first, count, rows);
    const int64_t dim = layer_.head_dim, value_offset = layer_.exact_layout().value_offset;
    for (int64_t j = 0; j < count; ++j) {
      keys[j] = as_row_of(rows[j], dim, decoded_keys_ + j * dim);
      values[j] = as_row_of(rows[j] + value_offset, dim, decoded_values_ + j * dim);
    }
  }

  const Layer<T, S>& layer_;
  P *decoded_keys_, *decoded_values_;
};

}  // namespace v4flash
