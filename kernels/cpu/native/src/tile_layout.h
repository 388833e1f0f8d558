// A weight packed into tiles, as the tile unit (AMX) multiplies them: a tile has a line for each unit of depth, with
// that unit of kTileOutputs outputs, which is a vector too. A *column* of tiles is all depth of these outputs.
#pragma once
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>

#include "checks.h"

namespace v4flash {

constexpr int64_t kTileBytes = 1024, kLineBytes = 64;
constexpr int64_t kUnitBytes = 4;  // neighbours in depth that one lane multiplies
constexpr int64_t kTileOutputs = 16;
constexpr int64_t kOutputs = 32;    // of two columns
constexpr int64_t kGroupRows = 32;  // rows that are multiplied at a time

inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Rows as they are, or with zeros behind them where they do not fill whole lines. Refuses those that do not fit the
// weight, and all in a variant that cannot multiply them.
inline Tensor tile_rows(const Tensor& x, const Tensor& packed, int64_t num_outputs, at::ScalarType rows,
                        at::ScalarType weights) {
  check_rows(x, 2, "x");
  check_rows(packed, 4, "packed");
  TORCH_CHECK(x.scalar_type() == rows && packed.scalar_type() == weights, "x and packed must be ", rows, " and ",
              weights, ", not ", x.scalar_type(), " and ", packed.scalar_type());
  const int64_t line = kLineBytes / x.element_size();
  TORCH_CHECK(packed.size(0) == pieces(num_outputs, kOutputs) && packed.size(1) == pieces(x.size(1), line) &&
                  packed.size(1) > 0 && packed.size(2) == 2 && packed.size(3) * packed.element_size() == kTileBytes,
              "packed is no weight of ", num_outputs, " outputs over ", x.size(1));
#if !defined(__AVX512BF16__)
  TORCH_CHECK(false, "this variant has no tiles");
#endif
  const int64_t width = packed.size(1) * line;
  if (x.size(1) == width) return x;
  Tensor out = at::zeros({x.size(0), width}, x.options());
  out.narrow(1, 0, x.size(1)).copy_(x);
  return out;
}

// Two columns of tiles; the next tile of each lies two tiles further.
struct TwoColumns {
  const char *left, *right;
  int64_t output;  // which one the first of them is, as the caller counts
};

}  // namespace v4flash
