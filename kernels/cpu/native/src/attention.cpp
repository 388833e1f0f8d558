// Causal attention of ragged rows over the paged cache: prefill chunks, decode rows and shared prefixes in one call.
#include <ATen/ops/empty.h>

#include "amx.h"
#include "attend.h"
#include "attention_checks.h"
#include "attention_packed.h"
#include "ops.h"

namespace v4flash {
Tensor attention(const Tensor& query, const Tensor& body, const Tensor& query_starts, const Tensor& kv_lens,
                 const Tensor& block_tables, const Tensor& shared_groups) {
  check_float(query, 3, "query");
  check_body(body);
  TORCH_CHECK(query.scalar_type() == body.scalar_type(), "query and body must be of one dtype");
  check_query(query, body);
  check_tables(body, query_starts, kv_lens, block_tables, query.size(0));
  Tensor out = at::empty(query.sizes(), query.options());
  by_dtype(query.scalar_type(), [&](auto element) {
    using T = decltype(element);
    Paged<T> paged{};
    describe(paged, query, out, body, query_starts, kv_lens, block_tables);
    paged.cache = body.const_data_ptr<T>();
    check_groups(paged, shared_groups);
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, BF16>) {
      if (amx_in_use()) return attend<T, ManyRows<T, AmxProduct>, FewRows<T>>(paged, shared_groups);
    }
#endif
    attend<T, PackedRows<T, RegisterProduct<T>>, FewRows<T>>(paged, shared_groups);
  });
  return out;
}

}  // namespace v4flash
