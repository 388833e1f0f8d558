// Attention of a few rows (decode): keys and values are read where they lie, each once for all heads of a group, while
// the next tile is on its way from memory. Key heads that lie side by side are read side by side. Codes are widened
// where they are multiplied; their scales act on the scores and on the probabilities of whole keys.
#pragma once
#include <optional>

#include "few_query.h"
#include "few_tiles.h"
#include "softmax.h"

namespace v4flash {

template <class T, class S>
class FewRows {
 public:
  static constexpr int kSlice = 4;  // rows that share one pass over a tile in registers
  static constexpr int kKeys = FewTiles<T, S>::kKeys, kSome = FewTiles<T, S>::kSome;

  // For tasks of at most max_rows rows a key head.
  FewRows(const Layer<T, S>& layer, int64_t max_rows)
      : layer_(layer), padded_((layer.head_dim + kLanes - 1) / kLanes * kLanes) {
    const int64_t rows = max_rows * layer.num_kv_heads;
    Scratch& scratch = Scratch::of_thread<FewRows>();
    scratch.reset();
    query_ = FewQuery<T, T>(scratch, rows, layer.head_dim, layer.head_dim);
    if constexpr (kHasExact) body_query_ = FewQuery<S, T>(scratch, rows, layer.head_dim, layer.group_size);
    values_ = scratch.take<float>(rows * padded_);
    max_ = scratch.take<float>(rows);
    sum_ = scratch.take<float>(rows);
    scores_ = scratch.take<float>(kSlice * kKeys);
    weights_ = scratch.take<float>(kSlice * kKeys);
    key_scales_ = scratch.take<float>(layer.num_groups * kKeys);
    value_scales_ = scratch.take<float>(layer.num_groups * kKeys);
    tiles_.emplace(scratch, layer);
  }

  // finish(key head, row, partial) is called for each row; `next` is what this thread does afterwards, if anything.
  template <class Finish>
  void run(const FewTask& task, const FewTask* next, Finish finish) {
    const int64_t num_rows = layer_.query_len(task.seq) * layer_.group, first = layer_.first_position(task.seq);
    const auto position = [&](int64_t row) { return first + row / layer_.group; };
    start(task, num_rows);
    for (int64_t key = task.first, end = tiles_->end(task); key < end; key += kKeys) {
      const int count = tiles_->go_to(task, key, next);
      each_slice(task, num_rows, [&](auto rows, int64_t h, int64_t r) {
        if (Layer<T, S>::kHasScales && r == 0) read_scales(task.seq, task.kv_head + h, key, count);
        const auto window = [&](int64_t row) { return layer_.body_window(position(row)).from(key); };
        slice<rows>(body_query(), h * num_rows + r, r, tiles_->rows, layer_.body_layout(), h, count, window);
      });
    }
    if constexpr (kHasExact) {
      for (int64_t key = std::max(task.first, layer_.block_start(first)); key < task.end; key += kKeys) {
        const auto count = static_cast<int>(std::min<int64_t>(kKeys, task.end - key));
        const T* exact[kKeys];
        layer_.exact_rows(task.seq, task.kv_head, key, count, exact);
        each_slice(task, num_rows, [&](auto rows, int64_t h, int64_t r) {
          const auto window = [&](int64_t row) { return layer_.exact_window(position(row)).from(key); };
          slice<rows>(query_, h * num_rows + r, r, exact, layer_.exact_layout(), h, count, window);
        });
      }
    }
    for (int64_t i = 0; i < task.num_kv_heads * num_rows; ++i) {
      finish(task.kv_head + i / num_rows, i % num_rows, Partial{max_[i], sum_[i], values_ + i * padded_});
    }
  }

 private:
  static constexpr bool kHasExact = Layer<T, S>::kHasExact;
  static constexpr Precision precision = std::is_same_v<T, BF16> ? Precision::kBF16 : Precision::kF32;

  const auto& body_query() const {
    if constexpr (kHasExact) return body_query_;
    else return query_;
  }
  // f(number of rows, key head of the task, first row) for rows of the sequence that share a pass.
  template <class F>
  static void each_slice(const FewTask& task, int64_t num_rows, F f) {
    for (int64_t h = 0; h < task.num_kv_heads; ++h) {
      for (int64_t r = 0; r < num_rows; r += kSlice) {
        switch (std::min<int64_t>(kSlice, num_rows - r)) {
          case 1: f(std::integral_constant<int, 1>{}, h, r); break;
          case 2: f(std::integral_constant<int, 2>{}, h, r); break;
          case 3: f(std::integral_constant<int, 3>{}, h, r); break;
          default: f(std::integral_constant<int, 4>{}, h, r);
        }
      }
    }
  }

  void start(const FewTask& task, int64_t num_rows) {
    const int64_t first_token = layer_.query_starts[task.seq];
    for (int64_t i = 0; i < task.num_kv_heads * num_rows; ++i) {
      const int64_t r = i % num_rows, head = (task.kv_head + i / num_rows) * layer_.group + r % layer_.group;
      const T* q = layer_.query_row(first_token + r / layer_.group, head);
      query_.set_row(i, q);
      if constexpr (kHasExact) body_query_.set_row(i, q);
      max_[i] = kLowest;
      sum_[i] = 0;
    }
    std::fill_n(values_, task.num_kv_heads * num_rows * padded_, 0.f);
  }

  // [C][kKeys] of keys first .. first + count and of their values; what lies past them is undefined.
  void read_scales(int64_t seq, int64_t kv_head, int64_t first, int64_t count) {
    for (const bool is_value : {false, true}) {
      float* to = is_value ? value_scales_ : key_scales_;
      layer_.each_block(seq, is_value, kv_head, first, count, [&](const S*, const F16* from, int64_t n, int64_t i) {
        if (layer_.num_groups == 1) {
          for_lanes(n, [&](int64_t j, int lanes) { store_lanes(to + i + j, load_lanes(from + j, lanes), lanes); });
          return;
        }
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t g = 0; g < layer_.num_groups; ++g) to[g * kKeys + i + j] = from[j * layer_.num_groups + g];
        }
      });
    }
  }

  // Rows at .. at + num_rows of the state over a tile of rows of X, which are rows row .. of the sequence; the first
  // slice of a head fetches from the next tile.
  template <int num_rows, class X, class WindowOf>
  void slice(const FewQuery<X, T>& query, int64_t at, int64_t row, const X* const* rows, RowLayout layout, int64_t h,
             int count, WindowOf window) {
    constexpr bool is_scaled = Layer<T, X>::kHasScales;
    const int width = (count + kLanes - 1) / kLanes * kLanes;
    const int64_t offset = h * layout.head_stride;
    for (int j = 0; j < width; j += kLanes) {
      for (int64_t g = 0; g < query.num_groups(); ++g) {
        Vec sums[num_rows];
        score(query, at, g, rows, offset, j, count, row == 0 && g == 0, sums);
        for (int r = 0; r < num_rows; ++r) {
          float* to = scores_ + r * kKeys + j;
          if constexpr (is_scaled) {
            const Vec x = sums[r] * set(query.scale(at + r, g)) * load(key_scales_ + g * kKeys + j);
            store(to, g == 0 ? x : x + load(to));
          } else {
            store(to, sums[r]);
          }
        }
      }
    }
    for (int r = 0; r < num_rows; ++r) {
      const Window sees = window(row + r);
      const auto seen = static_cast<int>(std::min<int64_t>(count, sees.end));
      float* line = scores_ + r * kKeys;
      if constexpr (std::is_same_v<X, T> && kHasExact) {
        std::fill_n(line, std::min<int64_t>(count, sees.begin), -std::numeric_limits<float>::infinity());
      }
      const float shrink = soften<precision>(line, width, seen, layer_.scale, max_[at + r], sum_[at + r]);
      scale_row(values_ + (at + r) * padded_, padded_, shrink);
    }
    for (int64_t g = 0; g < query.num_groups(); ++g) {
      const float* weights = scores_;
      if constexpr (is_scaled) {
        for (int r = 0; r < num_rows; ++r) {
          for (int j = 0; j < width; j += kLanes) {
            store(weights_ + r * kKeys + j, load(scores_ + r * kKeys + j) * load(value_scales_ + g * kKeys + j));
          }
        }
        weights = weights_;
      }
      float* to = values_ + at * padded_ + g * layer_.group_size;
      const int64_t from = offset + layout.value_offset + g * layer_.group_size, dim = query.group_dim(g);
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

  // Scores of query rows with kLanes keys of the tile over the channels of a group, some keys at a time.
  template <int num_rows, class X>
  void score(const FewQuery<X, T>& query, int64_t at, int64_t g, const X* const* rows, int64_t offset, int j, int count,
             bool with_fetch, Vec (&out)[num_rows]) {
    constexpr int step = Dot<X, T>::kWidth;
    const auto* q = query.row(at, g);
    const int64_t dim = query.group_dim(g), stride = query.stride();
    offset += g * layer_.group_size;
    Vec sums[num_rows][kLanes];
    for (int i = 0; i < kLanes; i += kSome) {
      if (with_fetch) tiles_->fetch();
      const X* keys[kSome];
      for (int n = 0; n < kSome; ++n) keys[n] = rows[std::min(j + i + n, count - 1)] + offset;
      Dot<X, T> part[num_rows][kSome];
      int64_t d = 0;
      for (; d + step <= dim; d += step) {
#pragma GCC unroll 4
        for (int n = 0; n < kSome; ++n) {
#pragma GCC unroll 4
          for (int r = 0; r < num_rows; ++r) part[r][n].mac(keys[n] + d, q + r * stride + d);
        }
      }
      const auto left = static_cast<int>(dim - d);
      for (int n = 0; n < kSome; ++n) {
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
  void add_values(const float* weights, float* to, const X* const* rows, int64_t offset, int lanes, int count) {
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

  const Layer<T, S>& layer_;
  int64_t padded_;
  FewQuery<T, T> query_;
  std::conditional_t<kHasExact, FewQuery<S, T>, std::nullptr_t> body_query_;
  float *values_, *max_, *sum_, *scores_, *weights_, *key_scales_, *value_scales_;
  std::optional<FewTiles<T, S>> tiles_;
};

}  // namespace v4flash
