// Quantises the rows of a matrix, each by itself.
#include <ATen/ops/empty.h>

#include "checks.h"
#include "gate.h"
#include "ops.h"
#include "parallel.h"
#include "quantise.h"

namespace v4flash {

std::tuple<Tensor, Tensor> quantise_rows(const Tensor& x, int64_t hadamard) {
  check_float(x, 2, "x");
  const int64_t num_rows = x.size(0), width = x.size(1);
  check_hadamard(hadamard, width);
  Tensor out = at::empty(x.sizes(), x.options().dtype(at::kByte));
  Tensor scales = at::empty({num_rows}, x.options().dtype(at::kFloat));
  auto* to = out.mutable_data_ptr<uint8_t>();
  auto* to_scales = scales.mutable_data_ptr<float>();
  by_dtype(x.scalar_type(), [&](auto element) {
    const auto* rows = x.const_data_ptr<decltype(element)>();
    for_rows(num_rows, width, [&](int64_t begin, int64_t end) {
      Scratch& scratch = Scratch::of_thread<class Quantise>();
      scratch.reset();
      float* rotated = scratch.take<float>(hadamard ? width : 0);
      for (int64_t t = begin; t < end; ++t) {
        const auto* row = rows + t * width;
        if (hadamard) {
          const float scale = row_scale(rotate_row(row, width, rotated));
          quantise_row(rotated, width, scale, to + t * width);
          to_scales[t] = std::max(scale / kHadamardNorm, FLT_MIN);
        } else {
          to_scales[t] = row_scale(row_magnitude(row, width));
          quantise_row(row, width, to_scales[t], to + t * width);
        }
      }
    });
  });
  return {out, scales};
}

}  // namespace v4flash
