// What attention demands of its lengths, tables and groups before it follows them into memory.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention_many.h"
#include "checks.h"
#include "paged.h"

namespace v4flash {

inline void check_query(const Tensor& query, const Tensor& body) {
  const int64_t num_heads = query.size(1), num_kv_heads = body.size(2), dim = body.size(4);
  TORCH_CHECK(query.size(2) == dim && dim > 0 && num_heads % num_kv_heads == 0,
              "query must have the body's head dimension and a multiple of its heads");
  TORCH_CHECK(num_heads / num_kv_heads <= kSlabRows, "more than ", kSlabRows, " query heads share a key head");
}

inline void check_tables(const Tensor& body, const Tensor& starts, const Tensor& lens, const Tensor& tables,
                  int64_t num_rows) {
  for (const Tensor& t : {starts, lens, tables}) {
    TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous(), "lengths and tables must be contiguous int32");
  }
  TORCH_CHECK(lens.dim() == 1 && starts.dim() == 1 && tables.dim() == 2, "lengths and tables have wrong dimensions");
  const int64_t num_seqs = lens.size(0), width = tables.size(1), size = body.size(3);
  TORCH_CHECK(starts.size(0) == num_seqs + 1 && tables.size(0) == num_seqs, "one length and one table a sequence");
  const auto *start = starts.const_data_ptr<int32_t>(), *len = lens.const_data_ptr<int32_t>();
  const auto* table = tables.const_data_ptr<int32_t>();
  TORCH_CHECK(start[0] == 0 && start[num_seqs] == num_rows, "query_starts must lead from 0 to the number of rows");
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t query_len = start[s + 1] - start[s], num_blocks = (len[s] + size - 1) / size;
    TORCH_CHECK(query_len >= 0 && query_len <= len[s], "sequence ", s, " has more rows than tokens");
    TORCH_CHECK(num_blocks <= width, "the table of sequence ", s, " is too short");
    for (int64_t b = 0; b < num_blocks; ++b) {
      const int32_t block = table[s * width + b];
      TORCH_CHECK(block >= 0 && block < body.size(0), "block ", block, " of sequence ", s, " is not in the cache");
    }
  }
}

template <class T>
inline void check_groups(const Paged<T>& paged, const Tensor& groups) {
  TORCH_CHECK(groups.scalar_type() == at::kInt && groups.is_contiguous() && groups.dim() == 2 && groups.size(1) == 3,
              "shared_groups must be contiguous int32 [groups, 3]");
  const auto* g = groups.const_data_ptr<int32_t>();
  int64_t end = 0;  // of the groups so far
  for (int64_t i = 0; i < groups.size(0); ++i, g += 3) {
    TORCH_CHECK(g[0] >= end && g[1] >= 1 && g[0] + g[1] <= paged.num_seqs,
                "shared_groups must be ascending and disjoint");
    end = g[0] + g[1];
    for (int64_t s = g[0]; s < end; ++s) {
      TORCH_CHECK(g[2] >= 0 && g[2] * paged.block_size <= paged.kv_lens[s] - std::max<int64_t>(1, paged.query_len(s)),
                  "sequence ", s, " asks inside the blocks it is said to share");
      const int32_t *first = paged.block_tables + g[0] * paged.table_width;
      TORCH_CHECK(std::equal(first, first + g[2], paged.block_tables + s * paged.table_width), "sequence ", s,
                  " does not share the blocks of its group");
    }
  }
}

// What the tensors say of the rows and of the layer, after they have been checked. The body's address is the caller's.
template <class T>
inline void describe(Paged<T>& paged, const Tensor& query, const Tensor& out, const Tensor& body, const Tensor& starts,
                     const Tensor& lens, const Tensor& tables) {
  paged.query = query.const_data_ptr<T>();
  paged.out = out.mutable_data_ptr<T>();
  paged.query_starts = starts.const_data_ptr<int32_t>();
  paged.kv_lens = lens.const_data_ptr<int32_t>();
  paged.block_tables = tables.const_data_ptr<int32_t>();
  paged.num_seqs = lens.size(0);
  paged.table_width = tables.size(1);
  paged.num_heads = query.size(1);
  paged.num_kv_heads = body.size(2);
  paged.group = paged.num_heads / paged.num_kv_heads;
  paged.block_size = body.size(3);
  paged.head_dim = body.size(4);
  paged.value_offset = paged.num_kv_heads * paged.block_size * paged.head_dim;
  paged.block_stride = body.stride(0);
  paged.scale = static_cast<float>(M_LOG2E / std::sqrt(static_cast<double>(paged.head_dim)));
}

}  // namespace v4flash
