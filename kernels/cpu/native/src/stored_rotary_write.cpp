// Splits the rows of a fused projection as rotary_write_kv.cpp does, for a layer whose full blocks are stored in
// another form: keys and values go to `exact` in compute dtype, each block that is full now is rounded from there into
// the body, and the rows of a block that is not stay in the tail of their sequence.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention_checks.h"
#include "ops.h"
#include "rotate.h"

namespace v4flash {
namespace {

// Rows of one sequence in one block.
struct Piece {
  int64_t first_row, end_row;  // of the step
  int64_t exact_row;           // at which the block begins
  int64_t num_old, num_kept;   // rows of the block before the step and after it
  int64_t block, tail_slot;
  bool goes_on;  // the sequence has rows in the next block as well, whose piece may write to the same tail
};

struct Shape {
  int64_t num_kv_rows, block_size, head_dim, block_stride, scale_stride, group_size, num_groups;
};

// The scale of a group whose largest magnitude is known, rounded up so that no code needs more than 127. NaN stays.
inline uint16_t scale_bits(float largest) {
  const auto bits = static_cast<uint16_t>(_cvtss_sh(largest / 127.f, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
  constexpr uint16_t kInfinity = 0x7c00, kLargest = 0x7bff, kSmallest = 0x0001;
  if (bits == kInfinity) return kLargest;
  return std::max(bits, kSmallest);
}

// x / scale for a float16 scale, rounded as a division rounds, in a fraction of its time: what the product leaves is
// known exactly, and with the eleven bits of a scale no quotient is so near the middle of two floats that its
// correction could go astray.
inline Vec quotient(Vec x, Vec scale, Vec inverse) {
  const Vec q = x * inverse;
  return fma(fma(zero() - q, scale, x), inverse, q);
}

// The rows of one key or value head in a full block, each `stride` after the one before. All scales are found before
// the first is used: a row that waits for its own would keep the CPU from beginning the next.
template <class T, class S>
void store_rows(const Shape& shape, const T* from, int64_t stride, S* to, F16* scales) {
  const int64_t num_rows = shape.block_size, dim = shape.head_dim;
  if constexpr (std::is_same_v<S, int8_t>) {
    const int64_t num_groups = shape.num_groups, group_size = shape.group_size;
    const auto group_dim = [&](int64_t g) { return std::min(group_size, dim - g * group_size); };
    for (int64_t j = 0; j < num_rows; ++j) {
      for (int64_t g = 0; g < num_groups; ++g) {
        const T* row = from + j * stride + g * group_size;
        Vec largest = zero();
        for_lanes(group_dim(g),
                  [&](int64_t i, int lanes) { largest = max_magnitude(largest, load_lanes(row + i, lanes)); });
        scales[j * num_groups + g] = F16(scale_bits(reduce_max_magnitude(largest)), F16::from_bits());
      }
    }
    for (int64_t j = 0; j < num_rows; ++j) {
      for (int64_t g = 0; g < num_groups; ++g) {
        const T* row = from + j * stride + g * group_size;
        S* codes = to + j * dim + g * group_size;
        const auto value = static_cast<float>(scales[j * num_groups + g]);
        const Vec scale = set(value), inverse = set(1.f / value);
        if (value < kLargestF16) {
          for_lanes(group_dim(g), [&](int64_t i, int lanes) {
            store_lanes(codes + i, quotient(load_lanes(row + i, lanes), scale, inverse), lanes);
          });
        } else {  // there may be infinity, or NaN
          for_lanes(group_dim(g),
                    [&](int64_t i, int lanes) { store_lanes(codes + i, load_lanes(row + i, lanes) / scale, lanes); });
        }
      }
    }
  } else {
    for (int64_t j = 0; j < num_rows; ++j, from += stride, to += dim) {
      for_lanes(dim, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(from + i, lanes), lanes); });
    }
  }
}

// Rows in compute dtype: those of the step's blocks, and the tails.
template <class T>
struct OpenRows {
  const Shape& shape;
  T *exact, *tail;

  T* exact_row(int64_t row, int64_t kv_row) const {
    return exact + (row * shape.num_kv_rows + kv_row) * shape.head_dim;
  }
  T* tail_row(int64_t slot, int64_t kv_row, int64_t offset) const {
    return tail + ((slot * shape.num_kv_rows + kv_row) * (shape.block_size - 1) + offset) * shape.head_dim;
  }
  // Rows are too short for the call that a copy of unknown length becomes.
  void copy_row(const T* from, T* to) const {
    constexpr int64_t kChunk = 32;
    int64_t i = 0;
    for (; i + kChunk <= shape.head_dim; i += kChunk) std::memcpy(to + i, from + i, kChunk * sizeof(T));
    if (i < shape.head_dim) std::copy_n(from + i, shape.head_dim - i, to + i);
  }
  void fetch_old(const Piece& piece) const {
    for (int64_t j = 0; j < piece.num_old; ++j) {
      for (int64_t k = 0; k < shape.num_kv_rows; ++k) {
        copy_row(tail_row(piece.tail_slot, k, j), exact_row(piece.exact_row + j, k));
      }
    }
  }
  template <class S>
  void keep(const Piece& piece, S* body, F16* scales) const {
    for (int64_t k = 0; k < shape.num_kv_rows; ++k) {
      if (piece.num_kept == shape.block_size) {
        const int64_t row = k * shape.block_size;
        store_rows(shape, exact_row(piece.exact_row, k), shape.num_kv_rows * shape.head_dim,
                   body + piece.block * shape.block_stride + row * shape.head_dim,
                   scales + piece.block * shape.scale_stride + row * shape.num_groups);
        continue;
      }
      for (int64_t j = piece.num_old; j < piece.num_kept; ++j) {
        copy_row(exact_row(piece.exact_row + j, k), tail_row(piece.tail_slot, k, j));
      }
    }
  }
};

std::vector<Piece> cut(const Tensor& starts, const Tensor& lens, const Tensor& tables, const Tensor& tail_slots,
                       int64_t size, int64_t num_tails) {
  const auto *start = starts.const_data_ptr<int32_t>(), *len = lens.const_data_ptr<int32_t>();
  const auto *table = tables.const_data_ptr<int32_t>(), *slot = tail_slots.const_data_ptr<int32_t>();
  std::vector<Piece> pieces;
  int64_t num_exact = 0;
  for (int64_t s = 0; s < lens.size(0); ++s) {
    TORCH_CHECK(slot[s] >= 0 && slot[s] < num_tails, "sequence ", s, " has no tail ", slot[s]);
    const int64_t first = len[s] - (start[s + 1] - start[s]);
    for (int64_t position = first, row = start[s]; position < len[s];) {
      const int64_t old = position % size, end = std::min<int64_t>(len[s], position - old + size);
      pieces.push_back({row, row + end - position, num_exact, old, old + end - position,
                        table[s * tables.size(1) + position / size], slot[s], end < len[s]});
      num_exact += pieces.back().num_kept;
      row += end - position;
      position = end;
    }
  }
  return pieces;
}

}  // namespace

std::tuple<Tensor, Tensor> stored_rotary_write(const Tensor& qkv, const OptionalTensor& scales, const Tensor& cos,
                                               const Tensor& sin, const Tensor& query_starts, const Tensor& kv_lens,
                                               const Tensor& block_tables, const Tensor& tail_slots, Tensor& body,
                                               const OptionalTensor& body_scales, Tensor& tail, int64_t group_size,
                                               int64_t num_heads, const OptionalTensor& query_norm,
                                               const OptionalTensor& key_norm, double eps) {
  check_stored(body, body_scales, group_size);
  check_float(tail, 5, "tail");
  const int64_t num_kv_heads = body.size(2), size = body.size(3), dim = body.size(4);
  TORCH_CHECK(tail.size(1) == 2 && tail.size(2) == num_kv_heads && tail.size(3) == size - 1 && tail.size(4) == dim,
              "tail must be [slots, 2, K, B - 1, D] of the body's sizes");
  const Projection rows(qkv, scales, cos, sin, num_heads, num_kv_heads, dim, query_norm, key_norm, eps);
  check_tables(body, query_starts, kv_lens, block_tables, rows.num_rows);
  check_vector(tail_slots, at::kInt, kv_lens.size(0), "tail_slots");
  const Shape shape{2 * num_kv_heads,
                    size,
                    dim,
                    body.stride(0),
                    body_scales ? body_scales->stride(0) : 0,
                    group_size,
                    body_scales ? body_scales->size(4) : 0};
  const std::vector<Piece> pieces = cut(query_starts, kv_lens, block_tables, tail_slots, size, tail.size(0));
  const int64_t num_exact = pieces.empty() ? 0 : pieces.back().exact_row + pieces.back().num_kept;
  Tensor query = at::empty({rows.num_rows, num_heads, dim}, tail.options());
  Tensor exact = at::empty({num_exact, 2, num_kv_heads, dim}, tail.options());
  F16* body_scale = body_scales ? body_scales->mutable_data_ptr<F16>() : nullptr;
  by_dtype(tail.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const OpenRows<T> open{shape, exact.mutable_data_ptr<T>(), tail.mutable_data_ptr<T>()};
    T* to = query.mutable_data_ptr<T>();
    for (const Piece& piece : pieces) {
      if (piece.goes_on) open.fetch_old(piece);  // before the last piece of the sequence writes to the tail
    }
    const auto num_pieces = static_cast<int64_t>(pieces.size());
    for_rows(num_pieces, rows.width * rows.num_rows / std::max<int64_t>(1, num_pieces),
             [&](int64_t begin, int64_t end) {
               for (int64_t p = begin; p < end; ++p) {
                 const Piece& piece = pieces[static_cast<size_t>(p)];
                 if (!piece.goes_on) open.fetch_old(piece);
                 rows.split(piece.first_row, piece.end_row, to, [&](int64_t t) {
                   T* keys = open.exact_row(piece.exact_row + piece.num_old + t - piece.first_row, 0);
                   return KeyValueRow<T>{keys, keys + num_kv_heads * dim, dim};
                 });
                 by_stored(body.scalar_type(), [&](auto stored_element) {
                   open.keep(piece, static_cast<decltype(stored_element)*>(body.mutable_data_ptr()), body_scale);
                 });
               }
             });
  });
  return {query, exact};
}

}  // namespace v4flash
