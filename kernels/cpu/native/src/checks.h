// What an operation demands of its tensors, said in one line each, and the choice of a type by a tensor's dtype.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

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
  TORCH_CHECK(t.dim() == 5 && t.size(1) == 2 && t.size(2) > 0 && t.size(3) > 0 && t.stride(4) == 1 &&
                  t.stride(3) == t.size(4) && t.stride(2) == t.size(3) * t.size(4) &&
                  t.stride(1) == t.size(2) * t.size(3) * t.size(4),
              "body must be blocks [N, 2, K, B, D] of at least one row, each contiguous, not ", t.sizes());
}
// The last key of a block is read in whole steps, whose rest are codes of values.
constexpr int64_t kCodesAtOnce = 32;
// The same in any form; int8 codes and nothing else have scales [N, 2, K, B, C], one for group_size channels.
inline void check_stored(const Tensor& body, const OptionalTensor& scales, int64_t group_size) {
  check_body(body);
  TORCH_CHECK(is_float(body) || body.scalar_type() == at::kHalf || body.scalar_type() == at::kChar,
              "body must be float32, bfloat16, float16 or int8, not ", body.scalar_type());
  TORCH_CHECK(scales.has_value() == (body.scalar_type() == at::kChar), "int8 codes have scales, nothing else has");
  if (!scales) return;
  TORCH_CHECK(body.stride(1) >= kCodesAtOnce, "int8 blocks must have at least ", kCodesAtOnce, " codes of keys");
  check_body(*scales);
  TORCH_CHECK(group_size > 0 && scales->scalar_type() == at::kHalf && scales->size(0) == body.size(0) &&
                  scales->size(1) == 2 && scales->size(2) == body.size(2) && scales->size(3) == body.size(3) &&
                  scales->size(4) == (body.size(4) + group_size - 1) / group_size,
              "scales must be float16 [N, 2, K, B, C] of the body's sizes");
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
// As by_dtype, for a body in any form.
template <class F>
inline void by_stored(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kChar: f(int8_t{}); break;
    case at::kHalf: f(c10::Half{}); break;
    default: by_dtype(dtype, f);
  }
}

}  // namespace v4flash
