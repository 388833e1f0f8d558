// Probabilities of a tile of keys as bfloat16 pairs, for rows that lie in lanes. Beside the tile unit a CPU multiplies,
// shifts and compares on one port only: so powers of two come from 16-bit integers, two keys to a lane.
#pragma once
#include <limits>

#include "simd.h"

#if defined(__AVX512BF16__)
namespace v4flash {

class TileSoftmax {
 public:
  // A row's weights are relative to its *top*, a score of it. That follows the largest one only when the weight of this
  // would be 2^kSlack or more: so results of earlier tiles seldom have to shrink.
  static constexpr int kSlack = 8;
  static constexpr float kOne = 128;  // weights times this are relative to the top: as they are they stay small
  static constexpr int kKeys = 16;    // for so many keys meanwhile() is called once

  // Scores times `scale` are exponents of two.
  explicit TileSoftmax(float scale) : scale_(set(scale)), fixed_scale_(set(scale * kFixed)) {}

  // The new tops of rows of which some have scores [num_keys, stride] far above theirs.
  Vec raised(Vec top, const float* scores, int64_t stride, int64_t num_keys) const {
    Vec highest = set(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < num_keys; ++j) highest = max(highest, load(scores + j * stride));
    return where_less(set(kSlack), exponent(highest, top), highest, top);
  }
  // By how many powers of two a score is above another.
  Vec exponent(Vec score, Vec other) const { return (score - other) * scale_; }

  // Writes the weights of keys 2u and 2u + 1 in pairs to `to` [num_keys / 2, stride] and adds them to `sum`; num_keys
  // is a multiple of kKeys. A NaN makes its row's sum one. False if a score is so far above its row's top that it
  // must be weighed again after `raised`, whose result stands.
  template <class Meanwhile>
  bool weigh(const float* scores, uint32_t* to, int64_t stride, int64_t num_keys, Vec top, Vec& sum,
             Meanwhile meanwhile) const {
    const Vec bias = set(kMagic + (128 - kSlack) * kFixed);
    const auto fixed = [&](const float* from) { return fma(load(from) - top, fixed_scale_, bias); };
    Vec even_sum = sum, odd_sum = zero();
    __m512i seen = _mm512_setzero_si512();
    __mmask16 are_numbers = 0xffff;
    for (int64_t first = 0; first < num_keys; first += kKeys) {
      meanwhile();
#pragma GCC unroll 8
      for (int k = 0; k < kKeys; k += 2, scores += 2 * stride, to += stride) {
        const Vec even = fixed(scores), odd = fixed(scores + stride);
        are_numbers = _mm512_mask_cmp_ps_mask(are_numbers, even, odd, _CMP_ORD_Q);
        const __m512i exponents = fixed_pairs(even, odd);
        seen = _mm512_or_si512(seen, exponents);
        const __m512i p = powers(exponents);
        even_sum = even_sum + _mm512_castsi512_ps(_mm512_slli_epi32(p, 16));
        odd_sum = odd_sum + _mm512_castsi512_ps(_mm512_and_si512(p, _mm512_set1_epi32(~0xffff)));
        _mm512_storeu_si512(to, p);
      }
    }
    sum = _mm512_mask_blend_ps(are_numbers, set(std::numeric_limits<float>::quiet_NaN()), even_sum + odd_sum);
    return _mm512_movepi16_mask(seen) == 0;
  }

 private:
  static constexpr float kFixed = 256;      // steps of an exponent
  static constexpr float kMagic = 0x1p23f;  // a float from here to twice it has its whole part in its lowest bits
  static constexpr int kMagicBits = 0x4b000000;

  // Exponents in steps, from 0 (also for all below it) to 2^16 - 1 (for all above); bit 15 says that one is too high.
  static __m512i fixed_pairs(Vec even, Vec odd) {
    const __m512i by_key = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    return _mm512_shuffle_epi8(_mm512_packus_epi32(whole_part(even), whole_part(odd)), by_key);
  }
  static __m512i whole_part(Vec x) {
    constexpr int kAOrBAndC = 0xf8;
    const __m512i bits = _mm512_castps_si512(x), whole = _mm512_sub_epi32(bits, _mm512_set1_epi32(kMagicBits));
    // what is negative stays negative, however far
    return _mm512_ternarylogic_epi32(whole, bits, _mm512_set1_epi32(std::numeric_limits<int>::min()), kAOrBAndC);
  }

  // 2^(y / 256 - 127) as bfloat16: with the fraction f of the exponent, 2^f = 1 + f - f (1 - f) h(f), where h is near
  // 0.31 + 0.06 f. Deviates by 0.0019 (one sigma, 0.006 at most) from 1.0029 times the power, where rounding alone
  // deviates by 0.0017; a softmax loses the factor again.
  static __m512i powers(__m512i y) {
    const __m512i f = _mm512_and_si512(y, _mm512_set1_epi16(0xff));
    const __m512i curve = _mm512_mullo_epi16(f, _mm512_sub_epi16(_mm512_set1_epi16(0x100), f));
    const __m512i h = _mm512_add_epi16(_mm512_mulhrs_epi16(f, _mm512_set1_epi16(2000)), _mm512_set1_epi16(80));
    return _mm512_avg_epu16(_mm512_sub_epi16(y, _mm512_mulhi_epu16(curve, h)), _mm512_setzero_si512());
  }

  Vec scale_, fixed_scale_;
};

}  // namespace v4flash
#endif
