// Linears by the tile unit (AMX) over weights packed into tiles in the order in which they are multiplied: one layout
// serves one row and thousands, and is read as one stream. While two columns of tiles are multiplied the next two come.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "checks.h"
#include "ops.h"
#include "parallel.h"
#include "tile_group.h"

namespace v4flash {
namespace {

// Both columns of a task lie beside each other: a *strip*.
struct Strips {
  explicit Strips(const Tensor& packed)
      : num_tasks(packed.size(0)),
        bytes(packed.size(1) * kTileBytes),
        from(static_cast<const char*>(packed.const_data_ptr())) {}
  int64_t num_tasks, bytes;
  static constexpr int64_t num_pairs = 1;
  const char* from;
  const char* first(int64_t task) const { return from + task * 2 * bytes; }
  const char* second(int64_t task) const { return first(task) + bytes; }
  TwoColumns pair(int64_t task, int64_t) const { return {first(task), first(task) + kTileBytes, task * kOutputs}; }
};

// f(row, output, products, lanes) for some rows of a strip and those of its outputs that there are.
template <class F>
void for_products(int64_t begin, int64_t count, int64_t output, int64_t num_outputs, const int32_t* products, F f) {
  for_lanes(std::min(kOutputs, num_outputs - output), [&](int64_t i, int lanes) {
    for (int64_t r = 0; r < count; ++r) f(begin + r, output + i, products + r * kOutputs + i, lanes);
  });
}

Tensor empty_products(const Tensor& x, int64_t num_outputs, at::ScalarType dtype) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "dtype must be float32 or bfloat16, not ", dtype);
  return at::empty({x.size(0), num_outputs}, x.options().dtype(dtype));
}

}  // namespace

Tensor tile_pack(const Tensor& weight) {
  check_rows(weight, 2, "weight");
  TORCH_CHECK(weight.scalar_type() == at::kChar || weight.scalar_type() == at::kBFloat16,
              "weight must be int8 or bfloat16, not ", weight.scalar_type());
  const int64_t num_outputs = weight.size(0), bytes = weight.size(1) * weight.element_size();
  const int64_t num_strips = pieces(num_outputs, kOutputs), steps = pieces(bytes, kLineBytes);
  Tensor out = at::zeros({num_strips, steps, 2, kTileBytes / weight.element_size()}, weight.options());
  const char* from = static_cast<const char*>(weight.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for_rows(num_strips, kOutputs * bytes, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin * kOutputs; o < std::min(end * kOutputs, num_outputs); ++o) {
      for (int64_t b = 0; b < bytes; b += kUnitBytes) {  // line of a tile: a unit of each of its outputs
        const int64_t tile = (o / kOutputs * steps + b / kLineBytes) * 2 + o % kOutputs / kTileOutputs;
        const int64_t line = b % kLineBytes / kUnitBytes;
        char* unit = to + tile * kTileBytes + line * kLineBytes + o % kTileOutputs * kUnitBytes;
        std::copy_n(from + o * bytes + b, std::min(kUnitBytes, bytes - b), unit);
      }
    }
  });
  return out;
}

Tensor tile_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t num_outputs,
                   at::ScalarType dtype) {
  const Tensor rows = tile_rows(x, packed, num_outputs, at::kBFloat16, at::kBFloat16);
  if (bias) check_vector(*bias, at::kBFloat16, num_outputs, "bias");
  Tensor out = empty_products(x, num_outputs, dtype);
#if defined(__AMX_BF16__)
  const BF16* added = bias ? bias->const_data_ptr<BF16>() : nullptr;
  by_dtype(dtype, [&](auto element) {
    auto* to = out.mutable_data_ptr<decltype(element)>();
    multiply_tiles<false>(
        rows, Strips(packed), [=](int64_t begin, int64_t count, int64_t output, const int32_t* products) {
          for_products(begin, count, output, num_outputs, products,
                       [=](int64_t t, int64_t o, const int32_t* sums, int lanes) {
                         const Vec x = load(reinterpret_cast<const float*>(sums));
                         store_lanes(to + t * num_outputs + o, added ? x + load_lanes(added + o, lanes) : x, lanes);
                       });
        });
  });
#endif
  return out;
}

Tensor tile_linear_int8(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& zeros,
                        at::ScalarType dtype) {
  const int64_t num_outputs = scales.numel();
  const Tensor rows = tile_rows(x, packed, num_outputs, at::kByte, at::kChar);
  check_vector(scales, at::kFloat, num_outputs, "scales");
  check_vector(zeros, at::kInt, num_outputs, "zeros");
  Tensor out = empty_products(x, num_outputs, dtype);
#if defined(__AMX_INT8__)
  const float* scale = scales.const_data_ptr<float>();
  const int32_t* zero = zeros.const_data_ptr<int32_t>();
  by_dtype(dtype, [&](auto element) {
    auto* to = out.mutable_data_ptr<decltype(element)>();
    multiply_tiles<true>(
        rows, Strips(packed), [=](int64_t begin, int64_t count, int64_t output, const int32_t* products) {
          for_products(begin, count, output, num_outputs, products,
                       [=](int64_t t, int64_t o, const int32_t* sums, int lanes) {
                         const __m512i added = _mm512_maskz_loadu_epi32(first_lanes(lanes), zero + o);
                         const Vec exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums), added));
                         store_lanes(to + t * num_outputs + o, exact * load_lanes(scale + o, lanes), lanes);
                       });
        });
  });
#endif
  return out;
}

}  // namespace v4flash
