// A layer whose full blocks are stored in another form, S, than the one that is computed in, T.
#pragma once
#include "kv_forms.h"
#include "paged.h"

namespace v4flash {

constexpr int kScaleStride = 64;  // floats between the scales of two channel groups of a tile

// Rows of one kind in memory: where the next key head of a row lies, and its value.
struct RowLayout {
  int64_t head_stride, value_offset;
};

// A row reads the keys of its own block in T, from `exact`, and all before it as the body stores them.
template <class T, class S>
struct StoredKV : Paged<T> {
  const S* body;             // blocks [2, K, B, D], block_stride apart
  const F16* scales;         // blocks [2, K, B, C] of int8 codes, else nothing
  int64_t scale_stride;      // elements between the scales of blocks
  int64_t group_size, num_groups;
  const T* exact;            // [X, 2, K, D]
  const int32_t* exact_starts;  // by sequence, its first row there: that of the block of its first row

  int64_t block_start(int64_t position) const { return position / this->block_size * this->block_size; }
  int64_t first_position(int64_t s) const { return this->kv_lens[s] - this->query_len(s); }
  RowLayout body_layout() const { return {this->block_size * this->head_dim, this->value_offset}; }
  RowLayout exact_layout() const { return {this->head_dim, this->num_kv_heads * this->head_dim}; }
  // Channels of a group, the last of which may be smaller.
  int64_t group_dim(int64_t g) const { return std::min(group_size, this->head_dim - g * group_size); }

  // f(block, offset in it, number of keys, index of the first of them) for the keys first .. first + count.
  template <class F>
  void each_block(int64_t s, int64_t first, int64_t count, F f) const {
    const int32_t* table = this->block_tables + s * this->table_width;
    for (int64_t i = 0; i < count;) {
      const int64_t offset = (first + i) % this->block_size, n = std::min(this->block_size - offset, count - i);
      f(static_cast<int64_t>(table[(first + i) / this->block_size]), offset, n, i);
      i += n;
    }
  }

  void body_rows(int64_t s, int64_t kv_head, int64_t first, int64_t count, const S** rows) const {
    each_block(s, first, count, [&](int64_t block, int64_t offset, int64_t n, int64_t i) {
      const S* row = body + block * this->block_stride + (kv_head * this->block_size + offset) * this->head_dim;
      for (int64_t j = 0; j < n; ++j, row += this->head_dim) rows[i + j] = row;
    });
  }

  void exact_rows(int64_t s, int64_t kv_head, int64_t first, int64_t count, const T** rows) const {
    const int64_t index = exact_starts[s] + first - block_start(first_position(s));
    for (int64_t j = 0; j < count; ++j) {
      rows[j] = exact + (index + j) * 2 * this->num_kv_heads * this->head_dim + kv_head * this->head_dim;
    }
  }

  // [C][kScaleStride] of the keys (`part` 0) or values (1) first .. first + count; what lies past them is undefined.
  void read_scales(int64_t s, int64_t part, int64_t kv_head, int64_t first, int64_t count, float* to) const {
    each_block(s, first, count, [&](int64_t block, int64_t offset, int64_t n, int64_t i) {
      const int64_t row = (part * this->num_kv_heads + kv_head) * this->block_size + offset;
      const F16* from = scales + block * scale_stride + row * num_groups;
      if (num_groups == 1) {
        for_lanes(n, [&](int64_t j, int lanes) { store_lanes(to + i + j, load_lanes(from + j, lanes), lanes); });
        return;
      }
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t g = 0; g < num_groups; ++g) to[g * kScaleStride + i + j] = from[j * num_groups + g];
      }
    });
  }
};

}  // namespace v4flash
