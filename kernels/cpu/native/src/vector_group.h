// Products of a group of rows with two columns of a packed weight in vector registers, for a CPU without the tile unit.
#pragma once
#include <cstring>

#include "simd.h"
#include "tile_layout.h"

namespace v4flash {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
// As `TileGroup`. kRowsAtOnce rows are enough to hide the latency of a product, and its operands are then less than
// half of what the nearest cache gives meanwhile.
template <bool is_int8>
class VectorGroup {
 public:
  static constexpr int64_t kRowsAtOnce = 8;

  void set_rows(int64_t rows) { rows_ = rows; }

  template <bool rows_stay, class Meanwhile>
  void multiply(const char* x, int64_t x_bytes, const TwoColumns& columns, int64_t steps, int32_t* products,
                Meanwhile meanwhile) const {
    for (int64_t r = 0; r < rows_; r += kRowsAtOnce) {
      run<kRowsAtOnce>(rows_ - r, x + r * x_bytes, x_bytes, columns, steps, products + r * kOutputs, meanwhile);
    }
  }

 private:
  // Of `count` rows, at most `rows`.
  template <int rows, class Meanwhile>
  static void run(int64_t count, const char* x, int64_t x_bytes, const TwoColumns& columns, int64_t steps,
                  int32_t* products, Meanwhile meanwhile) {
    if constexpr (rows > 1) {
      if (count < rows) return run<rows - 1>(count, x, x_bytes, columns, steps, products, meanwhile);
    }
    const char *left = columns.left, *right = columns.right;
    __m512i sums[rows][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < steps; ++k, x += kLineBytes, left += 2 * kTileBytes, right += 2 * kTileBytes) {
      meanwhile();
#pragma GCC unroll 1
      for (int64_t i = 0; i < kTileBytes; i += kLineBytes) {
        const __m512i one = _mm512_loadu_si512(left + i), other = _mm512_loadu_si512(right + i);
        const char* unit = x + i / kLineBytes * kUnitBytes;
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          const __m512i row = _mm512_set1_epi32(load_unit(unit + r * x_bytes));
          sums[r][0] = mac(sums[r][0], row, one);
          sums[r][1] = mac(sums[r][1], row, other);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      _mm512_storeu_si512(products + r * kOutputs, sums[r][0]);
      _mm512_storeu_si512(products + r * kOutputs + kTileOutputs, sums[r][1]);
    }
  }

  static int32_t load_unit(const char* from) {
    int32_t unit;
    std::memcpy(&unit, from, sizeof unit);
    return unit;
  }

  static __m512i mac(__m512i sum, __m512i row, __m512i outputs) {
    if constexpr (is_int8) return _mm512_dpbusd_epi32(sum, row, outputs);
    return reinterpret_cast<__m512i>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(row),
                                                      reinterpret_cast<__m512bh>(outputs)));
  }

  int64_t rows_ = 0;
};
#endif

}  // namespace v4flash
