// silu(gate) * up.
#include <ATen/ops/empty.h>

#include "checks.h"
#include "gate.h"
#include "ops.h"
#include "parallel.h"

namespace v4flash {
namespace {

constexpr int64_t kCostOfElement = 4;  // an exponential and a division weigh more than a load
// to[i] = silu(gate[i] scale) * (gate[width + i] scale)
template <class T, class Out>
void gate_row(const T* gate, int64_t width, float scale, Out* to) {
  const Vec s = set(scale);
  for_lanes(width, [&](int64_t i, int lanes) {
    store_lanes(to + i, gated<Out>(load_lanes(gate + i, lanes) * s, load_lanes(gate + width + i, lanes) * s), lanes);
  });
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

}  // namespace v4flash
