// Products of a group of rows with two columns of a packed weight in vector registers, as `TileGroup` has them.
#pragma once
#include "tile_layout.h"
#include "vector_product.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
namespace v4flash {

template <bool is_int8>
class VectorGroup {
 public:
  static constexpr int64_t kRowsAtOnce = 8;

  void set_rows(int64_t rows) { rows_ = rows; }

  template <bool rows_stay, class Meanwhile>
  void multiply(const char* x, int64_t x_bytes, const TwoColumns& columns, int64_t steps, int32_t* products,
                Meanwhile meanwhile) const {
    for (int64_t r = 0; r < rows_; r += kRowsAtOnce) {
      run<kRowsAtOnce>(rows_ - r, x + r * x_bytes, x_bytes, columns, steps, products + r * kOutputs, meanwhile);
    }
  }

 private:
  // Of `count` rows, at most `rows`.
  template <int rows, class Meanwhile>
  static void run(int64_t count, const char* x, int64_t x_bytes, TwoColumns columns, int64_t steps, int32_t* products,
                  Meanwhile meanwhile) {
    if constexpr (rows > 1) {
      if (count < rows) return run<rows - 1>(count, x, x_bytes, columns, steps, products, meanwhile);
    }
    VectorProduct<is_int8, rows> product;
    product.clear();
    for (int64_t k = 0; k < steps; ++k, x += kLineBytes) {
      meanwhile();
      product.add(x, x_bytes, columns.left + 2 * k * kTileBytes, columns.right + 2 * k * kTileBytes, kLineBytes);
    }
    product.store(products);
  }

  int64_t rows_ = 0;
};

}  // namespace v4flash
#endif
