// Exact int32 products of u8 rows (zero point 128) with s8 weights.
#pragma once
#include "simd.h"

namespace v4flash {

#if defined(__AVX512VNNI__)
// Four neighbours are multiplied and summed by one instruction, without saturation. The zero point is taken off at the
// end: sum((x - 128) w) = sum(x w) - 128 sum(w).
struct Int8Dot {
  static constexpr int kWidth = 64;
  __m512i sum = _mm512_setzero_si512(), weights = _mm512_setzero_si512();
  void add(const uint8_t* x, const int8_t* w) { add(_mm512_loadu_si512(x), _mm512_loadu_si512(w)); }
  void add_n(const uint8_t* x, const int8_t* w, int n) {
    const __mmask64 mask = (uint64_t{1} << n) - 1;
    add(_mm512_maskz_loadu_epi8(mask, x), _mm512_maskz_loadu_epi8(mask, w));
  }
  int32_t total() const { return _mm512_reduce_add_epi32(sum) - 128 * _mm512_reduce_add_epi32(weights); }

 private:
  void add(__m512i x, __m512i w) {
    sum = _mm512_dpbusd_epi32(sum, x, w);
    weights = _mm512_dpbusd_epi32(weights, _mm512_set1_epi8(1), w);
  }
};
#else
// Without VNNI the 8-bit product instruction saturates: widen to 16 bits, where pairs of products always fit.
struct Int8Dot {
  static constexpr int kWidth = 16;
  __m256i sum = _mm256_setzero_si256();
  void add(const uint8_t* x, const int8_t* w) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    const __m256i weight = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_sub_epi16(wide, _mm256_set1_epi16(128)), weight));
  }
  void add_n(const uint8_t* x, const int8_t* w, int n) {
    uint8_t row[kWidth] = {};
    int8_t weight[kWidth] = {};  // zero weights hide the rest
    std::copy_n(x, n, row);
    std::copy_n(w, n, weight);
    add(row, weight);
  }
  int32_t total() const {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
};
#endif

}  // namespace v4flash
