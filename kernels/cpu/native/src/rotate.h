// Splits the rows of a fused projection: scaled, query and key normalised per head where the model wants it, their
// halves rotated.
#pragma once
#include <cmath>

#include "checks.h"
#include "parallel.h"
#include "simd.h"

namespace v4flash {

// Where the key and value heads of a row go, each so many elements after the one before.
template <class T>
struct KeyValueRow {
  T *keys, *values;
  int64_t head_stride;
};

class Projection {
 public:
  // Checks all that is given. The projection refers to its arguments.
  Projection(const Tensor& qkv, const OptionalTensor& scales, const Tensor& cos, const Tensor& sin, int64_t num_heads,
             int64_t num_kv_heads, int64_t head_dim, const OptionalTensor& query_norm, const OptionalTensor& key_norm,
             double eps)
      : num_rows(qkv.size(0)),
        width(qkv.size(1)),
        num_heads(num_heads),
        num_kv_heads(num_kv_heads),
        head_dim(head_dim),
        qkv_(qkv),
        query_norm_(query_norm),
        key_norm_(key_norm),
        eps_(static_cast<float>(eps)) {
    check_float(qkv, 2, "qkv");
    TORCH_CHECK(width == (num_heads + 2 * num_kv_heads) * head_dim, "qkv has the wrong width");
    TORCH_CHECK(head_dim % 2 == 0, "an odd head dimension has no halves to rotate");
    for (const Tensor& angles : {cos, sin}) {
      check_rows(angles, 2, "cos and sin");
      TORCH_CHECK(angles.scalar_type() == at::kFloat && angles.size(0) == num_rows && angles.size(1) == head_dim / 2,
                  "cos and sin must be float32 [T, D / 2]");
    }
    for (const OptionalTensor& norm : {query_norm, key_norm}) {
      if (!norm) continue;
      check_float(*norm, 1, "a norm");
      TORCH_CHECK(norm->size(0) == head_dim, "a norm must have the head dimension");
    }
    TORCH_CHECK(!query_norm || !key_norm || key_norm->scalar_type() == query_norm->scalar_type(),
                "norms must be of one dtype");
    scales_ = scales_of(scales, num_rows, "scales");
    cos_ = cos.const_data_ptr<float>();
    sin_ = sin.const_data_ptr<float>();
  }

  // Rows begin .. end: queries to their rows of `query` [T, H, D], key and value of row t to where place(t) says.
  template <class T, class Place>
  void split(int64_t begin, int64_t end, T* query, Place place) const {
    const OptionalTensor& norm = query_norm_ ? query_norm_ : key_norm_;
    by_dtype(qkv_.scalar_type(), [&](auto element) {
      by_dtype(norm ? norm->scalar_type() : at::kFloat,
               [&](auto norm_element) { split<decltype(element), decltype(norm_element)>(begin, end, query, place); });
    });
  }

  const int64_t num_rows, width, num_heads, num_kv_heads, head_dim;

 private:
  template <class In, class W, class T, class Place>
  void split(int64_t begin, int64_t end, T* query, Place place) const {
    Scratch& scratch = Scratch::of_thread<Projection>();
    scratch.reset();
    float* head = scratch.take<float>(head_dim);
    const W* query_norm = query_norm_ ? query_norm_->const_data_ptr<W>() : nullptr;
    const W* key_norm = key_norm_ ? key_norm_->const_data_ptr<W>() : nullptr;
    for (int64_t t = begin; t < end; ++t) {
      const In* from = qkv_.const_data_ptr<In>() + t * width;
      const float scale = scales_ ? scales_[t] : 1.f;
      const KeyValueRow<T> to = place(t);
      for (int64_t h = 0; h < num_heads; ++h, from += head_dim) {
        load_head(from, scale, query_norm, head);
        rotate_head(head, t, query + (t * num_heads + h) * head_dim);
      }
      for (int64_t k = 0; k < num_kv_heads; ++k, from += head_dim) {
        load_head(from, scale, key_norm, head);
        rotate_head(head, t, to.keys + k * to.head_stride);
      }
      for (int64_t k = 0; k < num_kv_heads; ++k, from += head_dim) {
        for_lanes(head_dim, [&](int64_t i, int lanes) {
          store_lanes(to.values + k * to.head_stride + i, load_lanes(from + i, lanes) * set(scale), lanes);
        });
      }
    }
  }

  // One head times `scale`, and over its root mean square times `norm` where there is one.
  template <class In, class W>
  void load_head(const In* from, float scale, const W* norm, float* head) const {
    Vec squares = zero();
    for_lanes(head_dim, [&](int64_t i, int lanes) {
      const Vec x = load_lanes(from + i, lanes) * set(scale);
      squares = fma(x, x, squares);
      store_lanes(head + i, x, lanes);
    });
    if (!norm) return;
    const Vec inverse = set(1.f / std::sqrt(reduce_add(squares) / static_cast<float>(head_dim) + eps_));
    for_lanes(head_dim, [&](int64_t i, int lanes) {
      store_lanes(head + i, load_lanes(head + i, lanes) * inverse * load_lanes(norm + i, lanes), lanes);
    });
  }

  template <class T>
  void rotate_head(const float* head, int64_t t, T* to) const {
    const int64_t half = head_dim / 2;
    for_lanes(half, [&](int64_t i, int lanes) {
      const Vec a = load_lanes(head + i, lanes), b = load_lanes(head + half + i, lanes);
      const Vec c = load_lanes(cos_ + t * half + i, lanes), s = load_lanes(sin_ + t * half + i, lanes);
      store_lanes(to + i, a * c - b * s, lanes);
      store_lanes(to + half + i, b * c + a * s, lanes);
    });
  }

  const Tensor& qkv_;
  const OptionalTensor &query_norm_, &key_norm_;
  float eps_;
  const float *scales_, *cos_, *sin_;
};

}  // namespace v4flash
