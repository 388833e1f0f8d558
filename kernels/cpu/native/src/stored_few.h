// Attention of a few rows (decode) over stored blocks: codes are widened where they are multiplied, scales act on the
// scores and on the probabilities of whole keys. The rows' own blocks come last, in compute dtype.
#pragma once
#include "attention_few.h"
#include "dot.h"
#include "parallel.h"
#include "softmax.h"
#include "stored_kv.h"

namespace v4flash {

template <class T>
struct OwnScore {  // of rows in compute dtype
  using Element = typename Dot<T>::Element;
  static constexpr bool kIsInteger = false;
  static constexpr int kWidth = Dot<T>::kWidth;
  Vec sum = zero();
  void mac(const T* a, const Element* b) { sum = Dot<T>::mac(sum, a, b); }
  void mac_n(const T* a, const Element* b, int n) { sum = Dot<T>::mac_n(sum, a, b, n); }
  Vec total() const { return sum; }
};

template <class T, class S>
class StoredFew {
 public:
  static constexpr int kSlice = 4;  // rows that share one pass over a tile in registers
  static constexpr int kKeys = 32;  // of a tile
  static_assert(kKeys <= kScaleStride);

  StoredFew(const StoredKV<T, S>& kv, int64_t max_rows)
      : kv_(kv), padded_((kv.head_dim + kLanes - 1) / kLanes * kLanes) {
    const int64_t rows = max_rows * kv.num_kv_heads, scales = kv.num_groups * kScaleStride;
    group_width_ = (std::min(kv.group_size, kv.head_dim) + Codes::kWidth - 1) / Codes::kWidth * Codes::kWidth;
    stored_width_ = kv.num_groups * group_width_;
    Scratch& scratch = Scratch::of_thread<StoredFew>();
    scratch.reset(Scratch::padded<OwnElement>(rows * kv.head_dim) + Scratch::padded<CodeElement>(rows * stored_width_) +
                  Scratch::padded<float>(rows * kv.num_groups) + Scratch::padded<float>(rows * padded_) +
                  2 * Scratch::padded<float>(rows) + 2 * Scratch::padded<float>(kSlice * kKeys) +
                  2 * Scratch::padded<float>(scales) + 2 * Scratch::padded<const S*>(kKeys) +
                  Scratch::padded<const T*>(kKeys) + Scratch::padded<float>(padded_));
    own_query_ = scratch.take<OwnElement>(rows * kv.head_dim);
    query_ = scratch.take<CodeElement>(rows * stored_width_);
    query_scales_ = scratch.take<float>(rows * kv.num_groups);
    values_ = scratch.take<float>(rows * padded_);
    max_ = scratch.take<float>(rows);
    sum_ = scratch.take<float>(rows);
    scores_ = scratch.take<float>(kSlice * kKeys);
    weights_ = scratch.take<float>(kSlice * kKeys);
    key_scales_ = scratch.take<float>(scales);
    value_scales_ = scratch.take<float>(scales);
    rows_ = scratch.take<const S*>(kKeys);
    next_rows_ = scratch.take<const S*>(kKeys);
    own_rows_ = scratch.take<const T*>(kKeys);
    line_ = scratch.take<float>(padded_);
    std::fill_n(query_, rows * stored_width_, CodeElement(0));  // past a group it stays so
    std::fill_n(key_scales_, scales, 0.f);  // past the keys they may be anything finite
    std::fill_n(value_scales_, scales, 0.f);
  }

  // finish(key head, row, partial) is called for each row; `next` is what this thread does afterwards, if anything.
  template <class Finish>
  void run(const FewTask& task, const FewTask* next, Finish finish) {
    const int64_t num_tokens = kv_.query_len(task.seq), num_rows = num_tokens * kv_.group;
    const int64_t first_position = kv_.first_position(task.seq), last_block = kv_.block_start(kv_.kv_lens[task.seq] - 1);
    start(task, num_rows);
    const int64_t stored_end = std::min(task.end, last_block);
    for (int64_t key = task.first; key < stored_end; key += kKeys) {
      const auto count = static_cast<int>(std::min<int64_t>(kKeys, stored_end - key));
      if (key == task.first && prepared_ != &task) kv_.body_rows(task.seq, task.kv_head, key, count, next_rows_);
      std::swap(rows_, next_rows_);
      prepare(task, key + kKeys, stored_end, next);
      for (int64_t h = 0; h < task.num_kv_heads; ++h) {
        if (kv_.scales) {
          kv_.read_scales(task.seq, 0, task.kv_head + h, key, count, key_scales_);
          kv_.read_scales(task.seq, 1, task.kv_head + h, key, count, value_scales_);
        }
        prefetch(h);
        const auto window = [&](int64_t row) {
          const int64_t own = kv_.block_start(first_position + row / kv_.group);
          return Window{0, static_cast<int>(std::clamp<int64_t>(own - key, 0, count))};
        };
        each_slice(num_rows, [&](auto rows, int64_t r) {
          slice<decltype(rows)::value, Codes>(h * num_rows + r, r, rows_, kv_.body_layout(), h, count, window);
        });
      }
    }
    const int64_t own_first = std::max(task.first, kv_.block_start(first_position));
    for (int64_t key = own_first; key < task.end; key += kKeys) {
      const auto count = static_cast<int>(std::min<int64_t>(kKeys, task.end - key));
      kv_.exact_rows(task.seq, task.kv_head, key, count, own_rows_);
      const auto window = [&](int64_t row) {
        const int64_t position = first_position + row / kv_.group;
        return Window{static_cast<int>(std::clamp<int64_t>(kv_.block_start(position) - key, 0, count)),
                      static_cast<int>(std::clamp<int64_t>(position + 1 - key, 0, count))};
      };
      for (int64_t h = 0; h < task.num_kv_heads; ++h) {
        each_slice(num_rows, [&](auto rows, int64_t r) {
          slice<decltype(rows)::value, OwnScore<T>>(h * num_rows + r, r, own_rows_, kv_.exact_layout(), h, count, window);
        });
      }
    }
    for (int64_t i = 0; i < task.num_kv_heads * num_rows; ++i) {
      finish(task.kv_head + i / num_rows, i % num_rows, Partial{max_[i], sum_[i], values_ + i * padded_});
    }
  }

 private:
  using Codes = Score<T, S>;
  using CodeElement = typename Codes::Element;
  using OwnElement = typename OwnScore<T>::Element;
  struct Window {  // keys of a tile that a row sees
    int begin, end;
  };

  template <class F>
  static void each_slice(int64_t num_rows, F f) {
    for (int64_t r = 0; r < num_rows; r += kSlice) {
      switch (std::min<int64_t>(kSlice, num_rows - r)) {
        case 1: f(std::integral_constant<int, 1>{}, r); break;
        case 2: f(std::integral_constant<int, 2>{}, r); break;
        case 3: f(std::integral_constant<int, 3>{}, r); break;
        default: f(std::integral_constant<int, 4>{}, r);
      }
    }
  }

  void start(const FewTask& task, int64_t num_rows) {
    const int64_t dim = kv_.head_dim, first_token = kv_.query_starts[task.seq];
    for (int64_t i = 0; i < task.num_kv_heads * num_rows; ++i) {
      const int64_t r = i % num_rows, head = (task.kv_head + i / num_rows) * kv_.group + r % kv_.group;
      const T* q = kv_.query_row(first_token + r / kv_.group, head);
      for_lanes(dim, [&](int64_t d, int lanes) {
        const Vec x = load_lanes(q + d, lanes);
        store_lanes(own_query_ + i * dim + d, x, lanes);
        store_lanes(line_ + d, x, lanes);
      });
      for (int64_t g = 0; g < kv_.num_groups; ++g) {
        const int64_t n = kv_.group_dim(g);
        const float* from = line_ + g * kv_.group_size;
        float scale = 1.f;
        if constexpr (Codes::kIsInteger) {
          Vec largest = zero();
          for_lanes(n, [&](int64_t d, int lanes) { largest = max_magnitude(largest, load_lanes(from + d, lanes)); });
          const float amax = reduce_max_magnitude(largest);
          scale = amax > 0 ? amax / Codes::kLevels : 1.f;  // NaN stays: it must reach the row's result
          if (amax != amax) scale = amax;
        }
        query_scales_[i * kv_.num_groups + g] = scale;
        const Vec inverse = set(1.f / scale);
        for_lanes(n, [&](int64_t d, int lanes) {
          const Vec x = load_lanes(from + d, lanes);
          store_lanes(query_ + i * stored_width_ + g * group_width_ + d, Codes::kIsInteger ? x * inverse : x, lanes);
        });
      }
      max_[i] = kLowest;
      sum_[i] = 0;
    }
    std::fill_n(values_, task.num_kv_heads * num_rows * padded_, 0.f);
  }

  // Finds the rows of the stored tile that comes after the present one, so that it can be prefetched.
  void prepare(const FewTask& task, int64_t key, int64_t end, const FewTask* next) {
    prepared_ = nullptr;
    num_next_ = 0;
    if (key < end) {
      num_next_ = static_cast<int>(std::min<int64_t>(kKeys, end - key));
      kv_.body_rows(task.seq, task.kv_head, key, num_next_, next_rows_);
    } else if (next) {
      const int64_t next_end = std::min(next->end, kv_.block_start(kv_.kv_lens[next->seq] - 1));
      num_next_ = static_cast<int>(std::clamp<int64_t>(next_end - next->first, 0, kKeys));
      if (num_next_ == 0) return;
      kv_.body_rows(next->seq, next->kv_head, next->first, num_next_, next_rows_);
      prepared_ = next;
    }
  }

  // Asks for the next tile's keys and values of one of the key heads that are read side by side.
  void prefetch(int64_t h) const {
    const int64_t size = kv_.head_dim * static_cast<int64_t>(sizeof(S)), offset = h * kv_.body_layout().head_stride;
    for (int j = 0; j < num_next_; ++j) {
      const char* line = reinterpret_cast<const char*>(next_rows_[j] + offset);
      const char* value = reinterpret_cast<const char*>(next_rows_[j] + offset + kv_.value_offset);
      for (int64_t i = 0; i < size; i += Coming::kLineBytes) {
        _mm_prefetch(line + i, _MM_HINT_T0);
        _mm_prefetch(value + i, _MM_HINT_T0);
      }
    }
  }

  // Rows at .. at + num_rows of the state over a tile, which are rows row .. of the sequence.
  template <int num_rows, class How, class X, class WindowOf>
  void slice(int64_t at, int64_t row, const X* const* rows, RowLayout layout, int64_t h, int count, WindowOf window) {
    constexpr bool is_stored = std::is_same_v<How, Codes> && !std::is_same_v<X, T>;
    const int width = (count + kLanes - 1) / kLanes * kLanes;
    const int64_t offset = h * layout.head_stride;
    for (int j = 0; j < width; j += kLanes) {
      if constexpr (is_stored) {
        for (int64_t g = 0; g < kv_.num_groups; ++g) {
          const auto* q = query_ + at * stored_width_ + g * group_width_;
          Vec sums[num_rows];
          score<num_rows, How>(q, stored_width_, rows, offset + g * kv_.group_size, kv_.group_dim(g), j, count, sums);
          for (int r = 0; r < num_rows; ++r) {
            Vec x = sums[r] * set(query_scales_[(at + r) * kv_.num_groups + g]);
            if (kv_.scales) x = x * load(key_scales_ + g * kScaleStride + j);
            float* to = scores_ + r * kKeys + j;
            store(to, g == 0 ? x : x + load(to));
          }
        }
      } else {
        Vec sums[num_rows];
        score<num_rows, How>(own_query_ + at * kv_.head_dim, kv_.head_dim, rows, offset, kv_.head_dim, j, count, sums);
        for (int r = 0; r < num_rows; ++r) store(scores_ + r * kKeys + j, sums[r]);
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      const Window seen = window(row + r);
      float* line = scores_ + r * kKeys;
      std::fill_n(line, seen.begin, -std::numeric_limits<float>::infinity());
      const float shrink = soften<precision>(line, width, seen.end, kv_.scale, max_[at + r], sum_[at + r]);
      scale_row(values_ + (at + r) * padded_, padded_, shrink);
    }
    const int64_t num_groups = is_stored && kv_.scales ? kv_.num_groups : 1;
    for (int64_t g = 0; g < num_groups; ++g) {
      const float* weights = scores_;
      if (is_stored && kv_.scales) {
        for (int r = 0; r < num_rows; ++r) {
          for (int j = 0; j < width; j += kLanes) {
            const Vec p = load(scores_ + r * kKeys + j) * load(value_scales_ + g * kScaleStride + j);
            store(weights_ + r * kKeys + j, p);
          }
        }
        weights = weights_;
      }
      const int64_t first = num_groups == 1 ? 0 : g * kv_.group_size;
      const int64_t dim = num_groups == 1 ? kv_.head_dim : kv_.group_dim(g);
      float* to = values_ + at * padded_ + first;
      const int64_t from = offset + layout.value_offset + first;
      int64_t i = 0;
      for (; i + kPanel * kLanes <= dim; i += kPanel * kLanes) {
        add_values<num_rows, kPanel>(weights, to + i, rows, from + i, kLanes, count);
      }
      for (; i < dim; i += kLanes) {
        const auto lanes = static_cast<int>(std::min<int64_t>(kLanes, dim - i));
        add_values<num_rows, 1>(weights, to + i, rows, from + i, lanes, count);
      }
    }
  }

  // Scores of query rows with kLanes keys of the tile over some channels, some keys at a time.
  template <int num_rows, class How, class X>
  static void score(const typename How::Element* q, int64_t stride, const X* const* rows, int64_t offset, int64_t dim,
                    int j, int count, Vec* out) {
    constexpr int step = How::kWidth, some = kLanes / 4;
    Vec sums[num_rows][kLanes];
    for (int i = 0; i < kLanes; i += some) {
      const X* keys[some];
      for (int n = 0; n < some; ++n) keys[n] = rows[std::min(j + i + n, count - 1)] + offset;
      How part[num_rows][some];
      int64_t d = 0;
      for (; d + step <= dim; d += step) {
#pragma GCC unroll 4
        for (int n = 0; n < some; ++n) {
#pragma GCC unroll 4
          for (int r = 0; r < num_rows; ++r) part[r][n].mac(keys[n] + d, q + r * stride + d);
        }
      }
      const auto left = static_cast<int>(dim - d);
      for (int n = 0; n < some; ++n) {
        for (int r = 0; r < num_rows; ++r) {
          if (left) part[r][n].mac_n(keys[n] + d, q + r * stride + d, left);
          sums[r][i + n] = part[r][n].total();
        }
      }
    }
    for (int r = 0; r < num_rows; ++r) out[r] = row_sums(sums[r]);
  }

  // to[num_rows][..] += weights [num_rows, count] times the values of the tile there.
  template <int num_rows, int vectors, class X>
  void add_values(const float* weights, float* to, const X* const* rows, int64_t offset, int lanes, int count) const {
    Vec sums[num_rows][vectors];
    for (int r = 0; r < num_rows; ++r) {
      for (int v = 0; v < vectors; ++v) sums[r][v] = load_lanes(to + r * padded_ + v * kLanes, lanes);
    }
    for (int j = 0; j < count; ++j) {
      const X* value = rows[j] + offset;
      Vec x[vectors];
      for (int v = 0; v < vectors; ++v) x[v] = load_lanes(value + v * kLanes, lanes);
      for (int r = 0; r < num_rows; ++r) {
        const Vec p = set(weights[r * kKeys + j]);
        for (int v = 0; v < vectors; ++v) sums[r][v] = fma(p, x[v], sums[r][v]);
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      for (int v = 0; v < vectors; ++v) store_lanes(to + r * padded_ + v * kLanes, sums[r][v], lanes);
    }
  }

  static constexpr Precision precision = std::is_same_v<T, BF16> ? Precision::kBF16 : Precision::kF32;
  const StoredKV<T, S>& kv_;
  int64_t padded_, group_width_, stored_width_;
  OwnElement* own_query_;
  CodeElement* query_;
  float *query_scales_, *values_, *max_, *sum_, *scores_, *weights_, *key_scales_, *value_scales_, *line_;
  const S **rows_, **next_rows_;
  const T** own_rows_;
  int num_next_ = 0;
  const FewTask* prepared_ = nullptr;  // whose first tile next_rows_ holds
};

}  // namespace v4flash
