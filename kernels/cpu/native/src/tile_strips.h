// A product of packed blocks by the tile unit (AMX) that is taken a strip of rows at a time, so that other work lies
// between: the unit multiplies while vectors are at something else. Left alone for some 300 ns it goes to sleep, and
// then takes as long to wake; only products keep it awake.
#pragma once
#include "amx.h"

#if defined(__AMX_BF16__)
namespace v4flash {

class TileStrips {
 public:
  using Unit = AmxProduct::Unit;
  static constexpr int kRows = 16;     // of a strip
  static constexpr int kStep = 16;     // `depth` in units is a multiple of it
  static constexpr int kColumns = 32;  // of B and C, one row behind the other
  using SetUp = AmxProduct;            // while one lives tiles are set up

  TileStrips() = default;
  // C [num_rows rounded up to strips, kColumns] = A [.., depth] B [depth, kColumns], or is added to.
  TileStrips(const Unit* a, int64_t a_stride, int64_t num_rows, const Unit* b, int64_t depth, float* c, bool is_added)
      : a_(a), b_(b), c_(c), a_stride_(a_stride), depth_(depth), rows_left_(num_rows), is_added_(is_added) {}

  bool is_done() const { return rows_left_ <= 0; }

  // The next strip. Steps of two products must not mix.
  void step() {
    memory_is_read();
    if (is_added_) {
      _tile_loadd(0, c_, kBytes);
      _tile_loadd(1, c_ + 16, kBytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    const bool is_shallow = depth_ <= 2 * kStep;  // then B stays where it is
    const Unit* b = b_;
    for (int64_t k = 0; k < depth_; k += 2 * kStep, b += 2 * kStep * kColumns) {
      const bool has_second = k + kStep < depth_;
      if (!is_shallow || is_first_) {
        _tile_loadd(4, b, kBytes);
        _tile_loadd(5, b + 16, kBytes);
        if (has_second) {
          _tile_loadd(6, b + kStep * kColumns, kBytes);
          _tile_loadd(7, b + kStep * kColumns + 16, kBytes);
        }
      }
      _tile_loadd(2, a_ + k, a_stride_ * kUnitBytes);
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 2, 5);
      if (!has_second) break;
      _tile_loadd(3, a_ + k + kStep, a_stride_ * kUnitBytes);
      _tile_dpbf16ps(0, 3, 6);
      _tile_dpbf16ps(1, 3, 7);
    }
    _tile_stored(0, c_, kBytes);
    _tile_stored(1, c_ + 16, kBytes);
    memory_is_read();
    is_first_ = false;
    rows_left_ -= kRows;
    a_ += kRows * a_stride_;
    c_ += kRows * kColumns;
  }
  void finish() {
    while (!is_done()) step();
  }

  // A product that nobody reads.
  static void keep_awake() { _tile_dpbf16ps(2, 4, 5); }

 private:
  static constexpr int64_t kUnitBytes = sizeof(Unit), kBytes = kColumns * kUnitBytes;
  const Unit *a_ = nullptr, *b_ = nullptr;
  float* c_ = nullptr;
  int64_t a_stride_ = 0, depth_ = 0, rows_left_ = 0;
  bool is_added_ = false, is_first_ = true;
};

}  // namespace v4flash
#endif
