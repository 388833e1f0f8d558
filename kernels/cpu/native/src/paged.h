// The sequences of a step, and one layer of the paged cache with the rows that ask it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace v4flash {

struct Batch {
  const int32_t *query_starts, *kv_lens, *block_tables;
  int64_t num_seqs, table_width, num_heads, num_kv_heads, group, block_size, head_dim;

  int64_t query_len(int64_t s) const { return query_starts[s + 1] - query_starts[s]; }
  int64_t first_position(int64_t s) const { return kv_lens[s] - query_len(s); }
  int64_t block_start(int64_t position) const { return position / block_size * block_size; }
};

// Positions, from begin to below end.
struct Window {
  int64_t begin, end;
  Window from(int64_t first) const { return {std::max<int64_t>(0, begin - first), std::max<int64_t>(0, end - first)}; }
};

// Rows of one kind in memory: where the next key head of a row lies, and its value.
struct RowLayout {
  int64_t head_stride, value_offset;
};

// Queries are of T and the body holds S. A row reads the keys of its own block from `exact` and all before it as the
// body stores them; where S is T the body serves for both.
template <class T, class S>
struct Layer : Batch {
  static constexpr bool kHasExact = !std::is_same_v<T, S>;
  static constexpr bool kHasScales = std::is_same_v<S, int8_t>;
  const T* query;                      // [T, H, D]
  T* out;                              // [T, H, D]
  float scale;                         // 1 / sqrt(D), times log2(e): all exponentials are of base two
  const S* body;                       // blocks [2, K, B, D]
  const F16* scales;                   // blocks [2, K, B, C] of int8 codes
  int64_t block_stride, scale_stride;  // elements between blocks of one layer
  int64_t group_size, num_groups;
  const T* exact;               // [X, 2, K, D]
  const int32_t* exact_starts;  // by sequence, its first row there: that of the block of its first row

  const T* query_row(int64_t token, int64_t head) const { return query + (token * num_heads + head) * head_dim; }
  RowLayout body_layout() const { return {block_size * head_dim, num_kv_heads * block_size * head_dim}; }
  RowLayout exact_layout() const { return {head_dim, num_kv_heads * head_dim}; }
  // What the row at a position reads of either.
  Window body_window(int64_t position) const { return {0, kHasExact ? block_start(position) : position + 1}; }
  Window exact_window(int64_t position) const { return {block_start(position), position + 1}; }
  // Channels of a scale, of which the last may have fewer.
  int64_t group_dim(int64_t g) const { return std::min(group_size, head_dim - g * group_size); }

  // f(row of the body, its scales, number of rows side by side, index of the first) for the keys first .. first +
  // count, or for their values.
  template <class F>
  void each_block(int64_t s, bool is_value, int64_t kv_head, int64_t first, int64_t count, F f) const {
    const int32_t* block = block_tables + s * table_width + first / block_size;
    const int64_t head = (is_value ? num_kv_heads + kv_head : kv_head) * block_size;
    for (int64_t i = 0, offset = first % block_size; i < count; offset = 0, ++block) {
      const int64_t n = std::min(block_size - offset, count - i);
      const int64_t row = head + offset;
      f(body + *block * block_stride + row * head_dim,
        kHasScales ? scales + *block * scale_stride + row * num_groups : nullptr, n, i);
      i += n;
    }
  }
  void body_rows(int64_t s, int64_t kv_head, int64_t first, int64_t count, const S** rows) const {
    each_block(s, false, kv_head, first, count, [&](const S* row, const F16*, int64_t n, int64_t i) {
      for (int64_t j = 0; j < n; ++j, row += head_dim) rows[i + j] = row;
    });
  }
  void exact_rows(int64_t s, int64_t kv_head, int64_t first, int64_t count, const T** rows) const {
    const int64_t index = exact_starts[s] + first - block_start(first_position(s));
    for (int64_t j = 0; j < count; ++j) rows[j] = exact + ((index + j) * 2 * num_kv_heads + kv_head) * head_dim;
  }
};

// What a row has gathered over some of its keys: the largest score, the sum of exponentials, the weighted values.
struct Partial {
  float max, sum;
  const float* values;
};

constexpr float kLowest = -1e30f;  // a largest score that is below every score, yet finite

}  // namespace v4flash
