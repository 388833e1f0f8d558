// Causal attention over a layer whose full blocks are stored in another form than the one that is computed in.
#include <ATen/ops/empty.h>

#include <vector>

#include "amx.h"
#include "attend.h"
#include "attention_checks.h"
#include "ops.h"
#include "stored_few.h"
#include "stored_many.h"

namespace v4flash {
namespace {

template <class T, class S>
void attend_stored(const StoredKV<T, S>& kv, const Tensor& groups) {
  // int8 codes are exact in either dtype; the other forms keep digits that bfloat16 would lose
  using P = std::conditional_t<std::is_same_v<S, int8_t>, T, float>;
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<P, BF16>) {
    if (amx_in_use()) return attend<T, StoredMany<T, S, P, AmxProduct>, StoredFew<T, S>>(kv, groups);
  }
#endif
  attend<T, StoredMany<T, S, P, RegisterProduct<P>>, StoredFew<T, S>>(kv, groups);
}

}  // namespace

Tensor stored_attention(const Tensor& query, const Tensor& exact, const Tensor& body,
                        const OptionalTensor& body_scales, int64_t group_size, const Tensor& query_starts,
                        const Tensor& kv_lens, const Tensor& block_tables, const Tensor& shared_groups) {
  check_float(query, 3, "query");
  check_stored(body, body_scales, group_size);
  check_query(query, body);
  const int64_t num_kv_heads = body.size(2), size = body.size(3), dim = body.size(4);
  TORCH_CHECK(body.scalar_type() != query.scalar_type(), "a layer stored in compute dtype needs no `exact`");
  check_tables(body, query_starts, kv_lens, block_tables, query.size(0));
  const auto *start = query_starts.const_data_ptr<int32_t>(), *len = kv_lens.const_data_ptr<int32_t>();
  std::vector<int32_t> exact_starts{0};
  for (int64_t s = 0; s < kv_lens.size(0); ++s) {
    const int64_t num_rows = start[s + 1] - start[s], old = (len[s] - num_rows) % size;
    exact_starts.push_back(exact_starts.back() + static_cast<int32_t>(num_rows > 0 ? old + num_rows : 0));
  }
  check_float(exact, 4, "exact");
  TORCH_CHECK(exact.scalar_type() == query.scalar_type() && exact.size(0) == exact_starts.back() &&
                  exact.size(1) == 2 && exact.size(2) == num_kv_heads && exact.size(3) == dim,
              "exact must be [", exact_starts.back(), ", 2, K, D] in the query's dtype");
  Tensor out = at::empty(query.sizes(), query.options());
  by_dtype(query.scalar_type(), [&](auto element) {
    by_stored(body.scalar_type(), [&](auto stored_element) {
      using T = decltype(element);
      using S = decltype(stored_element);
      if constexpr (!std::is_same_v<T, S>) {
        StoredKV<T, S> kv{};
        describe(kv, query, out, body, query_starts, kv_lens, block_tables);
        kv.body = static_cast<const S*>(body.const_data_ptr());
        kv.scales = body_scales ? body_scales->const_data_ptr<F16>() : nullptr;
        kv.scale_stride = body_scales ? body_scales->stride(0) : 0;
        kv.group_size = body_scales ? group_size : dim;
        kv.num_groups = body_scales ? body_scales->size(4) : 1;
        kv.exact = exact.const_data_ptr<T>();
        kv.exact_starts = exact_starts.data();
        check_groups(kv, shared_groups);
        attend_stored(kv, shared_groups);
      }
    });
  });
  return out;
}

}  // namespace v4flash
