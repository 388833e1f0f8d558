// Divides the attention of a step into tasks. How the keys of a row are cut into parts depends on the lengths of its
// own sequence and on the prefix it shares, never on how many threads or batch mates there are.
#pragma once
#include <algorithm>
#include <vector>

#include "attention_few.h"
#include "key_tiles.h"

namespace v4flash {

constexpr int64_t kMaxFewRows = 16;     // query rows of a sequence and key head that are read without packing
constexpr int64_t kSeqsPerThread = 4;   // from so many on, a task is all heads of a sequence
constexpr int64_t kChunkKeys = 256;     // of a part, where there are few rows
constexpr int64_t kSlabsPerThread = 4;  // with fewer large slabs they are small ones
constexpr int64_t kSmallSlabRows = 384;

struct AttentionTasks {
  struct Many : ManyTask {
    int64_t part;  // of its rows' keys
  };
  struct Few : FewTask {
    int64_t part;
  };
  std::vector<Many> many;  // the most work first
  std::vector<Few> few;
  std::vector<int64_t> num_parts;      // by token
  std::vector<int64_t> partial_start;  // by token, where its partial results lie in floats; unused for a single part
  int64_t partial_size = 0;
  int64_t max_few_rows = 0;
};

inline AttentionTasks plan_attention(const Batch& batch, const int32_t* groups, int64_t num_groups, int64_t num_threads,
                                     int64_t max_slab_rows) {
  AttentionTasks tasks;
  std::vector<int64_t> shared_keys(static_cast<size_t>(batch.num_seqs), 0);
  const auto tokens_of = [&](int64_t slab_rows) { return std::max<int64_t>(1, slab_rows / batch.group); };
  int64_t slab_tokens = tokens_of(max_slab_rows), num_slabs = 0;
  for (int64_t s = 0; s < batch.num_seqs; ++s) {
    num_slabs += (batch.query_len(s) + slab_tokens - 1) / slab_tokens * batch.num_kv_heads;
  }
  if (num_slabs < kSlabsPerThread * num_threads) slab_tokens = std::min(slab_tokens, tokens_of(kSmallSlabRows));
  const auto add_slabs = [&](ManyTask task, int64_t end_token, int64_t part) {
    for (; task.first_token < end_token; task.first_token += slab_tokens) {
      task.num_rows = std::min(slab_tokens, end_token - task.first_token) * batch.group;
      for (task.kv_head = 0; task.kv_head < batch.num_kv_heads; ++task.kv_head) tasks.many.push_back({task, part});
    }
  };
  for (const int32_t* g = groups; g < groups + 3 * num_groups; g += 3) {
    const int64_t first = g[0], end = g[0] + g[1], num_keys = g[2] * batch.block_size;
    if (num_keys == 0) continue;
    for (int64_t s = first; s < end; ++s) shared_keys[static_cast<size_t>(s)] = num_keys;
    const ManyTask task{first, 0, 0, num_keys, batch.query_starts[first], 0, 0, false};
    add_slabs(task, batch.query_starts[end], 0);
  }
  const bool is_busy = batch.num_seqs >= kSeqsPerThread * num_threads;
  const int64_t heads_at_once = is_busy ? batch.num_kv_heads : 1;  // else the threads share the heads
  for (int64_t s = 0; s < batch.num_seqs; ++s) {
    const int64_t first_key = shared_keys[static_cast<size_t>(s)], num_keys = batch.kv_lens[s] - first_key;
    const int64_t num_tokens = batch.query_len(s), num_rows = num_tokens * batch.group, own = first_key > 0 ? 1 : 0;
    int64_t num_parts = own + 1;
    if (num_rows <= kMaxFewRows) {
      num_parts = own + (num_keys + kChunkKeys - 1) / kChunkKeys;
      if (num_rows > 0) tasks.max_few_rows = std::max(tasks.max_few_rows, num_rows);
      for (int64_t part = own, key = first_key; num_rows > 0 && part < num_parts; ++part, key += kChunkKeys) {
        for (int64_t k = 0; k < batch.num_kv_heads; k += heads_at_once) {
          const int64_t end = std::min<int64_t>(key + kChunkKeys, batch.kv_lens[s]);
          tasks.few.push_back({{s, k, heads_at_once, key, end}, part});
        }
      }
    } else {
      const int64_t offset = batch.kv_lens[s] - num_tokens - batch.query_starts[s];
      add_slabs({s, 0, first_key, num_keys, batch.query_starts[s], 0, offset, true}, batch.query_starts[s + 1], own);
    }
    for (int64_t t = 0; t < num_tokens; ++t) {
      tasks.num_parts.push_back(num_parts);
      tasks.partial_start.push_back(tasks.partial_size);
      if (num_parts > 1) tasks.partial_size += num_parts * batch.num_heads * (batch.head_dim + 2);
    }
  }
  const auto work = [&](const ManyTask& task) {
    const int64_t last_token = task.first_token + task.num_rows / batch.group - 1;
    const int64_t seen = task.causal ? last_token + task.position_offset + 1 - task.first_key : task.num_keys;
    return task.num_rows * seen;
  };
  std::stable_sort(tasks.many.begin(), tasks.many.end(),
                   [&](const ManyTask& a, const ManyTask& b) { return work(a) > work(b); });
  return tasks;
}

}  // namespace v4flash
