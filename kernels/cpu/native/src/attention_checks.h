// What attention demands of its lengths, tables and groups before it follows them into memory.
#pragma once
#include <algorithm>
#include <vector>

#include "checks.h"
#include "key_tiles.h"

namespace v4flash {

inline void check_query(const Tensor& query, const Tensor& body) {
  const int64_t num_heads = query.size(1), num_kv_heads = body.size(2), dim = body.size(4);
  TORCH_CHECK(query.size(2) == dim && dim > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
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

inline void check_groups(const Batch& batch, const Tensor& groups) {
  TORCH_CHECK(groups.scalar_type() == at::kInt && groups.is_contiguous() && groups.dim() == 2 && groups.size(1) == 3,
              "shared_groups must be contiguous int32 [groups, 3]");
  const auto* g = groups.const_data_ptr<int32_t>();
  int64_t end = 0;  // of the groups so far
  for (int64_t i = 0; i < groups.size(0); ++i, g += 3) {
    TORCH_CHECK(g[0] >= end && g[1] >= 1 && g[0] + g[1] <= batch.num_seqs,
                "shared_groups must be ascending and disjoint");
    end = g[0] + g[1];
    for (int64_t s = g[0]; s < end; ++s) {
      TORCH_CHECK(g[2] >= 0 && g[2] * batch.block_size <= batch.kv_lens[s] - std::max<int64_t>(1, batch.query_len(s)),
                  "sequence ", s, " asks inside the blocks it is said to share");
      const int32_t* first = batch.block_tables + g[0] * batch.table_width;
      TORCH_CHECK(std::equal(first, first + g[2], batch.block_tables + s * batch.table_width), "sequence ", s,
                  " does not share the blocks of its group");
    }
  }
}

// Where the exact rows of each sequence begin, and how many there are in all.
inline std::vector<int32_t> check_exact(const Tensor& exact, const Tensor& query, const Tensor& body,
                                        const Batch& batch) {
  std::vector<int32_t> starts{0};
  for (int64_t s = 0; s < batch.num_seqs; ++s) {
    const int64_t first = batch.block_start(batch.first_position(s));
    starts.push_back(starts.back() + static_cast<int32_t>(batch.query_len(s) > 0 ? batch.kv_lens[s] - first : 0));
  }
  check_rows(exact, 4, "exact");
  TORCH_CHECK(exact.scalar_type() == query.scalar_type() && exact.size(0) == starts.back() && exact.size(1) == 2 &&
                  exact.size(2) == body.size(2) && exact.size(3) == body.size(4),
              "exact must be [", starts.back(), ", 2, K, D] in the query's dtype");
  return starts;
}

}  // namespace v4flash
