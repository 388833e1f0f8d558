// Symmetric quantisation of one row: u8 with zero point 128 and scale = largest magnitude / 127.
#pragma once
#include <cfloat>

#include "simd.h"

namespace v4flash {

// The scale of a row whose largest magnitude is known. NaN and infinity in a row make its scale so, never a number.
inline float row_scale(Vec largest) {
  const float scale = reduce_max_magnitude(largest) / 127.f;
  return scale < FLT_MIN ? FLT_MIN : scale;
}

template <class T>
inline Vec row_magnitude(const T* row, int64_t n) {
  Vec largest = zero();
  for_lanes(n, [&](int64_t i, int lanes) { largest = max_magnitude(largest, load_lanes(row + i, lanes)); });
  return largest;
}

template <class T>
inline void quantise_row(const T* row, int64_t n, float scale, uint8_t* out) {
  const Vec inverse = set(1.f / scale);
  int64_t i = 0;
  for (; i + kPanel * kLanes <= n; i += kPanel * kLanes) {
    Vec x[kPanel];
    for (int j = 0; j < kPanel; ++j) x[j] = load(row + i + j * kLanes) * inverse;
    store_u8(out + i, x);
  }
  for_lanes(n - i,
            [&](int64_t j, int lanes) { store_u8_n(out + i + j, load_lanes(row + i + j, lanes) * inverse, lanes); });
}

}  // namespace v4flash
