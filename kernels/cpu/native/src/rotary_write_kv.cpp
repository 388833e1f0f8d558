// Splits the rows of a fused projection: the query is returned, key and value go to their slots of the paged cache.
#include <ATen/ops/empty.h>

#include "ops.h"
#include "rotate.h"

namespace v4flash {

Tensor rotary_write_kv(const Tensor& qkv, const OptionalTensor& scales, const Tensor& cos, const Tensor& sin,
                       const Tensor& slots, Tensor& body, int64_t num_heads, const OptionalTensor& query_norm,
                       const OptionalTensor& key_norm, double eps) {
  check_body(body);
  TORCH_CHECK(is_float(body), "body must be float32 or bfloat16, not ", body.scalar_type());
  const int64_t num_kv_heads = body.size(2), size = body.size(3), dim = body.size(4), stride = body.stride(0);
  const Projection rows(qkv, scales, cos, sin, num_heads, num_kv_heads, dim, query_norm, key_norm, eps);
  check_vector(slots, at::kLong, rows.num_rows, "slots");
  const auto* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < rows.num_rows; ++t) {
    TORCH_CHECK(slot[t] >= 0 && slot[t] < body.size(0) * size, "slot ", slot[t], " is not in the cache");
  }
  Tensor query = at::empty({rows.num_rows, num_heads, dim}, body.options());
  by_dtype(body.scalar_type(), [&](auto element) {
    using T = decltype(element);
    T *blocks = body.mutable_data_ptr<T>(), *to = query.mutable_data_ptr<T>();
    for_rows(rows.num_rows, rows.width, [&](int64_t begin, int64_t end) {
      rows.split(begin, end, to, [&](int64_t t) {
        T* keys = blocks + slot[t] / size * stride + slot[t] % size * dim;
        return KeyValueRow<T>{keys, keys + num_kv_heads * size * dim, size * dim};
      });
    });
  });
  return query;
}

}  // namespace v4flash
