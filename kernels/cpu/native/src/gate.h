// The gate between the linears of a feed-forward part, and the Hadamard that spreads its outliers before rounding.
#pragma once
#include "checks.h"
#include "simd.h"

namespace v4flash {

constexpr int64_t kHadamard = 64;
constexpr float kHadamardNorm = 8.f;
constexpr float kLargestPower = 100.f;  // of two: what is added to it, and its inverse, are finite

inline void check_hadamard(int64_t block, int64_t width) {
  TORCH_CHECK(block == 0 || (block == kHadamard && width % kHadamard == 0), "hadamard must be 0, or ", kHadamard,
              " for rows that are a multiple of it, not ", block, " for rows of ", width);
}

// silu(gate) * up, as exact as Out keeps it
template <class Out>
inline Vec gated(Vec gate, Vec up) {
  const Vec x = gate * set(-1.44269504f);
  if constexpr (std::is_same_v<Out, BF16>) {
    const Vec n = round(x), power = scale_by_power(exp2_near_zero<Precision::kBF16>(x - n), n);
    return gate * up * rough_inverse(set(1.f) + power);
  } else {
    return gate * up * inverse<Precision::kF32>(set(1.f) + exp2<Precision::kF32>(min(set(kLargestPower), x)));
  }
}

// Sylvester's Hadamard on each kHadamard neighbours of a row, to `out`, not over its norm. Gives the largest
// magnitudes.
template <class T>
inline Vec rotate_row(const T* row, int64_t width, float* out) {
  constexpr int kVectors = kHadamard / kLanes;
  Vec largest = zero();
  for (const T* const end = row + width; row < end; row += kHadamard, out += kHadamard) {
    Vec x[kVectors];
    for (int i = 0; i < kVectors; ++i) x[i] = hadamard_lanes(load(row + i * kLanes));
    for (int stride = 1; stride < kVectors; stride *= 2) {
      for (int i = 0; i < kVectors; ++i) {
        if (i & stride) continue;
        const Vec a = x[i], b = x[i + stride];
        x[i] = a + b, x[i + stride] = a - b;
      }
    }
    for (int i = 0; i < kVectors; ++i) {
      store(out + i * kLanes, x[i]);
      largest = max_magnitude(largest, x[i]);
    }
  }
  return largest;
}

}  // namespace v4flash
