// The largest output of each row, found while outputs are computed: a vocabulary of them is never written.
#pragma once
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <limits>

#include "checks.h"
#include "parallel.h"
#include "simd.h"

namespace v4flash {

class BestOutputs {
 public:
  // Each thread has `lanes` places for a row: its outputs come in lanes, or rows do and there is one.
  BestOutputs(int64_t num_rows, int64_t num_outputs, int64_t lanes)
      : num_rows_(num_rows),
        lanes_(lanes),
        size_((num_rows * lanes + kLanes - 1) / kLanes * kLanes),
        states_(at::full({int64_t{at::get_num_threads()}, kParts, size_}, kNone, at::kFloat)) {
    TORCH_CHECK(num_outputs > 0 && num_outputs <= 1 << 24, "there must be outputs, and their numbers whole in float32");
    states_.select(1, kSums).zero_();
  }

  // What the calling thread has seen.
  class OfThread {
   public:
    // `count` outputs of the row that has its places from `at` on; `lanes` are their numbers 0 .. kLanes as floats. A
    // thread sees smaller numbers first. Memory of whole vectors is read.
    void take_row(int64_t at, const float* outputs, int64_t count, int64_t first, Vec lanes) const {
      float *best = state_ + kBest * size_ + at, *number = state_ + kNumbers * size_ + at,
            *sums = state_ + kSums * size_ + at;
      Vec value = load(best), which = load(number), sum = load(sums);
      for_lanes(count, [&](int64_t i, int n) {
        const Vec output = load(outputs + i), counting = n == kLanes ? output : keep_first(output, n, set(kNone));
        sum = sum + (output - output);  // NaN from the first one on that is not finite
        which = where_less(value, counting, lanes + set(static_cast<float>(first + i)), which);
        value = where_less(value, counting, counting, value);
      });
      store(best, value);
      store(number, which);
      store(sums, sum);
    }

    // `count` outputs [count, stride] that follow one another, of the rows at the places.
    void take(int64_t at, const float* outputs, int64_t stride, int64_t count, int64_t first) const {
      float *best = state_ + kBest * size_ + at, *number = state_ + kNumbers * size_ + at,
            *sums = state_ + kSums * size_ + at;
      Vec value = load(best), which = load(number), sum = load(sums);
      for (int64_t i = 0; i < count; ++i, outputs += stride) {
        const Vec output = load(outputs);
        sum = sum + (output - output);
        which = where_less(value, output, set(static_cast<float>(first + i)), which);
        value = where_less(value, output, output, value);
      }
      store(best, value);
      store(number, which);
      store(sums, sum);
    }

   private:
    friend BestOutputs;
    OfThread(float* state, int64_t size) : state_(state), size_(size) {}
    float* state_;
    int64_t size_;
  };
  OfThread of_thread() const {
    return {states_.mutable_data_ptr<float>() + at::get_thread_num() * kParts * size_, size_};
  }

  // [T] int64: the number of the largest output, the first of equal ones; [T] bool: whether all of a row are finite.
  std::tuple<Tensor, Tensor> found() const {
    Tensor numbers = at::empty({num_rows_}, at::kLong), are_finite = at::empty({num_rows_}, at::kBool);
    auto* to = numbers.mutable_data_ptr<int64_t>();
    bool* to_finite = are_finite.mutable_data_ptr<bool>();
    const float* const states = states_.const_data_ptr<float>();
    for (int64_t t = 0; t < num_rows_; ++t) {
      float best = kNone, number = 0, sum = 0;
      for (int64_t thread = 0; thread < states_.size(0); ++thread) {
        const float* state = states + thread * kParts * size_ + t * lanes_;
        for (int64_t i = 0; i < lanes_; ++i, ++state) {
          sum += state[kSums * size_];
          if (state[0] < best || (state[0] == best && state[kNumbers * size_] >= number)) continue;
          best = state[0];
          number = state[kNumbers * size_];
        }
      }
      to[t] = best == kNone ? 0 : static_cast<int64_t>(number);
      to_finite[t] = sum == 0;
    }
    return {numbers, are_finite};
  }

 private:
  static constexpr int64_t kBest = 0, kNumbers = 1, kSums = 2, kParts = 3;
  static constexpr float kNone = -std::numeric_limits<float>::infinity();
  int64_t num_rows_, lanes_, size_;
  Tensor states_;
};

}  // namespace v4flash
