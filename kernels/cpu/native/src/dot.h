// Inner products of rows as they lie in memory: many elements a step, one accumulator a product.
#pragma once
#include "simd.h"

namespace v4flash {

// Elements of a are widened to float32, b is float32.
template <class A>
struct WideDot {
  using Element = float;  // what b consists of
  static constexpr bool kIsInteger = false;
  static constexpr int kWidth = kLanes;
  Vec sum = zero();
  void mac(const A* a, const Element* b) { sum = fma(load(a), load(b), sum); }
  void mac_n(const A* a, const Element* b, int n) { sum = fma(load_n(a, n), load_n(b, n), sum); }
  Vec total() const { return sum; }
};

// The fastest for rows of A and others that are given as B, if b may be converted beforehand.
template <class A, class B>
struct Dot : WideDot<A> {};

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
// Products of pairs of bfloat16 are summed in float32 by one instruction.
template <>
struct Dot<BF16, BF16> {
  using Element = BF16;
  static constexpr bool kIsInteger = false;
  static constexpr int kWidth = 2 * kLanes;
  Vec sum = zero();
  static __m512bh pairs(const BF16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  static __m512bh pairs_n(const BF16* p, int n) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << n) - 1);
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, p));
  }
  void mac(const BF16* a, const BF16* b) { sum = _mm512_dpbf16_ps(sum, pairs(a), pairs(b)); }
  void mac_n(const BF16* a, const BF16* b, int n) { sum = _mm512_dpbf16_ps(sum, pairs_n(a, n), pairs_n(b, n)); }
  Vec total() const { return sum; }
};

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

// int8 codes times a query row of 16-bit integers, which keeps it twice as exact as bfloat16 does. Query rows are
// padded with zeros to whole steps, and a row of codes is followed by other codes (kCodesAtOnce), so that no step has
// to be masked.
template <>
struct Dot<int8_t, BF16> : IntegerSum {
  using Element = int16_t;
  static constexpr bool kIsInteger = true;
  static constexpr float kLevels = 32767.f;
  void mac_n(const int8_t* a, const Element* b, int) { mac(a, b); }
};

}  // namespace v4flash
