// Runs the tasks of a step's attention on all threads, and merges what each found for a row.
#pragma once
#include <ATen/ops/empty.h>

#include <cmath>
#include <optional>

#include "attention_plan.h"
#include "checks.h"

namespace v4flash {

// Weighted values over the sum of weights, rounded once.
template <class T>
inline void write_row(const float* values, float sum, int64_t dim, T* to) {
  const Vec inverse = set(1.f / sum);
  for_lanes(dim, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(values + i, lanes) * inverse, lanes); });
}

// Parts lie one behind the other as maximum, sum, values. The first gathers the others.
template <class T>
inline void merge_row(float* parts, int64_t num_parts, int64_t dim, T* to) {
  const int64_t stride = dim + 2;
  float highest = kLowest;
  for (int64_t p = 0; p < num_parts; ++p) highest = std::max(highest, parts[p * stride]);
  float sum = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    const float* part = parts + p * stride;
    const float weight = std::exp2(part[0] - highest);
    sum += weight * part[1];
    for_lanes(dim, [&](int64_t i, int lanes) {
      const Vec x = load_lanes(part + 2 + i, lanes) * set(weight);
      store_lanes(parts + 2 + i, p == 0 ? x : x + load_lanes(parts + 2 + i, lanes), lanes);
    });
  }
  write_row(parts + 2, sum, dim, to);
}

// Many is made from the layer, Few from it and the most rows of a task.
template <class Many, class Few, class L>
inline void attend(const L& layer, const Tensor& groups) {
  const AttentionTasks tasks = plan_attention(layer, groups.const_data_ptr<int32_t>(), groups.size(0),
                                              at::get_num_threads(), Many::kMaxSlabRows);
  const Tensor memory = at::empty({tasks.partial_size}, groups.options().dtype(at::kFloat));
  float* partials = memory.mutable_data_ptr<float>();
  const int64_t dim = layer.head_dim, num_many = static_cast<int64_t>(tasks.many.size());
  const int64_t num_tasks = num_many + static_cast<int64_t>(tasks.few.size());
  const auto finish = [&](int64_t token, int64_t head, int64_t part, const Partial& partial) {
    const int64_t num_parts = tasks.num_parts[token];
    if (num_parts == 1) {
      write_row(partial.values, partial.sum, dim, layer.out + (token * layer.num_heads + head) * dim);
      return;
    }
    float* to = partials + tasks.partial_start[token] + (head * num_parts + part) * (dim + 2);
    to[0] = partial.max;
    to[1] = partial.sum;
    std::copy_n(partial.values, dim, to + 2);
  };
  for_workers(num_tasks, [&](auto each_task) {
    std::optional<Many> many;
    std::optional<Few> few;
    each_task([&](int64_t i, int64_t next) {
      if (i < num_many) {
        const auto& task = tasks.many[i];
        if (!many) many.emplace(layer);
        many->run(task, [&](int64_t r, const Partial& partial) {
          finish(task.first_token + r / layer.group, task.kv_head * layer.group + r % layer.group, task.part, partial);
        });
      } else {
        const auto& task = tasks.few[i - num_many];
        if (!few) few.emplace(layer, tasks.max_few_rows);
        const int64_t first_token = layer.query_starts[task.seq];
        few->run(task, next < num_tasks ? &tasks.few[next - num_many] : nullptr,
                 [&](int64_t kv_head, int64_t r, const Partial& partial) {
                   finish(first_token + r / layer.group, kv_head * layer.group + r % layer.group, task.part, partial);
                 });
      }
    });
  });
  if (tasks.partial_size == 0) return;
  for_rows(layer.query_starts[layer.num_seqs], layer.num_heads * dim, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t num_parts = tasks.num_parts[t];
      for (int64_t h = 0; num_parts > 1 && h < layer.num_heads; ++h) {
        merge_row(partials + tasks.partial_start[t] + h * num_parts * (dim + 2), num_parts, dim,
                  layer.out + (t * layer.num_heads + h) * dim);
      }
    }
  });
}

}  // namespace v4flash
