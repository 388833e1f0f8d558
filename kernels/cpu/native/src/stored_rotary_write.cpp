// Splits the rows of a fused projection as rotary_write_kv.cpp does, for a layer whose full blocks are stored in
// another form: keys and values go to `exact` in compute dtype, each block that is full now is rounded from there into
// the body, and the rows of a block that is not stay in the tail of their sequence.
#include <ATen/ops/empty.h>

#include <algorithm>
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

template <class T, class S>
void store_row(const Shape& shape, const T* from, S* to, F16* scales) {
  if constexpr (std::is_same_v<S, int8_t>) {
    for (int64_t g = 0; g < shape.num_groups; ++g) {
      const int64_t first = g * shape.group_size, dim = std::min(shape.group_size, shape.head_dim - first);
      Vec largest = zero();
      for_lanes(dim,
                [&](int64_t i, int lanes) { largest = max_magnitude(largest, load_lanes(from + first + i, lanes)); });
      scales[g] = F16(scale_bits(reduce_max_magnitude(largest)), F16::from_bits());
      const Vec scale = set(static_cast<float>(scales[g]));
      for_lanes(dim, [&](int64_t i, int lanes) {
        store_lanes(to + first + i, load_lanes(from + first + i, lanes) / scale, lanes);
      });
    }
  } else {
    for_lanes(shape.head_dim, [&](int64_t i, int lanes) { store_lanes(to + i, load_lanes(from + i, lanes), lanes); });
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
  void fetch_old(const Piece& piece) const {
    for (int64_t j = 0; j < piece.num_old; ++j) {
      for (int64_t k = 0; k < shape.num_kv_rows; ++k) {
        std::copy_n(tail_row(piece.tail_slot, k, j), shape.head_dim, exact_row(piece.exact_row + j, k));
      }
    }
  }
  template <class S>
  void keep(const Piece& piece, S* body, F16* scales) const {
    const bool is_full = piece.num_kept == shape.block_size;
    for (int64_t k = 0; k < shape.num_kv_rows; ++k) {
      for (int64_t j = is_full ? 0 : piece.num_old; j < piece.num_kept; ++j) {
        const T* from = exact_row(piece.exact_row + j, k);
        if (is_full) {
          const int64_t row = k * shape.block_size + j;
          store_row(shape, from, body + piece.block * shape.block_stride + row * shape.head_dim,
                    scales + piece.block * shape.scale_stride + row * shape.num_groups);
        } else {
          std::copy_n(from, shape.head_dim, tail_row(piece.tail_slot, k, j));
        }
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
                        table[s * tables.size(1) + position / size], slot[s]});
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
    for (const Piece& piece : pieces) open.fetch_old(piece);  // before the tail of any is written to
    const auto num_pieces = static_cast<int64_t>(pieces.size());
    for_rows(num_pieces, rows.width * rows.num_rows / std::max<int64_t>(1, num_pieces),
             [&](int64_t begin, int64_t end) {
               for (int64_t p = begin; p < end; ++p) {
                 const Piece& piece = pieces[static_cast<size_t>(p)];
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
