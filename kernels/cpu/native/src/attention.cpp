// Causal attention of ragged rows over the paged cache: prefill chunks, decode rows and shared prefixes in one call.
#include <ATen/ops/empty.h>

#include <cmath>

#include "amx.h"
#include "attend.h"
#include "attention_checks.h"
#include "ops.h"

namespace v4flash {
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
      if (amx_in_use()) return attend<T, ManyRows<T, AmxProduct>, FewRows<T>>(paged, shared_groups);
    }
#endif
    attend<T, ManyRows<T, RegisterProduct<T>>, FewRows<T>>(paged, shared_groups);
  });
  return out;
}

}  // namespace v4flash
