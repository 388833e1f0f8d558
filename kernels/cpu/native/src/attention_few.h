// Attention of a few rows (decode): keys and values are read where they lie, each once for all heads of a group, while
// the next tile is on its way from memory. Key heads that lie side by side are read side by side.
#pragma once
#include "dot.h"
#include "parallel.h"
#include "softmax.h"

namespace v4flash {

// Rows are the heads of a group within tokens: row r is head r % group of token r / group of the sequence.
struct FewTask {
  int64_t seq, kv_head, num_kv_heads;  // these key heads, one after the other
  int64_t first, end;                  // keys first .. end of the sequence
};

// Memory that will be read soon, fetched line by line in the order of its addresses: so the CPU sees a stream and runs
// ahead of it by itself.
class Coming {
 public:
  static constexpr int64_t kLineBytes = 64;
  struct Run {
    const char *begin, *end;
  };

  // With room for so many runs.
  explicit Coming(Run* runs) : runs_(runs) {}

  void clear() { num_runs_ = next_ = num_lines_ = 0; }
  void add(const void* begin, int64_t num_bytes) {
    const char* from = static_cast<const char*>(begin);
    num_lines_ += num_bytes / kLineBytes + 1;
    if (num_runs_ > 0 && runs_[num_runs_ - 1].end == from) runs_[num_runs_ - 1].end += num_bytes;
    else runs_[num_runs_++] = {from, from + num_bytes};
  }
  // Lines to fetch at each of so many calls.
  void divide(int64_t num_calls) { at_once_ = (num_lines_ + num_calls - 1) / num_calls; }
  void fetch() {
    for (int64_t i = 0; i < at_once_ && next_ < num_runs_; ++i) {
      Run& run = runs_[next_];
      _mm_prefetch(run.begin, kHint);
      run.begin += kLineBytes;
      next_ += run.begin >= run.end;
    }
  }

 private:
  static constexpr auto kHint = _MM_HINT_T0;
  Run* runs_;
  int64_t num_runs_ = 0, next_ = 0, num_lines_ = 0, at_once_ = 0;
};

template <class T>
class FewRows {
 public:
  static constexpr int kSlice = 4;  // rows that share one pass over a tile in registers
  static constexpr int kKeys = 32;  // of a tile
  static constexpr int kSome = 4;   // keys whose scores are computed at a time

  // For tasks of at most max_rows rows a key head.
  FewRows(const Paged<T>& paged, int64_t max_rows)
      : paged_(paged), padded_((paged.head_dim + kLanes - 1) / kLanes * kLanes) {
    const int64_t rows = max_rows * paged.num_kv_heads;
    Scratch& scratch = Scratch::of_thread<FewRows>();
    scratch.reset(Scratch::padded<float>(rows * paged.head_dim) + Scratch::padded<float>(rows * padded_) +
                  2 * Scratch::padded<float>(rows) + Scratch::padded<float>(kSlice * kKeys) +
                  2 * Scratch::padded<const T*>(kKeys) + Scratch::padded<Coming::Run>(2 * kKeys * paged.num_kv_heads));
    query_ = scratch.take<typename Dot<T>::Element>(rows * paged.head_dim);
    values_ = scratch.take<float>(rows * padded_);
    max_ = scratch.take<float>(rows);
    sum_ = scratch.take<float>(rows);
    scores_ = scratch.take<float>(kSlice * kKeys);
    rows_ = scratch.take<const T*>(kKeys);
    next_rows_ = scratch.take<const T*>(kKeys);
    coming_ = Coming(scratch.take<Coming::Run>(2 * kKeys * paged.num_kv_heads));
  }

  // finish(key head, row, partial) is called for each row; `next` is what this thread does afterwards, if anything.
  template <class Finish>
  void run(const FewTask& task, const FewTask* next, Finish finish) {
    const int64_t num_tokens = paged_.query_len(task.seq), num_rows = num_tokens * paged_.group;
    start(task, num_rows);
    if (prepared_ != &task) paged_.key_rows(task.seq, task.kv_head, task.first, tile_len(task, task.first), next_rows_);
    const int64_t first_position = paged_.kv_lens[task.seq] - num_tokens;
    for (int64_t key = task.first; key < task.end; key += kKeys) {
      const int count = tile_len(task, key);
      std::swap(rows_, next_rows_);
      prepare(task, key + kKeys, count, next);
      const auto visible = [&](int64_t row) { return first_position + row / paged_.group + 1 - key; };
      for (int64_t h = 0; h < task.num_kv_heads; ++h) {
        head_offset_ = h * paged_.block_size * paged_.head_dim;
        for (int64_t r = 0; r < num_rows; r += kSlice) {
          const int64_t left = num_rows - r, at = h * num_rows + r;
          const auto sees = [&](int64_t i) { return visible(r + i); };
          if (left >= 4) slice<4>(at, count, r == 0, sees);
          else if (left == 3) slice<3>(at, count, r == 0, sees);
          else if (left == 2) slice<2>(at, count, r == 0, sees);
          else slice<1>(at, count, r == 0, sees);
        }
      }
    }
    prepared_ = next;
    for (int64_t i = 0; i < task.num_kv_heads * num_rows; ++i) {
      finish(task.kv_head + i / num_rows, i % num_rows, Partial{max_[i], sum_[i], values_ + i * padded_});
    }
  }

 private:
  static int tile_len(const FewTask& task, int64_t key) {
    return static_cast<int>(std::min<int64_t>(kKeys, task.end - key));
  }

  void start(const FewTask& task, int64_t num_rows) {
    const int64_t dim = paged_.head_dim, first_token = paged_.query_starts[task.seq];
    for (int64_t i = 0; i < task.num_kv_heads * num_rows; ++i) {
      const int64_t r = i % num_rows, head = (task.kv_head + i / num_rows) * paged_.group + r % paged_.group;
      const T* q = paged_.query_row(first_token + r / paged_.group, head);
      for_lanes(dim, [&](int64_t d, int lanes) { store_lanes(query_ + i * dim + d, load_lanes(q + d, lanes), lanes); });
      max_[i] = kLowest;
      sum_[i] = 0;
    }
    std::fill_n(values_, task.num_kv_heads * num_rows * padded_, 0.f);
  }

  // Finds the rows of the tile that comes after the present one of `count` keys, and begins to fetch them.
  void prepare(const FewTask& task, int64_t key, int count, const FewTask* next) {
    const FewTask* of = key < task.end ? &task : next;
    coming_.clear();
    if (!of) return;
    const int64_t first = of == &task ? key : next->first, dim = paged_.head_dim;
    const int num_rows = tile_len(*of, first);
    paged_.key_rows(of->seq, of->kv_head, first, num_rows, next_rows_);
    for (int j = 0, end = 0; j < num_rows; j = end) {  // rows that lie side by side
      for (end = j + 1; end < num_rows && next_rows_[end] == next_rows_[end - 1] + dim;) ++end;
      for (const int64_t part : {int64_t{0}, paged_.value_offset}) {
        for (int64_t h = 0; h < of->num_kv_heads; ++h) {
          const T* from = next_rows_[j] + part + h * paged_.block_size * dim;
          coming_.add(from, (end - j) * dim * static_cast<int64_t>(sizeof(T)));
        }
      }
    }
    coming_.divide(task.num_kv_heads * (count + (count + kSome - 1) / kSome));
  }

  // Rows row .. row + num_rows of the state over the tile; the first slice of a head fetches from the next one.
  template <int num_rows, class Sees>
  void slice(int64_t row, int count, bool first, Sees sees) {
    const int width = (count + kLanes - 1) / kLanes * kLanes;
    for (int j = 0; j < width; j += kLanes) score<num_rows>(row, j, count, first);
    for (int r = 0; r < num_rows; ++r) {
      const auto seen = static_cast<int>(std::min<int64_t>(count, sees(r)));
      float* line = scores_ + r * kKeys;
      const float shrink = soften<precision>(line, width, seen, paged_.scale, max_[row + r], sum_[row + r]);
      scale_row(values_ + (row + r) * padded_, padded_, shrink);
    }
    float* to = values_ + row * padded_;
    int64_t i = 0;
    for (; i + kPanel * kLanes <= paged_.head_dim; i += kPanel * kLanes) {
      add_values<num_rows, kPanel>(to, i, kLanes, count, first && i == 0);
    }
    for (; i < paged_.head_dim; i += kLanes) {
      add_values<num_rows, 1>(to, i, static_cast<int>(std::min<int64_t>(kLanes, paged_.head_dim - i)), count,
                              first && i == 0);
    }
  }

  // Scores of query rows with kLanes keys of the tile, some keys at a time.
  template <int num_rows>
  void score(int64_t row, int j, int count, bool with_fetch) {
    constexpr int step = Dot<T>::kWidth, some = kSome;
    const int64_t dim = paged_.head_dim;
    const auto* q = query_ + row * dim;
    Vec sums[num_rows][kLanes];
    for (int i = 0; i < kLanes; i += some) {
      if (with_fetch) coming_.fetch();
      const T* keys[some];
      for (int n = 0; n < some; ++n) keys[n] = rows_[std::min(j + i + n, count - 1)] + head_offset_;
      Vec part[num_rows][some];
      for (auto& line : part) std::fill_n(line, some, zero());
      int64_t d = 0;
      for (; d + step <= dim; d += step) {
#pragma GCC unroll 4
        for (int n = 0; n < some; ++n) {
#pragma GCC unroll 4
          for (int r = 0; r < num_rows; ++r) part[r][n] = Dot<T>::mac(part[r][n], keys[n] + d, q + r * dim + d);
        }
      }
      for (int n = 0; n < some; ++n) {
        for (int r = 0; r < num_rows; ++r) {
          const auto left = static_cast<int>(dim - d);
          sums[r][i + n] = left ? Dot<T>::mac_n(part[r][n], keys[n] + d, q + r * dim + d, left) : part[r][n];
        }
      }
    }
    for (int r = 0; r < num_rows; ++r) store(scores_ + r * kKeys + j, row_sums(sums[r]));
  }

  // values[num_rows][offset ..] += probabilities [num_rows, count] times the values of the tile there.
  template <int num_rows, int vectors>
  void add_values(float* to, int64_t offset, int lanes, int count, bool with_fetch) {
    Vec sums[num_rows][vectors];
    for (int r = 0; r < num_rows; ++r) {
      for (int v = 0; v < vectors; ++v) sums[r][v] = load(to + r * padded_ + offset + v * kLanes);
    }
    for (int j = 0; j < count; ++j) {
      const T* value = rows_[j] + head_offset_ + paged_.value_offset + offset;
      if (with_fetch) coming_.fetch();
      Vec x[vectors];
      for (int v = 0; v < vectors; ++v) x[v] = load_lanes(value + v * kLanes, lanes);
      for (int r = 0; r < num_rows; ++r) {
        const Vec p = set(scores_[r * kKeys + j]);
        for (int v = 0; v < vectors; ++v) sums[r][v] = fma(p, x[v], sums[r][v]);
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      for (int v = 0; v < vectors; ++v) store(to + r * padded_ + offset + v * kLanes, sums[r][v]);
    }
  }

  static constexpr Precision precision = std::is_same_v<T, BF16> ? Precision::kBF16 : Precision::kF32;
  const Paged<T>& paged_;
  int64_t padded_, head_offset_ = 0;
  typename Dot<T>::Element* query_;
  float *values_, *max_, *sum_, *scores_;
  const T **rows_, **next_rows_;
  Coming coming_{nullptr};  // the next tile
  const FewTask* prepared_ = nullptr;  // whose first tile next_rows_ holds
};

}  // namespace v4flash
