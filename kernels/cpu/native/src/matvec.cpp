// One to four rows times a weight as it lies in memory, [out, in]: one stream through the weight, prefetched ahead.
#include <ATen/ops/empty.h>

#include "checks.h"
#include "dot.h"
#include "dot_int8.h"
#include "ops.h"
#include "parallel.h"

namespace v4flash {
namespace {

constexpr int64_t kMaxRows = 4;
constexpr int64_t kAheadBytes = 4096;       // how far the weight is fetched before it is used
constexpr int64_t kBytesPerThread = 32768;  // of weight; less is not worth a second thread

template <class W>
void fetch_ahead(const W* w) {
  _mm_prefetch(reinterpret_cast<const char*>(w) + kAheadBytes, _MM_HINT_T0);
}

// out[t, o] for outputs begin .. end, kLanes inner products at a time.
template <class D, int rows, class W>
void multiply_outputs(const W* weight, const typename D::Element* x, int64_t width, int64_t begin, int64_t end,
                      float* out, int64_t out_stride) {
  constexpr int outputs = kLanes / rows;
  for (int64_t o = begin; o < end; o += outputs) {
    Vec sums[kLanes];
    for (int i = 0; i < outputs; ++i) {
      const W* w = weight + std::min(o + i, end - 1) * width;
      D sum[rows];
      int64_t d = 0;
      for (; d + D::kWidth <= width; d += D::kWidth) {
        fetch_ahead(w + d);
#pragma GCC unroll 4
        for (int t = 0; t < rows; ++t) sum[t].mac(w + d, x + t * width + d);
      }
      for (int t = 0; t < rows; ++t) {
        if (d < width) sum[t].mac_n(w + d, x + t * width + d, static_cast<int>(width - d));
        sums[i * rows + t] = sum[t].total();
      }
    }
    float products[kLanes];
    store(products, row_sums(sums));
    for (int i = 0; i < outputs && o + i < end; ++i) {
      for (int t = 0; t < rows; ++t) out[t * out_stride + o + i] = products[i * rows + t];
    }
  }
}

template <class F>
void for_outputs(int64_t num_outputs, int64_t bytes, F f) {
  const int64_t grain = std::max<int64_t>(kLanes, kBytesPerThread / std::max<int64_t>(1, bytes) * kLanes / kLanes);
  at::parallel_for(0, num_outputs, grain, f);
}

template <class D, class W>
void multiply_floats(const Tensor& x, const Tensor& weight, Tensor& out) {
  using Element = typename D::Element;
  const int64_t num_rows = x.size(0), width = x.size(1), num_outputs = weight.size(0);
  constexpr auto dtype = c10::CppTypeToScalarType<Element>::value;
  const Tensor rows = x.to(dtype);
  const auto* from = rows.const_data_ptr<Element>();
  const W* w = weight.const_data_ptr<W>();
  float* to = out.mutable_data_ptr<float>();
  for_outputs(num_outputs, width * static_cast<int64_t>(sizeof(W)), [&](int64_t begin, int64_t end) {
    int64_t t = 0;
    if (num_rows == 4) multiply_outputs<D, 4>(w, from, width, begin, end, to, num_outputs), t = 4;
    if (num_rows - t >= 2) {
      multiply_outputs<D, 2>(w, from, width, begin, end, to, num_outputs);
      t += 2;
    }
    if (num_rows - t == 1) {
      multiply_outputs<D, 1>(w, from + t * width, width, begin, end, to + t * num_outputs, num_outputs);
    }
  });
}

void multiply_int8(const Tensor& x, const Tensor& weight, Tensor& out) {
  const int64_t num_rows = x.size(0), width = x.size(1), num_outputs = weight.size(0);
  const auto* rows = x.const_data_ptr<uint8_t>();
  const auto* weights = weight.const_data_ptr<int8_t>();
  float* to = out.mutable_data_ptr<float>();
  for_outputs(num_outputs, width, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      const int8_t* w = weights + o * width;
      for (int64_t t = 0; t < num_rows; ++t) {  // after the first row the weight comes from the nearest cache
        Int8Dot dot;
        int64_t d = 0;
        for (; d + Int8Dot::kWidth <= width; d += Int8Dot::kWidth) {
          fetch_ahead(w + d);
          dot.add(rows + t * width + d, w + d);
        }
        if (d < width) dot.add_n(rows + t * width + d, w + d, static_cast<int>(width - d));
        to[t * num_outputs + o] = static_cast<float>(dot.total());
      }
    }
  });
}

void apply_scales(Tensor& out, const float* weight_scales, const float* x_scales) {
  if (!weight_scales && !x_scales) return;
  const int64_t num_outputs = out.size(1);
  float* to = out.mutable_data_ptr<float>();
  for (int64_t t = 0; t < out.size(0); ++t, to += num_outputs) {
    const Vec row = set(x_scales ? x_scales[t] : 1.f);
    for_lanes(num_outputs, [&](int64_t o, int lanes) {
      const Vec scale = weight_scales ? row * load_lanes(weight_scales + o, lanes) : row;
      store_lanes(to + o, load_lanes(to + o, lanes) * scale, lanes);
    });
  }
}

}  // namespace

Tensor matvec(const Tensor& x, const Tensor& weight, const OptionalTensor& weight_scales,
              const OptionalTensor& x_scales) {
  check_rows(x, 2, "x");
  check_rows(weight, 2, "weight");
  TORCH_CHECK(x.size(0) <= kMaxRows, "at most ", kMaxRows, " rows, not ", x.size(0));
  TORCH_CHECK(x.size(1) == weight.size(1), "x and weight must agree on the inner size");
  const float* output_scales = scales_of(weight_scales, weight.size(0), "weight_scales");
  const float* row_scales = scales_of(x_scales, x.size(0), "x_scales");
  Tensor out = at::empty({x.size(0), weight.size(0)}, x.options().dtype(at::kFloat));
  const auto from = x.scalar_type(), to = weight.scalar_type();
  if (from == at::kByte && to == at::kChar) {
    multiply_int8(x, weight, out);
  } else {
    TORCH_CHECK(is_float(x) && is_float(weight), "x and weight must be floats, or u8 and s8, not ", from, " and ", to);
    if (to == at::kFloat) multiply_floats<WideDot<float>, float>(x, weight, out);
    else if (from == at::kFloat) multiply_floats<WideDot<BF16>, BF16>(x, weight, out);
    else multiply_floats<Dot<BF16, BF16>, BF16>(x, weight, out);
  }
  apply_scales(out, output_scales, row_scales);
  return out;
}

}  // namespace v4flash
