// Linears over weights packed into tiles in the order in which they are multiplied: one layout
// serves one row and thousands, and is read as one stream. While two columns of tiles are multiplied the next two come.
#include <ATen/ops/zeros.h>

#include "best_outputs.h"
#include "checks.h"
#include "multiply_tiles.h"
#include "ops.h"
#include "parallel.h"

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

#if defined(__AVX512BF16__)
template <bool is_int8>
Vec sums_of(const int32_t* products, const int32_t* zeros, int lanes) {
  if constexpr (!is_int8) return load(reinterpret_cast<const float*>(products));
  const __m512i added = _mm512_maskz_loadu_epi32(first_lanes(lanes), zeros);
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(products), added));
}
#endif

// finished(sums, output, lanes) of x times the weight, less `zeros` [O] in int8 -> out [T, O], rounded to its dtype.
template <bool is_int8, class Finished>
void linear(const Tensor& x, const Tensor& packed, const int32_t* zeros, Tensor& out, Finished finished) {
  check_float(out, 2, "out");
  TORCH_CHECK(out.size(0) == x.size(0), "out must have ", x.size(0), " rows, not ", out.size(0));
  const int64_t num_outputs = out.size(1);
  const auto rows_dtype = is_int8 ? at::kByte : at::kBFloat16, weight_dtype = is_int8 ? at::kChar : at::kBFloat16;
  const Tensor rows = tile_rows(x, packed, num_outputs, rows_dtype, weight_dtype);
#if defined(__AVX512BF16__)
  by_dtype(out.scalar_type(), [&](auto element) {
    auto* to = out.mutable_data_ptr<decltype(element)>();
    const auto finish = [=](int64_t begin, int64_t count, int64_t output, const int32_t* products) {
      for_lanes(std::min(kOutputs, num_outputs - output), [&](int64_t i, int lanes) {
        const int64_t o = output + i;
        for (int64_t r = 0; r < count; ++r) {
          const Vec sums = sums_of<is_int8>(products + r * kOutputs + i, zeros + o, lanes);
          store_lanes(to + (begin + r) * num_outputs + o, finished(sums, o, lanes), lanes);
        }
      });
    };
    multiply_tiles<is_int8>(rows, Strips(packed), finish);
  });
#endif
}

#if defined(__AVX512BF16__)
inline Vec lane_numbers() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
#endif

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

void tile_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, Tensor& out) {
  if (bias) check_vector(*bias, at::kBFloat16, out.size(-1), "bias");
  const BF16* added = bias ? bias->const_data_ptr<BF16>() : nullptr;
  linear<false>(x, packed, nullptr, out,
                [=](Vec sums, int64_t o, int lanes) { return added ? sums + load_lanes(added + o, lanes) : sums; });
}

std::tuple<Tensor, Tensor> tile_best(const Tensor& x, const Tensor& packed, int64_t num_outputs) {
  const Tensor rows = tile_rows(x, packed, num_outputs, at::kBFloat16, at::kBFloat16);
  const BestOutputs best(x.size(0), num_outputs, kLanes);
#if defined(__AVX512BF16__)
  multiply_tiles<false>(rows, Strips(packed), [&](int64_t begin, int64_t count, int64_t o, const int32_t* products) {
    const auto ours = best.of_thread();
    for (int64_t r = 0; r < count; ++r) {
      const float* outputs = reinterpret_cast<const float*>(products + r * kOutputs);
      ours.take_row((begin + r) * kLanes, outputs, std::min(kOutputs, num_outputs - o), o, lane_numbers());
    }
  });
#endif
  return best.found();
}

void tile_linear_int8(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& zeros, Tensor& out) {
  check_vector(scales, at::kFloat, out.size(-1), "scales");
  check_vector(zeros, at::kInt, out.size(-1), "zeros");
  const float* scale = scales.const_data_ptr<float>();
  linear<true>(x, packed, zeros.const_data_ptr<int32_t>(), out,
               [=](Vec sums, int64_t o, int lanes) { return sums * load_lanes(scale + o, lanes); });
}

}  // namespace v4flash
