// The vector type of the variant being built, and what both variants share.
// Loops over a row take whole vectors and one partial one, so that sizes need not be multiples of anything.
#pragma once
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include "simd_v4.h"
#else
#include "simd_v3.h"
#endif

namespace v4flash {

// Calls f(offset, lanes) for consecutive pieces of n elements.
template <class F>
inline void for_lanes(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, static_cast<int>(n - i));
}

// As load_n and store_n, for code that mostly meets whole vectors.
template <class T>
inline Vec load_lanes(const T* p, int n) {
  return n == kLanes ? load(p) : load_n(p, n);
}
template <class T>
inline void store_lanes(T* p, Vec x, int n) {
  n == kLanes ? store(p, x) : store_n(p, x, n);
}

enum class Precision { kBF16, kF32 };

// 2^r by a polynomial on [-1/2, 1/2]: relative error 8e-5 where the result is rounded to bfloat16, else 2e-7.
template <Precision precision>
inline Vec exp2_near_zero(Vec r) {
  if constexpr (precision == Precision::kBF16) {
    const Vec p = fma(set(0.05517167f), r, set(0.24261113f));
    return fma(fma(p, r, set(0.69326099f)), r, set(0.99992807f));
  } else {
    Vec p = fma(set(1.53458120e-4f), r, set(1.33999314e-3f));
    p = fma(p, r, set(9.61848896e-3f));
    p = fma(p, r, set(5.55032878e-2f));
    p = fma(p, r, set(2.40226469e-1f));
    p = fma(p, r, set(6.93147206e-1f));
    return fma(p, r, set(1.f));
  }
}

// 2^x as exact as that. Minus infinity gives 0, NaN gives NaN.
template <Precision precision>
inline Vec exp2(Vec x) {
  x = max(set(-200.f), x);
  const Vec n = round(x);
  return scale_by_power(exp2_near_zero<precision>(x - n), n);
}

// 1 / x of a finite x: relative error 4e-4 where the result is rounded to bfloat16, else 3e-7.
template <Precision precision>
inline Vec inverse(Vec x) {
  const Vec r = rough_inverse(x);
  return precision == Precision::kBF16 ? r : r * (set(2.f) - x * r);
}

}  // namespace v4flash
