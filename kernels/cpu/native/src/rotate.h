// One head of a projection: scaled, normalised where the model wants it, its halves rotated.
#pragma once
#include <cmath>

#include "checks.h"
#include "simd.h"

namespace v4flash {

// Loads one head times `scale`, and over its root mean square times `norm` where there is one.
template <class T, class W>
inline void load_head(const T* from, int64_t head_dim, float scale, const W* norm, float eps, float* head) {
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
inline void rotate_head(const float* head, int64_t half, const float* cos, const float* sin, Out* to) {
  for_lanes(half, [&](int64_t i, int lanes) {
    const Vec a = load_lanes(head + i, lanes), b = load_lanes(head + half + i, lanes);
    const Vec c = load_lanes(cos + i, lanes), s = load_lanes(sin + i, lanes);
    store_lanes(to + i, a * c - b * s, lanes);
    store_lanes(to + half + i, b * c + a * s, lanes);
  });
}

inline void check_norm(const OptionalTensor& norm, int64_t head_dim, const char* name) {
  if (!norm) return;
  check_float(*norm, 1, name);
  TORCH_CHECK(norm->size(0) == head_dim, name, " must have the head dimension");
}

inline void check_angles(const Tensor& cos, const Tensor& sin, int64_t num_rows, int64_t head_dim) {
  TORCH_CHECK(head_dim % 2 == 0, "an odd head dimension has no halves to rotate");
  for (const Tensor& angles : {cos, sin}) {
    check_rows(angles, 2, "cos and sin");
    TORCH_CHECK(angles.scalar_type() == at::kFloat && angles.size(0) == num_rows && angles.size(1) == head_dim / 2,
                "cos and sin must be float32 [T, D / 2]");
  }
}

// The dtype of both norms, float32 where there is none.
inline at::ScalarType check_norms(const OptionalTensor& query_norm, const OptionalTensor& key_norm, int64_t head_dim) {
  check_norm(query_norm, head_dim, "query_norm");
  check_norm(key_norm, head_dim, "key_norm");
  const auto dtype = query_norm ? query_norm->scalar_type() : key_norm ? key_norm->scalar_type() : at::kFloat;
  TORCH_CHECK(!query_norm || !key_norm || key_norm->scalar_type() == dtype, "norms must be of one dtype");
  return dtype;
}

}  // namespace v4flash
