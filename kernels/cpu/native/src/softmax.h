// The running softmax over tiles of keys.
#pragma once
#include <cmath>
#include <limits>

#include "simd.h"

namespace v4flash {

// Replaces the scores of one row over a tile (`width` of them, of which the first `visible` count) by exponentials
// relative to the new maximum, hidden ones by zero. Gives the factor by which everything earlier shrinks.
template <Precision precision>
inline float soften(float* scores, int width, int visible, float scale, float& running_max, float& running_sum) {
  const Vec hidden = set(-std::numeric_limits<float>::infinity()), factor = set(scale);
  Vec highest = set(running_max);
  for (int i = 0; i < width; i += kLanes) {
    Vec x = load(scores + i) * factor;
    if (visible < i + kLanes) x = keep_first(x, visible - i, hidden);
    highest = max(highest, x);
    store(scores + i, x);
  }
  const float new_max = reduce_max(highest);
  const Vec top = set(new_max);
  Vec total = zero();
  for (int i = 0; i < width; i += kLanes) {
    const Vec p = exp2<precision>(load(scores + i) - top);
    total = total + p;
    store(scores + i, p);
  }
  const float shrink = new_max > running_max ? std::exp2(running_max - new_max) : 1.f;
  running_sum = running_sum * shrink + reduce_add(total);
  running_max = new_max;
  return shrink;
}

inline void scale_row(float* row, int64_t width, float factor) {
  if (factor == 1.f) return;
  for (int64_t i = 0; i < width; i += kLanes) store(row + i, load(row + i) * set(factor));
}

}  // namespace v4flash
