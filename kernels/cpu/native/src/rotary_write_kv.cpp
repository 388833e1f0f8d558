// Splits the rows of a fused projection: query and key are normalised per head where the model wants it and rotated,
// key and value go to their slots of the paged cache, the query is returned.
#include <ATen/ops/empty.h>

#include <cmath>

#include "checks.h"
#include "ops.h"
#include "parallel.h"
#include "simd.h"

namespace v4flash {
namespace {

// Loads one head times `scale`, and over its root mean square times `norm` where there is one.
template <class T, class W>
void load_head(const T* from, int64_t head_dim, float scale, const W* norm, float eps, float* head) {
  Vec squares = zero();
  for_lanes(head_dim, [&](int64_t i, int lanes) {
    const Vec x = load_lanes(from + i, lanes) * set(scale);
    squares = fma(x, x, squares);
    store_lanes(head + i, x, lanes);
  });
  if (!norm) return;
  const Vec inverse = set(1.f / std::sqrt(reduce_add(squares) / static_cast<float>(head_dim) + eps));
  for_lanes(head_dim, [&](int64_t i, int lanes) {
    store_lanes(head + i, load_lanes(head + i, lanes) * inverse * load_lanes(norm + i, lanes), lanes);
  });
}

template <class Out>
void rotate_head(const float* head, int64_t half, const float* cos, const float* sin, Out* to) {
  for_lanes(half, [&](int64_t i, int lanes) {
    const Vec a = load_lanes(head + i, lanes), b = load_lanes(head + half + i, lanes);
    const Vec c = load_lanes(cos + i, lanes), s = load_lanes(sin + i, lanes);
    store_lanes(to + i, a * c - b * s, lanes);
    store_lanes(to + half + i, b * c + a * s, lanes);
  });
}

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

void check_norm(const OptionalTensor& norm, int64_t head_dim, const char* name) {
  if (!norm) return;
  check_float(*norm, 1, name);
  TORCH_CHECK(norm->size(0) == head_dim, name, " must have the head dimension");
}

}  // namespace

Tensor rotary_write_kv(const Tensor& qkv, const OptionalTensor& scales, const Tensor& cos, const Tensor& sin,
                       const Tensor& slots, Tensor& body, int64_t num_heads, const OptionalTensor& query_norm, const OptionalTensor& key_norm, double eps) {
  check_float(qkv, 2, "qkv");
  check_body(body);
  TORCH_CHECK(is_float(body), "body must be float32 or bfloat16, not ", body.scalar_type());
  const Shape shape{qkv.size(0), num_heads, body.size(2), body.size(3), body.size(4), body.stride(0)};
  TORCH_CHECK(shape.head_dim % 2 == 0, "an odd head dimension has no halves to rotate");
  TORCH_CHECK(qkv.size(1) == (num_heads + 2 * shape.num_kv_heads) * shape.head_dim, "qkv has the wrong width");
  for (const Tensor& angles : {cos, sin}) {
    check_rows(angles, 2, "cos and sin");
    TORCH_CHECK(angles.scalar_type() == at::kFloat && angles.size(0) == shape.num_rows &&
                    angles.size(1) == shape.head_dim / 2,
                "cos and sin must be float32 [T, D / 2]");
  }
  check_vector(slots, at::kLong, shape.num_rows, "slots");
  check_norm(query_norm, shape.head_dim, "query_norm");
  check_norm(key_norm, shape.head_dim, "key_norm");
  const auto norm_dtype = query_norm ? query_norm->scalar_type() : key_norm ? key_norm->scalar_type() : at::kFloat;
  TORCH_CHECK(!query_norm || !key_norm || key_norm->scalar_type() == norm_dtype, "norms must be of one dtype");
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
