// All products of rows with a packed weight, two columns at a time with a group of rows. While that goes on, the
// products of the last two columns are finished and the weight of the next task comes nearer.
#pragma once
#include <algorithm>

#include "parallel.h"
#include "tile_group.h"
#include "vector_group.h"

namespace v4flash {

#if defined(__AVX512BF16__)
constexpr int64_t kBlockRows = 512;  // rows that stay in the nearer cache while all columns pass by

// finish(first row, number of rows, output, products [rows][kOutputs]) for all rows of x, in whole lines, and all
// columns. A task is two streams of `bytes` from first(task) and second(task) on, and `num_pairs` times two columns
// that pair(task, i) finds in them.
template <class Group, class Weight, class Finish>
void multiply_groups(const Tensor& x, const Weight& weight, Finish finish) {
  const int64_t num_rows = x.size(0), x_bytes = x.size(1) * x.element_size(), steps = x_bytes / kLineBytes;
  const char* const rows = static_cast<const char*>(x.const_data_ptr());
  const int64_t num_tasks = pieces(num_rows, kBlockRows) * weight.num_tasks, rows_a_step = pieces(kGroupRows, steps);
  for_workers(num_tasks, [&](auto each_task) {
    Group group;
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
      const int64_t steps_of_task = pieces(end - begin, Group::kRowsAtOnce) * weight.num_pairs * steps;
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

template <bool is_int8, class Weight, class Finish>
void multiply_tiles(const Tensor& x, const Weight& weight, Finish finish) {
  if (amx_in_use()) return multiply_groups<TileGroup<is_int8>>(x, weight, finish);
  multiply_groups<VectorGroup<is_int8>>(x, weight, finish);
}
#endif

}  // namespace v4flash
