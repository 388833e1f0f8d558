// Causal attention of ragged rows over the paged cache: prefill chunks, decode rows and shared prefixes in one call.
#include <ATen/ops/empty.h>

#include <cmath>

#include "attend.h"
#include "attention_checks.h"
#include "attention_packed.h"
#include "attention_tiles.h"
#include "ops.h"

namespace v4flash {
namespace {

template <class T, class S>
void attend_layer(const Layer<T, S>& layer, const Tensor& groups) {
  // half a level of int8 is coarser than bfloat16; the other forms keep digits that it would lose
  using P = std::conditional_t<Layer<T, S>::kHasExact && !Layer<T, S>::kHasScales, float, T>;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<P, BF16>) {
    if (amx_in_use()) return attend<TileRows<S, TileStrips>, FewRows<T, S>>(layer, groups);
    return attend<TileRows<S, VectorStrips>, FewRows<T, S>>(layer, groups);
  }
#endif
  attend<PackedRows<T, S, P>, FewRows<T, S>>(layer, groups);
}

}  // namespace

Tensor attention(const Tensor& query, const Tensor& body, const Tensor& query_starts, const Tensor& kv_lens,
                 const Tensor& block_tables, const Tensor& shared_groups, const OptionalTensor& exact,
                 const OptionalTensor& body_scales, int64_t group_size) {
  check_float(query, 3, "query");
  check_stored(body, body_scales, group_size);
  check_query(query, body);
  check_tables(body, query_starts, kv_lens, block_tables, query.size(0));
  TORCH_CHECK(exact.has_value() == (body.scalar_type() != query.scalar_type()),
              "a layer that is not stored in the query's dtype has exact rows, no other has");
  const int64_t num_kv_heads = body.size(2), dim = body.size(4);
  const Batch batch{query_starts.const_data_ptr<int32_t>(),
                    kv_lens.const_data_ptr<int32_t>(),
                    block_tables.const_data_ptr<int32_t>(),
                    kv_lens.size(0),
                    block_tables.size(1),
                    query.size(1),
                    num_kv_heads,
                    query.size(1) / num_kv_heads,
                    body.size(3),
                    dim};
  check_groups(batch, shared_groups);
  const std::vector<int32_t> exact_starts = exact ? check_exact(*exact, query, body, batch) : std::vector<int32_t>{};
  Tensor out = at::empty(query.sizes(), query.options());
  by_dtype(query.scalar_type(), [&](auto element) {
    by_stored(body.scalar_type(), [&](auto stored_element) {
      using T = decltype(element);
      using S = decltype(stored_element);
      Layer<T, S> layer{batch};
      layer.query = query.const_data_ptr<T>();
      layer.out = out.mutable_data_ptr<T>();
      layer.scale = static_cast<float>(M_LOG2E / std::sqrt(static_cast<double>(dim)));
      layer.body = static_cast<const S*>(body.const_data_ptr());
      layer.block_stride = body.stride(0);
      layer.scales = body_scales ? body_scales->const_data_ptr<F16>() : nullptr;
      layer.scale_stride = body_scales ? body_scales->stride(0) : 0;
      layer.group_size = body_scales ? group_size : dim;
      layer.num_groups = body_scales ? body_scales->size(4) : 1;
      layer.exact = exact ? exact->const_data_ptr<T>() : nullptr;
      layer.exact_starts = exact_starts.data();
      attend_layer(layer, shared_groups);
    });
  });
  return out;
}

}  // namespace v4flash
