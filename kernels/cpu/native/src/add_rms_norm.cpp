// residual += delta * scale of its row; then RMSNorm of the residual, as floats or as quantised rows.
#include <ATen/ops/empty.h>

#include <cmath>

#include "checks.h"
#include "ops.h"
#include "parallel.h"
#include "quantise.h"

namespace v4flash {
namespace {

struct Norm {
  Norm(const Tensor& residual, const OptionalTensor& delta, const OptionalTensor& delta_scales, const Tensor& weight)
      : num_rows(residual.size(0)), width(residual.size(1)), delta(delta) {
    check_rows(residual, 2, "residual");
    TORCH_CHECK(residual.scalar_type() == at::kFloat, "residual must be float32");
    check_float(weight, 1, "weight");
    TORCH_CHECK(weight.size(0) == width, "weight must have the width of residual");
    if (delta) {
      check_float(*delta, 2, "delta");
      TORCH_CHECK(delta->sizes() == residual.sizes(), "delta must have the shape of residual");
    }
    scales = scales_of(delta_scales, num_rows, "delta_scales");
    rows = residual.mutable_data_ptr<float>();
  }

  // Adds the delta to row t and gives 1 / root mean square of the sum.
  float add(int64_t t, double eps) const {
    Vec squares = zero();
    float* row = rows + t * width;
    const auto accumulate = [&](auto load_delta) {
      for_lanes(width, [&](int64_t i, int lanes) {
        const Vec x = load_delta(i, lanes, load_lanes(row + i, lanes));
        store_lanes(row + i, x, lanes);
        squares = fma(x, x, squares);
      });
    };
    if (!delta) {
      for_lanes(width, [&](int64_t i, int lanes) {
        const Vec x = load_lanes(row + i, lanes);
        squares = fma(x, x, squares);
      });
    } else {
      by_dtype(delta->scalar_type(), [&](auto element) {
        const auto* d = delta->const_data_ptr<decltype(element)>() + t * width;
        const Vec scale = set(scales ? scales[t] : 1.f);
        accumulate([&](int64_t i, int lanes, Vec x) { return fma(load_lanes(d + i, lanes), scale, x); });
      });
    }
    return 1.f / std::sqrt(reduce_add(squares) / static_cast<float>(width) + static_cast<float>(eps));
  }

  int64_t num_rows, width;
  const OptionalTensor& delta;
  const float* scales;
  float* rows;
};

}  // namespace

Tensor add_rms_norm(Tensor& residual, const OptionalTensor& delta, const OptionalTensor& delta_scales,
                    const Tensor& weight, double eps) {
  const Norm norm(residual, delta, delta_scales, weight);
  Tensor out = at::empty(residual.sizes(), weight.options());
  by_dtype(weight.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T* w = weight.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_rows(norm.num_rows, norm.width, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const Vec scale = set(norm.add(t, eps));
        const float* row = norm.rows + t * norm.width;
        for_lanes(norm.width, [&](int64_t i, int lanes) {
          const Vec x = load_lanes(row + i, lanes) * scale * load_lanes(w + i, lanes);
          store_lanes(to + t * norm.width + i, x, lanes);
        });
      }
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm_int8(Tensor& residual, const OptionalTensor& delta,
                                             const OptionalTensor& delta_scales, const Tensor& weight, double eps) {
  const Norm norm(residual, delta, delta_scales, weight);
  Tensor out = at::empty(residual.sizes(), residual.options().dtype(at::kByte));
  Tensor scales = at::empty({norm.num_rows}, residual.options());
  auto* to = out.mutable_data_ptr<uint8_t>();
  auto* to_scales = scales.mutable_data_ptr<float>();
  by_dtype(weight.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T* w = weight.const_data_ptr<T>();
    for_rows(norm.num_rows, norm.width, [&](int64_t begin, int64_t end) {
      Scratch& scratch = Scratch::of_thread<Norm>();
      scratch.reset();
      float* normed = scratch.take<float>(norm.width);
      for (int64_t t = begin; t < end; ++t) {
        const Vec scale = set(norm.add(t, eps));
        const float* row = norm.rows + t * norm.width;
        Vec largest = zero();
        for_lanes(norm.width, [&](int64_t i, int lanes) {
          const Vec x = load_lanes(row + i, lanes) * scale * load_lanes(w + i, lanes);
          largest = max_magnitude(largest, x);
          store_lanes(normed + i, x, lanes);
        });
        to_scales[t] = row_scale(largest);
        quantise_row(normed, norm.width, to_scales[t], to + t * norm.width);
      }
    });
  });
  return {out, scales};
}

}  // namespace v4flash
