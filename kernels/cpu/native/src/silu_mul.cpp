// silu(gate) * up, as floats or, after a Hadamard in blocks, as quantised rows.
#include <ATen/ops/empty.h>

#include <cmath>

#include "checks.h"
#include "ops.h"
#include "parallel.h"
#include "quantise.h"

namespace v4flash {
namespace {

constexpr int64_t kCostOfElement = 4;  // an exponential and a division weigh more than a load
constexpr int64_t kMaxHadamard = 64;

// to[i] = silu(gate[i] scale) * (gate[width + i] scale)
template <class T, class Out>
void gate_row(const T* gate, int64_t width, float scale, Out* to) {
  constexpr Precision precision = std::is_same_v<Out, BF16> ? Precision::kBF16 : Precision::kF32;
  const Vec s = set(scale), minus_log2_e = set(-1.44269504f), one = set(1.f);
  for_lanes(width, [&](int64_t i, int lanes) {
    const Vec g = load_lanes(gate + i, lanes) * s, up = load_lanes(gate + width + i, lanes) * s;
    store_lanes(to + i, g * up / (one + exp2<precision>(g * minus_log2_e)), lanes);
  });
}

// One butterfly inside a vector: lane i becomes x[i] + x[i + stride] or, in the upper half, x[i - stride] - x[i].
Vec butterfly(Vec x, int stride, const float* signs) { return fma(x, load(signs), swap_lanes(x, stride)); }

// Sylvester's Hadamard over the square root of `block`, on each block of the row, in place.
void hadamard_row(float* row, int64_t width, int block) {
  alignas(64) float signs[4][kLanes];  // of the strides 1, 2, 4, 8
  for (int k = 0; k < 4; ++k) {
    for (int i = 0; i < kLanes; ++i) signs[k][i] = i & (1 << k) ? -1.f : 1.f;
  }
  const Vec norm = set(1.f / std::sqrt(static_cast<float>(block)));
  for_lanes(width, [&](int64_t i, int lanes) {
    Vec x = load_lanes(row + i, lanes) * norm;
    for (int k = 0; (1 << k) < std::min(block, kLanes); ++k) x = butterfly(x, 1 << k, signs[k]);
    store_lanes(row + i, x, lanes);
  });
  for (int64_t start = 0; start < width; start += block) {
    for (int stride = kLanes; stride < block; stride *= 2) {
      for (int i = 0; i < block; i += (i & stride) ? stride : 0) {
        for (const int end = i + stride; i < end; i += kLanes) {
          float *a = row + start + i, *b = a + stride;
          const Vec x = load(a), y = load(b);
          store(a, x + y);
          store(b, x - y);
        }
      }
    }
  }
}

}  // namespace

Tensor silu_mul(const Tensor& gate_up, const OptionalTensor& scales, at::ScalarType dtype) {
  check_float(gate_up, 2, "gate_up");
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "dtype must be float32 or bfloat16, not ", dtype);
  TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up must have two halves");
  const int64_t num_rows = gate_up.size(0), width = gate_up.size(1) / 2;
  const float* row_scales = scales_of(scales, num_rows, "scales");
  Tensor out = at::empty({num_rows, width}, gate_up.options().dtype(dtype));
  by_dtype(gate_up.scalar_type(), [&](auto in_element) {
    by_dtype(dtype, [&](auto out_element) {
      const auto* from = gate_up.const_data_ptr<decltype(in_element)>();
      auto* to = out.mutable_data_ptr<decltype(out_element)>();
      for_rows(num_rows, width * kCostOfElement, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          gate_row(from + 2 * t * width, width, row_scales ? row_scales[t] : 1.f, to + t * width);
        }
      });
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> silu_mul_int8(const Tensor& gate_up, const OptionalTensor& scales, int64_t hadamard) {
  check_float(gate_up, 2, "gate_up");
  TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up must have two halves");
  const int64_t num_rows = gate_up.size(0), width = gate_up.size(1) / 2;
  TORCH_CHECK(hadamard >= 0 && hadamard <= kMaxHadamard && (hadamard & (hadamard - 1)) == 0,
              "hadamard must be 0 or a power of two up to ", kMaxHadamard, ", not ", hadamard);
  TORCH_CHECK(hadamard == 0 || width % hadamard == 0, "rows of ", width, " do not divide into blocks of ", hadamard);
  const float* row_scales = scales_of(scales, num_rows, "scales");
  Tensor out = at::empty({num_rows, width}, gate_up.options().dtype(at::kByte));
  Tensor out_scales = at::empty({num_rows}, gate_up.options().dtype(at::kFloat));
  auto* to = out.mutable_data_ptr<uint8_t>();
  auto* to_scales = out_scales.mutable_data_ptr<float>();
  by_dtype(gate_up.scalar_type(), [&](auto element) {
    const auto* from = gate_up.const_data_ptr<decltype(element)>();
    for_rows(num_rows, width * kCostOfElement, [&](int64_t begin, int64_t end) {
      Scratch& scratch = Scratch::of_thread<class Silu>();
      scratch.reset(Scratch::padded<float>(width));
      float* row = scratch.take<float>(width);
      for (int64_t t = begin; t < end; ++t) {
        gate_row(from + 2 * t * width, width, row_scales ? row_scales[t] : 1.f, row);
        if (hadamard > 1) hadamard_row(row, width, static_cast<int>(hadamard));
        to_scales[t] = row_scale(row_magnitude(row, width));
        quantise_row(row, width, to_scales[t], to + t * width);
      }
    });
  });
  return {out, out_scales};
}

}  // namespace v4flash
