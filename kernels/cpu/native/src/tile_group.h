// Products of rows with a weight packed into tiles of the tile unit (AMX). A *column* of tiles has kTileOutputs
// outputs; two columns are multiplied at a time with a group of rows. While that goes on, the products of the last two
// columns are finished and the weight of the next task comes nearer.
#pragma once
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>

#include "amx.h"
#include "checks.h"
#include "parallel.h"

namespace v4flash {

constexpr int64_t kTileBytes = 1024, kLineBytes = 64;
constexpr int64_t kUnitBytes = 4;  // neighbours in depth that one lane multiplies
constexpr int64_t kTileOutputs = 16;
constexpr int64_t kOutputs = 32;     // of two columns
constexpr int64_t kGroupRows = 32;   // rows that are multiplied at a time
constexpr int64_t kBlockRows = 512;  // rows that stay in the nearer cache while all columns pass by

inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Rows as they are, or with zeros behind them where they do not fill whole lines. Refuses those that do not fit the
// weight, and all where the tile unit is not in use.
inline Tensor tile_rows(const Tensor& x, const Tensor& packed, int64_t num_outputs, at::ScalarType rows,
                        at::ScalarType weights) {
  check_rows(x, 2, "x");
  check_rows(packed, 4, "packed");
  TORCH_CHECK(x.scalar_type() == rows && packed.scalar_type() == weights, "x and packed must be ", rows, " and ",
              weights, ", not ", x.scalar_type(), " and ", packed.scalar_type());
  const int64_t line = kLineBytes / x.element_size();
  TORCH_CHECK(packed.size(0) == pieces(num_outputs, kOutputs) && packed.size(1) == pieces(x.size(1), line) &&
                  packed.size(1) > 0 && packed.size(2) == 2 && packed.size(3) * packed.element_size() == kTileBytes,
              "packed is no weight of ", num_outputs, " outputs over ", x.size(1));
#if defined(__AMX_BF16__)
  TORCH_CHECK(amx_in_use(), "the tile unit is not in use");
#else
  TORCH_CHECK(false, "this variant has no tiles");
#endif
  const int64_t width = packed.size(1) * line;
  if (x.size(1) == width) return x;
  Tensor out = at::zeros({x.size(0), width}, x.options());
  out.narrow(1, 0, x.size(1)).copy_(x);
  return out;
}

// Two columns of tiles; the next tile of each lies two tiles further.
struct TwoColumns {
  const char *left, *right;
  int64_t output;  // which one the first of them is, as the caller counts
};

#if defined(__AMX_BF16__)
// Tiles are set up for groups of `rows` rows while an object lives, on its thread.
template <bool is_int8>
class TileGroup {
 public:
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

// finish(first row, number of rows, output, products [rows][kOutputs]) for all rows of x, in whole lines, and all
// columns. A task is two streams of `bytes` from first(task) and second(task) on, and `num_pairs` times two columns
// that pair(task, i) finds in them.
template <bool is_int8, class Weight, class Finish>
void multiply_tiles(const Tensor& x, const Weight& weight, Finish finish) {
  const int64_t num_rows = x.size(0), x_bytes = x.size(1) * x.element_size(), steps = x_bytes / kLineBytes;
  const char* const rows = static_cast<const char*>(x.const_data_ptr());
  const int64_t num_tasks = pieces(num_rows, kBlockRows) * weight.num_tasks, rows_a_step = pieces(kGroupRows, steps);
  for_workers(num_tasks, [&](auto each_task) {
    TileGroup<is_int8> group;
    alignas(64) int32_t buffers[2][kGroupRows * kOutputs];
    int32_t *products = buffers[0], *last_products = buffers[1];
    int64_t last_row = 0, last_end = 0, last_output = 0;  // what is left to finish of last_products
    const auto finish_some = [&](int64_t count) {
      count = std::min(count, last_end - last_row);
      finish(last_row, count, last_output, last_products + last_row % kGroupRows * kOutputs);
      last_row += count;
    };
    each_task([&](int64_t task, int64_t next_task) {
      const int64_t begin = task / weight.num_tasks * kBlockRows, end = std::min(begin + kBlockRows, num_rows);
      const int64_t bytes = next_task < num_tasks ? weight.bytes : 0, next = next_task % weight.num_tasks;
      const char *const first = weight.first(next), *const second = weight.second(next);
      const int64_t steps_of_task = pieces(end - begin, kGroupRows) * weight.num_pairs * steps;
      const int64_t at_once = pieces(pieces(weight.bytes, kLineBytes), steps_of_task) * kLineBytes;
      int64_t fetched = 0;
      const auto meanwhile = [&] {
        for (const int64_t stop = std::min(fetched + at_once, bytes); fetched < stop; fetched += kLineBytes) {
          _mm_prefetch(first + fetched, _MM_HINT_T1);
          _mm_prefetch(second + fetched, _MM_HINT_T1);
        }
        finish_some(rows_a_step);
      };
      for (int64_t t = begin; t < end; t += kGroupRows) {
        const int64_t count = std::min(kGroupRows, end - t);
        group.set_rows(count);
        for (int64_t i = 0; i < weight.num_pairs; ++i) {
          const TwoColumns columns = weight.pair(task % weight.num_tasks, i);
          group.template multiply<(Weight::num_pairs > 1)>(rows + t * x_bytes, x_bytes, columns, steps, products,
                                                           meanwhile);
          std::swap(products, last_products);
          last_row = t, last_end = t + count, last_output = columns.output;
        }
      }
    });
    finish_some(kGroupRows);
  });
}
#endif

}  // namespace v4flash
