// Splits the rows of a fused projection: query and key are normalised per head where the model wants it and rotated,
// key and value go to their slots of the paged cache, the query is returned.
#include <ATen/ops/empty.h>

#include "ops.h"
#include "parallel.h"
#include "rotate.h"

namespace v4flash {
namespace {

struct Shape {
  int64_t num_rows, num_heads, num_kv_heads, block_size, head_dim, block_stride;
};

template <class T, class Out, class W>
void split_rows(const Shape& shape, const T* qkv, const float* scales, const float* cos, const float* sin,
                const int64_t* slots, Out* body, const W* query_norm, const W* key_norm, float eps, Out* query) {
  const int64_t dim = shape.head_dim, half = dim / 2, rotated = shape.num_heads + shape.num_kv_heads;
  const int64_t width = (rotated + shape.num_kv_heads) * dim, head_stride = shape.block_size * dim;
  for_rows(shape.num_rows, width, [&](int64_t begin, int64_t end) {
    Scratch& scratch = Scratch::of_thread<Shape>();
    scratch.reset(Scratch::padded<float>(dim));
    float* head = scratch.take<float>(dim);
    for (int64_t t = begin; t < end; ++t) {
      const T* from = qkv + t * width;
      const float scale = scales ? scales[t] : 1.f;
      Out* keys = body + slots[t] / shape.block_size * shape.block_stride + slots[t] % shape.block_size * dim;
      Out* values = keys + shape.num_kv_heads * head_stride;
      for (int64_t h = 0; h < rotated; ++h) {
        const bool is_key = h >= shape.num_heads;
        load_head(from + h * dim, dim, scale, is_key ? key_norm : query_norm, eps, head);
        Out* to = is_key ? keys + (h - shape.num_heads) * head_stride : query + (t * shape.num_heads + h) * dim;
        rotate_head(head, half, cos + t * half, sin + t * half, to);
      }
      for (int64_t k = 0; k < shape.num_kv_heads; ++k) {
        load_head(from + (rotated + k) * dim, dim, scale, static_cast<const W*>(nullptr), eps, head);
        Out* to = values + k * head_stride;
        for_lanes(dim, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(head + i, lanes), lanes); });
      }
    }
  });
}

}  // namespace

Tensor rotary_write_kv(const Tensor& qkv, const OptionalTensor& scales, const Tensor& cos, const Tensor& sin,
                       const Tensor& slots, Tensor& body, int64_t num_heads, const OptionalTensor& query_norm,
                       const OptionalTensor& key_norm, double eps) {
  check_float(qkv, 2, "qkv");
  check_body(body);
  TORCH_CHECK(is_float(body), "body must be float32 or bfloat16, not ", body.scalar_type());
  const Shape shape{qkv.size(0), num_heads, body.size(2), body.size(3), body.size(4), body.stride(0)};
  TORCH_CHECK(qkv.size(1) == (num_heads + 2 * shape.num_kv_heads) * shape.head_dim, "qkv has the wrong width");
  check_angles(cos, sin, shape.num_rows, shape.head_dim);
  check_vector(slots, at::kLong, shape.num_rows, "slots");
  const auto norm_dtype = check_norms(query_norm, key_norm, shape.head_dim);
  const auto* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < shape.num_rows; ++t) {
    TORCH_CHECK(slot[t] >= 0 && slot[t] < body.size(0) * shape.block_size, "slot ", slot[t], " is not in the cache");
  }
  const float* row_scales = scales_of(scales, shape.num_rows, "scales");
  Tensor query = at::empty({shape.num_rows, num_heads, shape.head_dim}, body.options());
  by_dtype(qkv.scalar_type(), [&](auto in_element) {
    by_dtype(body.scalar_type(), [&](auto out_element) {
      by_dtype(norm_dtype, [&](auto norm_element) {
        using T = decltype(in_element);
        using Out = decltype(out_element);
        using W = decltype(norm_element);
        split_rows<T, Out, W>(shape, qkv.const_data_ptr<T>(), row_scales, cos.const_data_ptr<float>(),
                              sin.const_data_ptr<float>(), slot, body.mutable_data_ptr<Out>(),
                              query_norm ? query_norm->const_data_ptr<W>() : nullptr,
                              key_norm ? key_norm->const_data_ptr<W>() : nullptr, static_cast<float>(eps),
                              query.mutable_data_ptr<Out>());
      });
    });
  });
  return query;
}

}  // namespace v4flash
