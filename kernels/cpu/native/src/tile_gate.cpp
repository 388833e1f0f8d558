// Gate and up linears with the gate between them, while their products are near; rows of int8
// are rounded afterwards. Weights are packed as for `tile_linear`.
#include <ATen/ops/empty.h>

#include "checks.h"
#include "gate.h"
#include "multiply_tiles.h"
#include "ops.h"

namespace v4flash {
namespace {

constexpr int64_t kColumns = kHadamard;  // of the result that one task computes

// A task is kColumns gates and as many ups; each column of gates is multiplied together with its ups.
struct GatesAndUps {
  explicit GatesAndUps(const Tensor& packed)
      : strip(packed.size(1) * 2 * kTileBytes),
        half(packed.size(0) / 2 * strip),
        bytes(kColumns / kOutputs * strip),
        num_tasks(half / bytes),
        from(static_cast<const char*>(packed.const_data_ptr())) {}
  int64_t strip, half, bytes, num_tasks;
  static constexpr int64_t num_pairs = kColumns / kTileOutputs;
  const char* from;
  const char* first(int64_t task) const { return from + task * bytes; }
  const char* second(int64_t task) const { return first(task) + half; }
  TwoColumns pair(int64_t task, int64_t i) const {
    const char* gates = first(task) + i / 2 * strip + i % 2 * kTileBytes;
    return {gates, gates + half, task * kColumns + i * kTileOutputs};
  }
};

}  // namespace

Tensor tile_gate(const Tensor& x, const Tensor& packed) {
  const int64_t width = packed.size(0) / 2 * kOutputs;
  const Tensor rows = tile_rows(x, packed, 2 * width, at::kBFloat16, at::kBFloat16);
  TORCH_CHECK(width % kColumns == 0, "gate and up must be multiples of ", kColumns, " wide, not ", width);
  Tensor out = at::empty({x.size(0), width}, x.options());
#if defined(__AVX512BF16__)
  BF16* to = out.mutable_data_ptr<BF16>();
  multiply_tiles<false>(rows, GatesAndUps(packed), [=](int64_t t, int64_t count, int64_t o, const int32_t* products) {
    const float* both = reinterpret_cast<const float*>(products);
    for (const int64_t end = t + count; t < end; ++t, both += kOutputs) {
      store(to + t * width + o, gated<BF16>(load(both), load(both + kTileOutputs)));
    }
  });
#endif
  return out;
}

std::tuple<Tensor, Tensor> tile_gate_int8(const Tensor& x, const Tensor& x_scales, const Tensor& packed,
                                          const Tensor& scales, const Tensor& zeros, int64_t hadamard) {
  const int64_t num_rows = x.size(0), width = packed.size(0) / 2 * kOutputs;
  const Tensor rows = tile_rows(x, packed, 2 * width, at::kByte, at::kChar);
  TORCH_CHECK(width % kColumns == 0, "gate and up must be multiples of ", kColumns, " wide, not ", width);
  check_vector(x_scales, at::kFloat, num_rows, "x_scales");
  check_vector(scales, at::kFloat, 2 * width, "scales");
  check_vector(zeros, at::kInt, 2 * width, "zeros");
  check_hadamard(hadamard, width);
  Tensor out = at::empty({num_rows, width}, scales.options().dtype(at::kBFloat16));
#if defined(__AVX512VNNI__)
  BF16* to = out.mutable_data_ptr<BF16>();
  const float *of_row = x_scales.const_data_ptr<float>(), *scale = scales.const_data_ptr<float>();
  const int32_t* zero = zeros.const_data_ptr<int32_t>();
  multiply_tiles<true>(rows, GatesAndUps(packed), [=](int64_t t, int64_t count, int64_t o, const int32_t* products) {
    const __m512i gate_zero = _mm512_loadu_si512(zero + o), up_zero = _mm512_loadu_si512(zero + width + o);
    const Vec gate_scale = load(scale + o), up_scale = load(scale + width + o);
    for (const int64_t end = t + count; t < end; ++t, products += kOutputs) {
      const __m512i gate = _mm512_sub_epi32(_mm512_load_si512(products), gate_zero);
      const __m512i up = _mm512_sub_epi32(_mm512_load_si512(products + kTileOutputs), up_zero);
      const Vec s = set(of_row[t]);
      store(to + t * width + o,
            gated<BF16>(_mm512_cvtepi32_ps(gate) * gate_scale * s, _mm512_cvtepi32_ps(up) * up_scale * s));
    }
  });
#endif
  return quantise_rows(out, hadamard);
}

}  // namespace v4flash
