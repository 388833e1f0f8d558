// Causal attention of ragged rows over the paged cache: prefill chunks, decode rows and shared prefixes in one call.
#include <ATen/ops/empty.h>

#include <cmath>
#include <optional>

#include "amx.h"
#include "attention_plan.h"
#include "checks.h"
#include "ops.h"

namespace v4flash {
namespace {

void check_tables(const Tensor& body, const Tensor& starts, const Tensor& lens, const Tensor& tables,
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
void check_groups(const Paged<T>& paged, const Tensor& groups) {
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

// Weighted values over the sum of weights, rounded once.
template <class T>
void write_row(const float* values, float sum, int64_t dim, T* to) {
  const Vec inverse = set(1.f / sum);
  for_lanes(dim, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(values + i, lanes) * inverse, lanes); });
}

// Parts lie one behind the other as maximum, sum, values. The first gathers the others.
template <class T>
void merge_row(float* parts, int64_t num_parts, int64_t dim, T* to) {
  const int64_t stride = dim + 2;
  float highest = kLowest;
  for (int64_t p = 0; p < num_parts; ++p) highest = std::max(highest, parts[p * stride]);
  float sum = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    const float* part = parts + p * stride;
    const float weight = std::exp2(part[0] - highest);
    sum += weight * part[1];
    for_lanes(dim, [&](int64_t i, int lanes) {
      const Vec x = load_lanes(part + 2 + i, lanes) * set(weight);
      store_lanes(parts + 2 + i, p == 0 ? x : x + load_lanes(parts + 2 + i, lanes), lanes);
    });
  }
  write_row(parts + 2, sum, dim, to);
}

template <class T, class Product>
void attend(const Paged<T>& paged, const Tensor& groups) {
  const AttentionTasks tasks = plan_attention(paged, groups.const_data_ptr<int32_t>(), groups.size(0),
                                              at::get_num_threads());
  const Tensor memory = at::empty({tasks.partial_size}, groups.options().dtype(at::kFloat));
  float* partials = memory.mutable_data_ptr<float>();
  const int64_t dim = paged.head_dim, num_many = static_cast<int64_t>(tasks.many.size());
  const int64_t num_tasks = num_many + static_cast<int64_t>(tasks.few.size());
  const auto finish = [&](int64_t token, int64_t head, int64_t part, const Partial& partial) {
    const int64_t num_parts = tasks.num_parts[token];
    if (num_parts == 1) {
      write_row(partial.values, partial.sum, dim, paged.out + (token * paged.num_heads + head) * dim);
      return;
    }
    float* to = partials + tasks.partial_start[token] + (head * num_parts + part) * (dim + 2);
    to[0] = partial.max;
    to[1] = partial.sum;
    std::copy_n(partial.values, dim, to + 2);
  };
  for_workers(num_tasks, [&](auto each_task) {
    std::optional<ManyRows<T, Product>> many;
    std::optional<FewRows<T>> few;
    each_task([&](int64_t i, int64_t next) {
      if (i < num_many) {
        const auto& task = tasks.many[i];
        if (!many) many.emplace(paged);
        many->run(task, [&](int64_t r, const Partial& partial) {
          finish(task.first_token + r / paged.group, task.kv_head * paged.group + r % paged.group, task.part, partial);
        });
      } else {
        const auto& task = tasks.few[i - num_many];
        if (!few) few.emplace(paged, tasks.max_few_rows);
        const int64_t first_token = paged.query_starts[task.seq];
        few->run(task, next < num_tasks ? &tasks.few[next - num_many] : nullptr,
                 [&](int64_t kv_head, int64_t r, const Partial& partial) {
                   finish(first_token + r / paged.group, kv_head * paged.group + r % paged.group, task.part, partial);
                 });
      }
    });
  });
  if (tasks.partial_size == 0) return;
  for_rows(paged.query_starts[paged.num_seqs], paged.num_heads * dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t num_parts = tasks.num_parts[t];
      for (int64_t h = 0; num_parts > 1 && h < paged.num_heads; ++h) {
        merge_row(partials + tasks.partial_start[t] + h * num_parts * (dim + 2), num_parts, dim,
                  paged.out + (t * paged.num_heads + h) * dim);
      }
    }
  });
}

}  // namespace

Tensor attention(const Tensor& query, const Tensor& body, const Tensor& query_starts, const Tensor& kv_lens,
                 const Tensor& block_tables, const Tensor& shared_groups) {
  check_float(query, 3, "query");
  check_body(body);
  TORCH_CHECK(query.scalar_type() == body.scalar_type(), "query and body must be of one dtype");
  const int64_t num_heads = query.size(1), num_kv_heads = body.size(2), size = body.size(3), dim = body.size(4);
  TORCH_CHECK(query.size(2) == dim && dim > 0 && num_heads % num_kv_heads == 0,
              "query must have the body's head dimension and a multiple of its heads");
  TORCH_CHECK(num_heads / num_kv_heads <= kSlabRows, "more than ", kSlabRows,
              " query heads share a key head");
  check_tables(body, query_starts, kv_lens, block_tables, query.size(0));
  Tensor out = at::empty(query.sizes(), query.options());
  by_dtype(query.scalar_type(), [&](auto element) {
    using T = decltype(element);
    Paged<T> paged{};
    paged.query = query.const_data_ptr<T>();
    paged.out = out.mutable_data_ptr<T>();
    paged.query_starts = query_starts.const_data_ptr<int32_t>();
    paged.kv_lens = kv_lens.const_data_ptr<int32_t>();
    paged.block_tables = block_tables.const_data_ptr<int32_t>();
    paged.num_seqs = kv_lens.size(0);
    paged.table_width = block_tables.size(1);
    paged.num_heads = num_heads;
    paged.num_kv_heads = num_kv_heads;
    paged.group = num_heads / num_kv_heads;
    paged.block_size = size;
    paged.head_dim = dim;
    paged.value_offset = num_kv_heads * size * dim;
    paged.block_stride = body.stride(0);
    paged.cache = body.const_data_ptr<T>();
    paged.scale = static_cast<float>(M_LOG2E / std::sqrt(static_cast<double>(dim)));
    check_groups(paged, shared_groups);
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, BF16>) {
      if (amx_in_use()) return attend<T, AmxProduct>(paged, shared_groups);
    }
#endif
    attend<T, RegisterProduct<T>>(paged, shared_groups);
  });
  return out;
}

}  // namespace v4flash
