// Eight float lanes: x86-64-v3. A bfloat16 is widened to float32 as it is loaded.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace v4flash {

using BF16 = c10::BFloat16;
using F16 = c10::Half;
using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kPanel = 2;  // vectors of a row that the register tile of a matrix product holds

inline __m256i lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_numbers()); }
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set(float x) { return _mm256_set1_ps(x); }

inline Vec widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const BF16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// The first n lanes; the others are zero and their memory is not read.
inline Vec load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
inline Vec load_n(const BF16* p, int n) {
  if (n >= kLanes) return load(p);
  alignas(16) uint16_t part[kLanes] = {};
  if (n > 0) std::memcpy(part, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(part)));
}

// To bfloat16, half to even; NaN stays NaN.
inline __m128i narrow(Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store(BF16* p, Vec x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
inline void store_n(float* p, Vec x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
inline void store_n(BF16* p, Vec x, int n) {
  if (n >= kLanes) return store(p, x);
  alignas(16) uint16_t part[kLanes];
  _mm_store_si128(reinterpret_cast<__m128i*>(part), narrow(x));
  if (n > 0) std::memcpy(static_cast<void*>(p), part, static_cast<size_t>(n) * sizeof(uint16_t));
}

inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where one of them is NaN
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }  // b where one of them is NaN
inline Vec rough_inverse(Vec x) { return _mm256_rcp_ps(x); }  // to eleven bits and more
inline Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x 2^n for x near 1; zero below the normal numbers, infinity above them.
inline Vec scale_by_power(Vec x, Vec n) {
  const Vec tiny = _mm256_cmp_ps(n, set(-126.f), _CMP_LT_OQ), huge = _mm256_cmp_ps(n, set(127.f), _CMP_GT_OQ);
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const Vec scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
  return _mm256_blendv_ps(_mm256_andnot_ps(tiny, scaled), set(__builtin_inff()), huge);
}
inline float reduce_add(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(Vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec keep_first(Vec x, int n, Vec other) {
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(first_lanes(n)));
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec other) {  // x in the lanes in which a < b
  return _mm256_blendv_ps(other, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline bool any_less(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) != 0; }

// The larger of a magnitude and that of b; NaN is larger than everything.
inline Vec max_magnitude(Vec a, Vec b) {
  const __m256i abs = _mm256_set1_epi32(0x7fffffff);
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_and_si256(_mm256_castps_si256(b), abs)));
}
inline float reduce_max_magnitude(Vec x) {
  __m128i s = _mm_max_epi32(_mm_castps_si128(_mm256_castps256_ps128(x)), _mm_castps_si128(_mm256_extractf128_ps(x, 1)));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1))));
}

// Sylvester's Hadamard of the lanes, not normalised.
inline Vec hadamard_lanes(Vec x) {
  Vec other = _mm256_permute_ps(x, 0xb1);
  x = _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xaa);
  other = _mm256_permute_ps(x, 0x4e);
  x = _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xcc);
  other = _mm256_permute2f128_ps(x, x, 1);
  return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), 0xf0);
}

// Rounds half to even, clamps to +-127, stores with zero point 128.
inline void store_u8_n(uint8_t* p, Vec x, int n) {
  __m256i q = _mm256_cvtps_epi32(x);
  q = _mm256_min_epi32(_mm256_max_epi32(q, _mm256_set1_epi32(-127)), _mm256_set1_epi32(127));
  q = _mm256_add_epi32(q, _mm256_set1_epi32(128));
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  alignas(16) uint8_t bytes[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm_packus_epi16(words, words));
  std::memcpy(p, bytes, static_cast<size_t>(std::clamp(n, 0, kLanes)));
}
inline void store_u8(uint8_t* p, const Vec (&x)[kPanel]) {
  for (int i = 0; i < kPanel; ++i) store_u8_n(p + i * kLanes, x[i], kLanes);
}

inline void transpose(Vec (&rows)[kLanes]) {
  Vec quads[kLanes];
  for (int i = 0; i < kLanes; i += 4) {  // 4 x 4 inside each 128-bit lane
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(rows[i], rows[i + 1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(rows[i], rows[i + 1]));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(rows[i + 2], rows[i + 3]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(rows[i + 2], rows[i + 3]));
    quads[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    quads[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    quads[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    quads[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
  }
}

// Lane i gets the sum of rows[i].
inline Vec row_sums(const Vec (&rows)[kLanes]) {
  const Vec low = _mm256_hadd_ps(_mm256_hadd_ps(rows[0], rows[1]), _mm256_hadd_ps(rows[2], rows[3]));
  const Vec high = _mm256_hadd_ps(_mm256_hadd_ps(rows[4], rows[5]), _mm256_hadd_ps(rows[6], rows[7]));
  return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
}

// What full blocks of a KV cache are kept in. A float16 ends at its largest number instead of infinity.
constexpr float kLargestF16 = 65504.f;
inline Vec load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_n(const int8_t* p, int n) {
  int8_t part[kLanes] = {};
  if (n > 0) std::memcpy(part, p, static_cast<size_t>(std::min(n, kLanes)));
  return load(part);
}
inline Vec load(const F16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load_n(const F16* p, int n) {
  alignas(16) uint16_t part[kLanes] = {};
  if (n > 0) std::memcpy(part, p, static_cast<size_t>(std::min(n, kLanes)) * sizeof(uint16_t));
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(part)));
}
inline void store_n(F16* p, Vec x, int n) {
  alignas(16) uint16_t part[kLanes];
  x = _mm256_min_ps(set(kLargestF16), _mm256_max_ps(set(-kLargestF16), x));  // the second where one is NaN
  _mm_store_si128(reinterpret_cast<__m128i*>(part), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  if (n > 0) std::memcpy(static_cast<void*>(p), part, static_cast<size_t>(std::min(n, kLanes)) * sizeof(uint16_t));
}
// Lanes as 16-bit integers, saturated.
inline __m128i integers(Vec x) {
  const __m256i q = _mm256_cvtps_epi32(x);
  return _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
}
// Rounds half to even, clamps to +-127.
inline void store_n(int8_t* p, Vec x, int n) {
  alignas(16) int8_t part[16];
  x = _mm256_min_ps(set(127.f), _mm256_max_ps(set(-127.f), x));
  _mm_store_si128(reinterpret_cast<__m128i*>(part), _mm_packs_epi16(integers(x), integers(x)));
  if (n > 0) std::memcpy(p, part, static_cast<size_t>(std::min(n, kLanes)));
}
inline void store_n(int16_t* p, Vec x, int n) {
  alignas(16) int16_t part[kLanes];
  _mm_store_si128(reinterpret_cast<__m128i*>(part), integers(x));
  if (n > 0) std::memcpy(p, part, static_cast<size_t>(std::min(n, kLanes)) * sizeof(int16_t));
}
inline void store(F16* p, Vec x) { store_n(p, x, kLanes); }
inline void store(int8_t* p, Vec x) { store_n(p, x, kLanes); }
inline void store(int16_t* p, Vec x) { store_n(p, x, kLanes); }

}  // namespace v4flash
