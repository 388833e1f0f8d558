// Rows times a weight as it lies in memory, [out, in], both bfloat16, into float32: what logits need. Rounded to eight
// bits, the best tokens of a row would often tie.
#include <ATen/ops/empty.h>

#include "amx.h"
#include "best_outputs.h"
#include "checks.h"
#include "ops.h"
#include "parallel.h"
#include "tile.h"

namespace v4flash {
namespace {

using Packed = Tile<BF16>;
constexpr int64_t kOutputsPerTask = 192;  // a multiple of the rows of both products

// Lines of `count` outputs from `weight` on, as units; the weight itself where it may be read in whole lines.
const Packed::Unit* lines_of(const BF16* weight, int64_t width, int64_t count, int64_t rows, Packed::Unit* scratch,
                             int64_t num_units) {
  if (Packed::kDepth == 2 && width == num_units * 2 && count == rows) {
    return reinterpret_cast<const Packed::Unit*>(weight);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* line = reinterpret_cast<float*>(scratch + r * num_units);
    for (int64_t u = 0; u < num_units; u += kLanes) {
      const int64_t left = r < count ? width - u * Packed::kDepth : 0;
      const Vec units = left > 0 ? Packed::units_of_row(weight + r * width + u * Packed::kDepth, left) : zero();
      store_lanes(line + u, units, static_cast<int>(std::min<int64_t>(kLanes, num_units - u)));
    }
  }
  return scratch;
}

// products [count outputs][64] -> out [num_rows, ...] at a column.
void store_transposed(const float* products, int64_t count, int64_t num_rows, float* out, int64_t out_stride) {
  for (int64_t t = 0; t < num_rows; t += kLanes) {
    for (int64_t i = 0; i < count; i += kLanes) {
      Vec block[kLanes];
      for (int k = 0; k < kLanes; ++k) block[k] = load(products + (i + k) * kTileKeys + t);
      transpose(block);
      const auto lanes = static_cast<int>(std::min<int64_t>(kLanes, count - i));
      for (int j = 0; j < kLanes && t + j < num_rows; ++j) store_lanes(out + (t + j) * out_stride + i, block[j], lanes);
    }
  }
}

// finish(products [count outputs][64 rows], first row, number of rows, first output, count) for rows packed by 64.
// Product is a matrix product of tile.h or amx.h. A few lines of the weight serve all rows while they are near.
template <class Product, class Finish>
void multiply_rows(const Packed::Unit* columns, int64_t num_rows, const BF16* weight, int64_t num_outputs,
                   int64_t width, int64_t num_units, Finish finish) {
  for_workers((num_outputs + kOutputsPerTask - 1) / kOutputsPerTask, [&](auto each_task) {
    struct Owner {};
    Scratch& scratch = Scratch::of_thread<Owner>();
    constexpr int64_t kProducts = (Product::kRows + kLanes - 1) / kLanes * kLanes * kTileKeys;
    scratch.reset();
    float* products = scratch.take<float>(kProducts);
    auto* lines = scratch.take<Packed::Unit>(Product::kRows * num_units);
    [[maybe_unused]] const Product set_up;
    each_task([&](int64_t task, int64_t) {
      const int64_t end = std::min((task + 1) * kOutputsPerTask, num_outputs);
      for (int64_t o = task * kOutputsPerTask; o < end; o += Product::kRows) {
        const int64_t count = std::min<int64_t>(Product::kRows, end - o);
        const auto* a = lines_of(weight + o * width, width, count, Product::kRows, lines, num_units);
        for (int64_t t = 0; t < num_rows; t += kTileKeys) {
          const int64_t left = std::min<int64_t>(kTileKeys, num_rows - t);
          const int64_t num_columns = (left + Product::kColumns - 1) / Product::kColumns * Product::kColumns;
          Product::template multiply<false>(a, num_units, columns + t * num_units, kTileKeys, products, kTileKeys,
                                            num_units, num_columns);
          finish(products, t, left, o, count);
        }
      }
    });
  });
}

// multiply_rows of x [T, X] as it lies in memory.
template <class Finish>
void multiply(const Tensor& x, const Tensor& weight, Finish finish) {
  check_rows(x, 2, "x");
  check_rows(weight, 2, "weight");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16,
              "x and weight must be bfloat16");
  TORCH_CHECK(x.size(1) == weight.size(1), "x and weight must agree on the inner size");
  const int64_t num_rows = x.size(0), width = x.size(1), num_outputs = weight.size(0);
  const BF16* from = x.const_data_ptr<BF16>();
  const BF16* w = weight.const_data_ptr<BF16>();
  const int64_t num_units = (width + Packed::kDepth - 1) / Packed::kDepth;
  struct Owner {};
  Scratch& scratch = Scratch::of_thread<Owner>();
  const int64_t num_padded = (num_rows + kTileKeys - 1) / kTileKeys * kTileKeys;
  scratch.reset();
  auto* columns = scratch.take<Packed::Unit>(num_units * num_padded);
  for (int64_t t = 0; t < num_rows; t += kTileKeys) {
    const int count = static_cast<int>(std::min<int64_t>(kTileKeys, num_rows - t));
    const BF16* rows[kTileKeys];
    for (int i = 0; i < count; ++i) rows[i] = from + (t + i) * width;
    pack_columns(rows, count, width, columns + t * num_units);
  }
#if defined(__AMX_BF16__)
  if (amx_in_use() && num_units % AmxProduct::kStep == 0) {
    return multiply_rows<AmxProduct>(columns, num_rows, w, num_outputs, width, num_units, finish);
  }
#endif
  multiply_rows<RegisterProduct<BF16>>(columns, num_rows, w, num_outputs, width, num_units, finish);
}

}  // namespace

Tensor wide_linear(const Tensor& x, const Tensor& weight) {
  const int64_t num_outputs = weight.size(0);
  Tensor out = at::empty({x.size(0), num_outputs}, x.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  multiply(x, weight, [=](const float* products, int64_t t, int64_t num_rows, int64_t o, int64_t count) {
    store_transposed(products, count, num_rows, to + t * num_outputs + o, num_outputs);
  });
  return out;
}

std::tuple<Tensor, Tensor> wide_best(const Tensor& x, const Tensor& weight) {
  const BestOutputs best(x.size(0), weight.size(0), 1);
  multiply(x, weight, [&](const float* products, int64_t t, int64_t num_rows, int64_t o, int64_t count) {
    const auto ours = best.of_thread();
    for (int64_t i = 0; i < num_rows; i += kLanes) ours.take(t + i, products + i, kTileKeys, count, o);
  });
  return best.found();
}

}  // namespace v4flash
