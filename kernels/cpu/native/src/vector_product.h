// Products in vector registers over the layouts of the tile unit, for a CPU without it: rows are broadcast unit by
// unit, a vector has that unit of sixteen columns.
#pragma once
#include <cstring>

#include "simd.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
namespace v4flash {

// Sums of `rows` rows and twice sixteen columns: eight rows are enough to hide the latency of a product, and its
// operands are then less than half of what the nearest cache gives meanwhile.
template <bool is_int8, int rows>
struct VectorProduct {
  static constexpr int kUnits = 16, kUnitBytes = 4, kVectorBytes = 64;
  __m512i sums[rows][2];

  void clear() {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
  }

  // Adds kUnits units of the rows at x times the vectors left and right, those of two units `line_bytes` apart.
  void add(const char* x, int64_t x_bytes, const char* left, const char* right, int64_t line_bytes) {
#pragma GCC unroll 1
    for (int unit = 0; unit < kUnits; ++unit, x += kUnitBytes, left += line_bytes, right += line_bytes) {
      const __m512i one = _mm512_loadu_si512(left), other = _mm512_loadu_si512(right);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        int32_t of_row;
        std::memcpy(&of_row, x + r * x_bytes, sizeof of_row);
        const __m512i row = _mm512_set1_epi32(of_row);
        sums[r][0] = mac(sums[r][0], row, one);
        sums[r][1] = mac(sums[r][1], row, other);
      }
    }
  }

  // From and to rows of 32 four-byte numbers.
  void load(const void* from) {
    const char* row = static_cast<const char*>(from);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r, row += 2 * kVectorBytes) {
      sums[r][0] = _mm512_loadu_si512(row);
      sums[r][1] = _mm512_loadu_si512(row + kVectorBytes);
    }
  }
  void store(void* to) const {
    char* row = static_cast<char*>(to);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r, row += 2 * kVectorBytes) {
      _mm512_storeu_si512(row, sums[r][0]);
      _mm512_storeu_si512(row + kVectorBytes, sums[r][1]);
    }
  }

 private:
  static __m512i mac(__m512i sum, __m512i row, __m512i columns) {
    if constexpr (is_int8) return _mm512_dpbusd_epi32(sum, row, columns);
    return reinterpret_cast<__m512i>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(row),
                                                      reinterpret_cast<__m512bh>(columns)));
  }
};

}  // namespace v4flash
#endif
