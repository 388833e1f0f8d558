// Products of a group of rows with two columns of a packed weight by the tile unit (AMX).
#pragma once
#include <algorithm>

#include "amx.h"
#include "tile_layout.h"

namespace v4flash {

#if defined(__AMX_BF16__)
// Tiles are set up for groups of `rows` rows while an object lives, on its thread.
template <bool is_int8>
class TileGroup {
 public:
  static constexpr int64_t kRowsAtOnce = kGroupRows;  // rows of a pass over the columns

  TileGroup() = default;
  TileGroup(const TileGroup&) = delete;
  TileGroup& operator=(const TileGroup&) = delete;
  ~TileGroup() { _tile_release(); }

  void set_rows(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const auto upper = static_cast<uint8_t>(std::min<int64_t>(rows, 16));
    const auto lower = static_cast<uint8_t>(std::max<int64_t>(rows - 16, 1));
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    const uint8_t all[] = {upper, upper, lower, lower, upper, lower, 16, 16};
    std::copy_n(all, 8, config.rows);
    memory_is_read();
    _tile_loadconfig(&config);
  }

  // products [rows][kOutputs] = rows of `steps` lines times two columns; meanwhile() is called before each step. What
  // the next call does not want again is loaded past the nearest cache: the columns if `rows_stay`, else the rows.
  template <bool rows_stay, class Meanwhile>
  void multiply(const char* x, int64_t x_bytes, const TwoColumns& columns, int64_t steps, int32_t* products,
                Meanwhile meanwhile) const {
    rows_ > 16 ? run<true, rows_stay>(x, x_bytes, columns, steps, products, meanwhile)
               : run<false, rows_stay>(x, x_bytes, columns, steps, products, meanwhile);
  }

 private:
  template <bool has_lower, bool rows_stay, class Meanwhile>
  static void run(const char* x, int64_t x_bytes, TwoColumns columns, int64_t steps, int32_t* products,
                  Meanwhile meanwhile) {
    auto [left, right, output] = columns;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; ++k, x += kLineBytes, left += 2 * kTileBytes, right += 2 * kTileBytes) {
      meanwhile();
      if constexpr (rows_stay) {
        _tile_loadd(4, x, x_bytes);
        _tile_stream_loadd(6, left, kLineBytes);
        _tile_stream_loadd(7, right, kLineBytes);
        if constexpr (has_lower) _tile_loadd(5, x + 16 * x_bytes, x_bytes);
      } else {
        _tile_stream_loadd(4, x, x_bytes);
        _tile_loadd(6, left, kLineBytes);
        _tile_loadd(7, right, kLineBytes);
        if constexpr (has_lower) _tile_stream_loadd(5, x + 16 * x_bytes, x_bytes);
      }
      if constexpr (is_int8) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if constexpr (has_lower) {
          _tile_dpbusd(2, 5, 6);
          _tile_dpbusd(3, 5, 7);
        }
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (has_lower) {
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    constexpr int64_t stride = kOutputs * kUnitBytes;
    _tile_stored(0, products, stride);
    _tile_stored(1, products + kTileOutputs, stride);
    if constexpr (has_lower) {
      _tile_stored(2, products + 16 * kOutputs, stride);
      _tile_stored(3, products + 16 * kOutputs + kTileOutputs, stride);
    }
  }

  int64_t rows_ = 0;
};
#endif

}  // namespace v4flash
