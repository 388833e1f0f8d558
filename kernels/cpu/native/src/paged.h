// One layer of the paged cache, blocks [2, K, B, D], and the sequences of a step in it.
#pragma once
#include <cstdint>

namespace v4flash {

template <class T>
struct Paged {
  const T* query;  // [T, H, D]
  const T* cache;  // its first block
  T* out;          // [T, H, D]
  const int32_t* query_starts;
  const int32_t* kv_lens;
  const int32_t* block_tables;
  int64_t num_seqs, table_width, num_heads, num_kv_heads, group, block_size, head_dim;
  int64_t block_stride;  // elements between blocks of one layer
  int64_t value_offset;  // from the key of a token to its value
  float scale;           // 1 / sqrt(D), times log2(e): all exponentials are of base two

  int64_t query_len(int64_t s) const { return query_starts[s + 1] - query_starts[s]; }
  const T* query_row(int64_t token, int64_t head) const { return query + (token * num_heads + head) * head_dim; }

  // Addresses of the keys at positions first .. first + count of a sequence.
  void key_rows(int64_t s, int64_t kv_head, int64_t first, int64_t count, const T** rows) const {
    const int32_t* table = block_tables + s * table_width;
    int64_t block = first / block_size, offset = first % block_size;
    while (count > 0) {
      const T* row = cache + table[block] * block_stride + (kv_head * block_size + offset) * head_dim;
      for (; offset < block_size && count > 0; ++offset, --count, row += head_dim) *rows++ = row;
      offset = 0;
      ++block;
    }
  }
};

// What a row has gathered over some of its keys: the largest score, the sum of exponentials, the weighted values.
struct Partial {
  float max, sum;
  const float* values;
};

constexpr float kLowest = -1e30f;  // a largest score that is below every score, yet finite

}  // namespace v4flash
