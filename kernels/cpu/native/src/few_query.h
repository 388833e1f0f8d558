// Query rows of T as inner products with rows of X want them, channel group by channel group.
#pragma once
#include "dot.h"
#include "parallel.h"

namespace v4flash {

template <class X, class T>
class FewQuery {
 public:
  using Element = typename Dot<X, T>::Element;

  FewQuery() = default;
  FewQuery(Scratch& scratch, int64_t num_rows, int64_t dim, int64_t group_size)
      : dim_(dim), group_size_(std::min(group_size, dim)), num_groups_((dim + group_size - 1) / group_size) {
    constexpr int64_t step = Dot<X, T>::kIsInteger ? Dot<X, T>::kWidth : 1;
    group_width_ = (group_size_ + step - 1) / step * step;
    rows_ = scratch.take<Element>(num_rows * stride());
    scales_ = scratch.take<float>(num_rows * num_groups_);
    std::fill_n(rows_, num_rows * stride(), Element(0));  // past a group it stays so
  }

  int64_t num_groups() const { return num_groups_; }
  int64_t group_dim(int64_t g) const { return std::min(group_size_, dim_ - g * group_size_); }
  int64_t stride() const { return num_groups_ * group_width_; }  // between rows
  const Element* row(int64_t r, int64_t g) const { return rows_ + r * stride() + g * group_width_; }
  float scale(int64_t r, int64_t g) const { return scales_[r * num_groups_ + g]; }

  void set_row(int64_t r, const T* from) {
    for (int64_t g = 0; g < num_groups_; ++g, from += group_size_) {
      Element* to = rows_ + r * stride() + g * group_width_;
      float scale = 1.f;
      if constexpr (Dot<X, T>::kIsInteger) {
        Vec largest = zero();
        for_lanes(group_dim(g),
                  [&](int64_t d, int lanes) { largest = max_magnitude(largest, load_lanes(from + d, lanes)); });
        const float amax = reduce_max_magnitude(largest);
        if (amax != 0) scale = amax / Dot<X, T>::kLevels;  // NaN stays: it must reach the row's result
      }
      scales_[r * num_groups_ + g] = scale;
      const Vec inverse = set(1.f / scale);
      for_lanes(group_dim(g), [&](int64_t d, int lanes) {
        const Vec x = load_lanes(from + d, lanes);
        store_lanes(to + d, Dot<X, T>::kIsInteger ? x * inverse : x, lanes);
      });
    }
  }

 private:
  int64_t dim_ = 0, group_size_ = 0, num_groups_ = 0, group_width_ = 0;
  Element* rows_ = nullptr;
  float* scales_ = nullptr;
};

}  // namespace v4flash
