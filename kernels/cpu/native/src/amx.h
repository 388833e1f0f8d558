// Products of packed bfloat16 blocks by the tile unit (AMX) of a CPU that has one; layouts are those of tile.h.
#pragma once
#include <atomic>
#include <cstdint>

#include "tile.h"

namespace v4flash {

// Whether the process may use tiles and wants to; see `use_amx`.
inline std::atomic<bool>& amx_in_use() {
  static std::atomic<bool> in_use{false};
  return in_use;
}

#if defined(__AMX_BF16__)
// The compiler does not know that tile instructions read memory: what was stored before this stays before it.
inline void memory_is_read() { asm volatile("" ::: "memory"); }

// C [32, columns] += A [32, depth] B [depth, columns]. Tiles are set up while an object lives, on its thread.
class AmxProduct {
 public:
  using Unit = uint32_t;
  static constexpr int kRows = 32;
  static constexpr int kStep = 16;     // `depth` in units is a multiple of it
  static constexpr int kColumns = 32;  // `columns` is a multiple of it

  AmxProduct() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    memory_is_read();
    _tile_loadconfig(&config);
  }
  AmxProduct(const AmxProduct&) = delete;
  AmxProduct& operator=(const AmxProduct&) = delete;
  ~AmxProduct() { _tile_release(); }

  template <bool accumulate>
  static void multiply(const Unit* a, int64_t a_stride, const Unit* b, int64_t b_stride, float* c, int64_t c_stride,
                       int64_t depth, int64_t columns) {
    const int64_t a_bytes = a_stride * 4, b_bytes = b_stride * 4, c_bytes = c_stride * 4;
    memory_is_read();
    for (int64_t j = 0; j < columns; j += kColumns) {  // four tiles of C, two of A, two of B
      float *upper = c + j, *lower = upper + 16 * c_stride;
      if constexpr (accumulate) {
        _tile_loadd(0, upper, c_bytes);
        _tile_loadd(1, upper + 16, c_bytes);
        _tile_loadd(2, lower, c_bytes);
        _tile_loadd(3, lower + 16, c_bytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t k = 0; k < depth; k += kStep) {
        _tile_loadd(4, a + k, a_bytes);
        _tile_loadd(6, b + k * b_stride + j, b_bytes);
        _tile_loadd(7, b + k * b_stride + j + 16, b_bytes);
        _tile_loadd(5, a + 16 * a_stride + k, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, upper, c_bytes);
      _tile_stored(1, upper + 16, c_bytes);
      _tile_stored(2, lower, c_bytes);
      _tile_stored(3, lower + 16, c_bytes);
    }
  }
};
#endif

}  // namespace v4flash
