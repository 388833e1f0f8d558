// What an operation demands of its tensors, said in one line each, and the choice of a type by a tensor's dtype.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

#include <optional>

namespace v4flash {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline bool is_float(const Tensor& t) { return t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16; }

inline void check_rows(const Tensor& t, int64_t dim, const char* name) {
  TORCH_CHECK(t.dim() == dim && t.is_contiguous(), name, " must be contiguous of ", dim, " dimensions, not ",
              t.sizes());
}
inline void check_float(const Tensor& t, int64_t dim, const char* name) {
  check_rows(t, dim, name);
  TORCH_CHECK(is_float(t), name, " must be float32 or bfloat16, not ", t.scalar_type());
}
// A layer of the cache [N, 2, K, B, D]: each block contiguous, blocks anywhere.
inline void check_body(const Tensor& t) {
  TORCH_CHECK(t.dim() == 5 && t.stride(4) == 1 && t.stride(3) == t.size(4) && t.stride(2) == t.size(3) * t.size(4) &&
                  t.stride(1) == t.size(2) * t.size(3) * t.size(4),
              "body must be blocks [N, 2, K, B, D], each contiguous, not ", t.sizes());
}
inline void check_vector(const Tensor& t, at::ScalarType dtype, int64_t size, const char* name) {
  check_rows(t, 1, name);
  TORCH_CHECK(t.scalar_type() == dtype && t.size(0) == size, name, " must be ", size, " of ", dtype, ", not ",
              t.size(0), " of ", t.scalar_type());
}
// Scales of rows or nothing.
inline const float* scales_of(const OptionalTensor& t, int64_t size, const char* name) {
  if (!t) return nullptr;
  check_vector(*t, at::kFloat, size, name);
  return t->const_data_ptr<float>();
}

// f(a value of type T) where T is the element type of a float32 or bfloat16 tensor.
template <class F>
inline void by_dtype(at::ScalarType dtype, F f) {
  dtype == at::kFloat ? f(float{}) : f(c10::BFloat16{});
}

}  // namespace v4flash
