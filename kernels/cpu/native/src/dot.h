// Inner products of rows as they lie in memory: many elements a step, one accumulator a product.
#pragma once
#include "simd.h"

namespace v4flash {

// Elements of a are widened to float32, b is float32.
template <class T>
struct WideDot {
  using Element = float;  // what b consists of
  static constexpr int kWidth = kLanes;
  static Vec mac(Vec sum, const T* a, const Element* b) { return fma(load(a), load(b), sum); }
  static Vec mac_n(Vec sum, const T* a, const Element* b, int n) { return fma(load_n(a, n), load_n(b, n), sum); }
};

// The fastest for rows that are both of type T, if b may be converted beforehand.
template <class T>
struct Dot : WideDot<T> {};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16 are summed in float32 by one instruction.
template <>
struct Dot<BF16> {
  using Element = BF16;
  static constexpr int kWidth = 2 * kLanes;
  static __m512bh pairs(const BF16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  static __m512bh pairs_n(const BF16* p, int n) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << n) - 1);
    return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, p));
  }
  static Vec mac(Vec sum, const BF16* a, const BF16* b) { return _mm512_dpbf16_ps(sum, pairs(a), pairs(b)); }
  static Vec mac_n(Vec sum, const BF16* a, const BF16* b, int n) {
    return _mm512_dpbf16_ps(sum, pairs_n(a, n), pairs_n(b, n));
  }
};
#endif

}  // namespace v4flash
