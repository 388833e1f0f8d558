// The gate between the linears of a feed-forward part, and the Hadamard that spreads its outliers before rounding.
#pragma once
#include "checks.h"
#include "simd.h"

namespace v4flash {

constexpr int64_t kHadamard = 64;
constexpr float kLargestPower = 100.f;  // of two: what is added to it, and its inverse, are finite

inline void check_hadamard(int64_t block, int64_t width) {
  TORCH_CHECK(block == 0 || (block == kHadamard && width % kHadamard == 0), "hadamard must be 0, or ", kHadamard,
              " for rows that are a multiple of it, not ", block, " for rows of ", width);
}

// silu(gate) * up, as exact as Out keeps it
template <class Out>
inline Vec gated(Vec gate, Vec up) {
  constexpr Precision precision = std::is_same_v<Out, BF16> ? Precision::kBF16 : Precision::kF32;
  return gate * up * inverse<precision>(set(1.f) + exp2<precision>(min(set(kLargestPower), gate * set(-1.44269504f))));
}

// Sylvester's Hadamard over its norm, on each kHadamard neighbours of a row, in place. Gives the largest magnitudes.
inline Vec rotate_row(float* row, int64_t width) {
  constexpr int kVectors = kHadamard / kLanes;
  Vec largest = zero();
  for (float* const end = row + width; row < end; row += kHadamard) {
    Vec x[kVectors];
    for (int i = 0; i < kVectors; ++i) x[i] = hadamard_lanes(load(row + i * kLanes) * set(0.125f));
    for (int stride = 1; stride < kVectors; stride *= 2) {
      for (int i = 0; i < kVectors; ++i) {
        if (i & stride) continue;
        const Vec a = x[i], b = x[i + stride];
        x[i] = a + b, x[i + stride] = a - b;
      }
    }
    for (int i = 0; i < kVectors; ++i) {
      store(row + i * kLanes, x[i]);
      largest = max_magnitude(largest, x[i]);
    }
  }
  return largest;
}

}  // namespace v4flash
