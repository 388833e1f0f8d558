// A product of packed bfloat16 blocks in vector registers, a strip of rows at a time, as `TileStrips` has it.
#pragma once
#include "vector_product.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
namespace v4flash {

class VectorStrips {
 public:
  using Unit = uint32_t;
  static constexpr int kRows = 16, kStep = 16, kColumns = 32;
  struct SetUp {};

  VectorStrips() = default;
  VectorStrips(const Unit* a, int64_t a_stride, int64_t num_rows, const Unit* b, int64_t depth, float* c, bool is_added)
      : a_(a), b_(b), c_(c), a_stride_(a_stride), depth_(depth), rows_left_(num_rows), is_added_(is_added) {}

  bool is_done() const { return rows_left_ <= 0; }
  void step() {
    for (int r = 0; r < kRows; r += kRowsAtOnce, a_ += kRowsAtOnce * a_stride_, c_ += kRowsAtOnce * kColumns) {
      VectorProduct<false, kRowsAtOnce> product;
      is_added_ ? product.load(c_) : product.clear();
      for (int64_t k = 0; k < depth_; k += kStep) {
        const char* columns = reinterpret_cast<const char*>(b_ + k * kColumns);
        product.add(reinterpret_cast<const char*>(a_ + k), a_stride_ * kUnitBytes, columns, columns + kBytes / 2,
                    kBytes);
      }
      product.store(c_);
    }
    rows_left_ -= kRows;
  }
  void finish() {
    while (!is_done()) step();
  }
  static void keep_awake() {}

 private:
  static constexpr int kRowsAtOnce = 8;
  static constexpr int64_t kUnitBytes = sizeof(Unit), kBytes = kColumns * kUnitBytes;
  const Unit *a_ = nullptr, *b_ = nullptr;
  float* c_ = nullptr;
  int64_t a_stride_ = 0, depth_ = 0, rows_left_ = 0;
  bool is_added_ = false;
};

}  // namespace v4flash
#endif
