// Inner products with rows in the forms in which full blocks of a KV cache are kept.
#pragma once
#include "simd.h"

namespace v4flash {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
// Products of 16-bit integers, summed in pairs by one instruction.
struct IntegerSum {
  static constexpr int kWidth = 32;
  __m512i sum = _mm512_setzero_si512();
  void mac(const int8_t* a, const int16_t* b) {
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
    sum = _mm512_dpwssd_epi32(sum, codes, _mm512_loadu_si512(b));
  }
  Vec total() const { return _mm512_cvtepi32_ps(sum); }
};
#else
struct IntegerSum {
  static constexpr int kWidth = 16;
  __m256i sum = _mm256_setzero_si256();
  void mac(const int8_t* a, const int16_t* b) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    const __m256i rows = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, rows));
  }
  Vec total() const { return _mm256_cvtepi32_ps(sum); }
};
#endif

// Rows of S times a query row of floats.
template <class S>
struct FloatScore {
  using Element = float;
  static constexpr bool kIsInteger = false;
  static constexpr int kWidth = kLanes;
  Vec sum = zero();
  void mac(const S* a, const Element* b) { sum = fma(load(a), load(b), sum); }
  void mac_n(const S* a, const Element* b, int n) { sum = fma(load_n(a, n), load_n(b, n), sum); }
  Vec total() const { return sum; }
};

// int8 codes times a query row of 16-bit integers, which keeps it twice as exact as bfloat16 does. Query rows are padded
// with zeros to whole steps, and a row of codes is followed by other codes, so that no step has to be masked.
struct IntegerScore : IntegerSum {
  using Element = int16_t;
  static constexpr bool kIsInteger = true;
  static constexpr float kLevels = 32767.f;
  void mac_n(const int8_t* a, const Element* b, int) { mac(a, b); }
};

// How a query of dtype T meets rows of S.
template <class T, class S>
struct Score : FloatScore<S> {};
template <>
struct Score<BF16, int8_t> : IntegerScore {};

}  // namespace v4flash
