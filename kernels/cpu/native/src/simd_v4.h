// Sixteen float lanes: x86-64-v4 with bf16 and VNNI.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace v4flash {

using BF16 = c10::BFloat16;
using F16 = c10::Half;
using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kPanel = 4;  // vectors of a row that the register tile of a matrix product holds

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << std::clamp(n, 0, kLanes)) - 1u); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set(float x) { return _mm512_set1_ps(x); }

inline Vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const BF16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// The first n lanes; the others are zero and their memory is not read.
inline Vec load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline Vec load_n(const BF16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }

inline __m256i narrow(Vec x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store(BF16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store_n(float* p, Vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
inline void store_n(BF16* p, Vec x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }    // b where one of them is NaN
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }    // b where one of them is NaN
inline Vec rough_inverse(Vec x) { return _mm512_rcp14_ps(x); }  // to eleven bits and more
inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }  // x 2^n
inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
inline Vec keep_first(Vec x, int n, Vec other) { return _mm512_mask_blend_ps(first_lanes(n), other, x); }
inline Vec where_less(Vec a, Vec b, Vec x, Vec other) {  // x in the lanes in which a < b
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), other, x);
}
inline bool any_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0; }

// The larger of a magnitude and that of b; NaN is larger than everything.
inline Vec max_magnitude(Vec a, Vec b) {
  const __m512i abs = _mm512_set1_epi32(0x7fffffff);
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_and_si512(_mm512_castps_si512(b), abs)));
}
inline float reduce_max_magnitude(Vec x) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_castps_si512(x)))));
}

// Sylvester's Hadamard of the lanes, not normalised.
inline Vec hadamard_lanes(Vec x) {
  Vec other = _mm512_permute_ps(x, 0xb1);
  x = _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xaaaa, other, x);
  other = _mm512_permute_ps(x, 0x4e);
  x = _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xcccc, other, x);
  other = _mm512_shuffle_f32x4(x, x, 0xb1);
  x = _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xf0f0, other, x);
  other = _mm512_shuffle_f32x4(x, x, 0x4e);
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xff00, other, x);
}

// Rounds half to even, clamps to +-127, stores with zero point 128.
inline void store_u8_n(uint8_t* p, Vec x, int n) {
  __m512i q = _mm512_cvtps_epi32(x);
  q = _mm512_min_epi32(_mm512_max_epi32(q, _mm512_set1_epi32(-127)), _mm512_set1_epi32(127));
  _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32(128))));
}
// The same of kPanel vectors of magnitudes of at most 127.
inline void store_u8(uint8_t* p, const Vec (&x)[kPanel]) {
  __m512i q[kPanel];
  for (int i = 0; i < kPanel; ++i) q[i] = _mm512_cvtps_epi32(x[i]);
  const __m512i quads = _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_xor_si512(_mm512_permutexvar_epi32(in_order, quads), _mm512_set1_epi8(-128)));
}

inline void transpose(Vec (&rows)[kLanes]) {
  Vec quads[kLanes];
  for (int i = 0; i < kLanes; i += 4) {  // 4 x 4 inside each 128-bit lane
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i + 2], rows[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i + 2], rows[i + 3]));
    quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    quads[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    quads[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    quads[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {  // then 4 x 4 of the 128-bit lanes
    const Vec a = _mm512_shuffle_f32x4(quads[i], quads[i + 4], 0x88);
    const Vec b = _mm512_shuffle_f32x4(quads[i], quads[i + 4], 0xdd);
    const Vec c = _mm512_shuffle_f32x4(quads[i + 8], quads[i + 12], 0x88);
    const Vec d = _mm512_shuffle_f32x4(quads[i + 8], quads[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    rows[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    rows[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// Lane i gets the sum of rows[i].
inline Vec row_sums(const Vec (&rows)[kLanes]) {
  Vec quads[4];  // in each 128-bit lane: partial sums of four rows
  for (int i = 0; i < 4; ++i) {
    const Vec* r = rows + 4 * i;
    const Vec a = _mm512_unpacklo_ps(r[0], r[1]) + _mm512_unpackhi_ps(r[0], r[1]);
    const Vec b = _mm512_unpacklo_ps(r[2], r[3]) + _mm512_unpackhi_ps(r[2], r[3]);
    quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b))) +
               _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  const Vec low = _mm512_shuffle_f32x4(quads[0], quads[1], 0x88) + _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd);
  const Vec high = _mm512_shuffle_f32x4(quads[2], quads[3], 0x88) + _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd);
  return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
}

// What full blocks of a KV cache are kept in. A float16 ends at its largest number instead of infinity.
constexpr float kLargestF16 = 65504.f;
inline Vec load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_n(const int8_t* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)));
}
inline Vec load(const F16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load_n(const F16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
inline void store_n(F16* p, Vec x, int n) {
  x = _mm512_min_ps(set(kLargestF16), _mm512_max_ps(set(-kLargestF16), x));  // the second where one is NaN
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Rounds half to even, clamps to +-127.
inline void store_n(int8_t* p, Vec x, int n) {
  x = _mm512_min_ps(set(127.f), _mm512_max_ps(set(-127.f), x));
  _mm_mask_storeu_epi8(p, first_lanes(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
inline void store_n(int16_t* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}
inline void store(F16* p, Vec x) { store_n(p, x, kLanes); }
inline void store(int8_t* p, Vec x) { store_n(p, x, kLanes); }
inline void store(int16_t* p, Vec x) { store_n(p, x, kLanes); }

}  // namespace v4flash
