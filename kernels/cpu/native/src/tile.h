// Matrix products of packed blocks in registers: C [6, columns] += A [6, depth] B [depth, columns].
// A *unit* is what one lane multiplies at a time: a float, or a pair of bfloat16 neighbours in depth.
#pragma once
#include "simd.h"

namespace v4flash {

constexpr int kTileRows = 6;
constexpr int kTileKeys = 64;

template <class T>
struct Tile {
  using Unit = float;
  using Operand = Vec;
  static constexpr int kDepth = 1;  // elements of a unit
  static constexpr Precision kPrecision = Precision::kF32;
  static Operand broadcast(Unit a) { return set(a); }
  static Operand load_units(const Unit* p) { return load(p); }
  static Vec mac(Vec sum, Operand a, Operand b) { return fma(a, b, sum); }
  // A vector of units from n elements of a row; units past them are zero.
  static Vec units_of_row(const T* row, int64_t n) {
    return load_lanes(row, static_cast<int>(std::min<int64_t>(n, kLanes)));
  }
  // Units that pair one element of each of kDepth rows.
  static Vec units_of_rows(const T* const* rows, int64_t offset, int n) { return load_lanes(rows[0] + offset, n); }
  static void store_floats(Unit* to, const float* from) {
    for (int i = 0; i < kTileKeys; i += kLanes) store(to + i, load(from + i));
  }
};

#if defined(__AVX512BF16__)
template <>
struct Tile<BF16> {
  using Unit = uint32_t;
  using Operand = __m512bh;
  static constexpr int kDepth = 2;
  static constexpr Precision kPrecision = Precision::kBF16;
  static Operand broadcast(Unit a) { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a))); }
  static Operand load_units(const Unit* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
  static Vec mac(Vec sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, a, b); }
  static Vec units_of_row(const BF16* row, int64_t n) {
    const auto mask = n >= 2 * kLanes ? ~__mmask32{0} : static_cast<__mmask32>((1u << n) - 1u);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, row));
  }
  static Vec units_of_rows(const BF16* const* rows, int64_t offset, int n) {
    const __m256i a = _mm256_maskz_loadu_epi16(first_lanes(n), rows[0] + offset);
    const __m256i b = _mm256_maskz_loadu_epi16(first_lanes(n), rows[1] + offset);
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu16_epi32(a), high));
  }
  static void store_floats(Unit* to, const float* from) {
    for (int i = 0; i < kTileKeys; i += 2 * kLanes) {
      const auto pairs = _mm512_cvtne2ps_pbh(load(from + i + kLanes), load(from + i));
      _mm512_storeu_si512(to + i / 2, reinterpret_cast<__m512i>(pairs));
    }
  }
};
#else
// Packed blocks are float32 here, yet as exact as the bfloat16 they come from.
template <>
struct Tile<BF16> : Tile<float> {
  static constexpr Precision kPrecision = Precision::kBF16;
  static Vec units_of_row(const BF16* row, int64_t n) {
    return load_lanes(row, static_cast<int>(std::min<int64_t>(n, kLanes)));
  }
  static Vec units_of_rows(const BF16* const* rows, int64_t offset, int n) { return load_lanes(rows[0] + offset, n); }
};
#endif

// `vectors` columns of vectors. B and C are aligned to nothing; `depth` counts units.
template <class T, int vectors, bool accumulate>
inline void multiply_panel(const typename Tile<T>::Unit* a, int64_t a_stride, const typename Tile<T>::Unit* b,
                           int64_t b_stride, float* c, int64_t c_stride, int64_t depth) {
  Vec sums[kTileRows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sums[r][v] = accumulate ? load(c + r * c_stride + v * kLanes) : zero();
  }
  for (int64_t k = 0; k < depth; ++k) {
    typename Tile<T>::Operand columns[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) columns[v] = Tile<T>::load_units(b + k * b_stride + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
      const auto x = Tile<T>::broadcast(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sums[r][v] = Tile<T>::mac(sums[r][v], x, columns[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
  }
}

// C [6, columns] += A [6, depth] B [depth, columns] for columns that are a multiple of kLanes.
template <class T>
struct RegisterProduct {
  using Unit = typename Tile<T>::Unit;
  static constexpr int kRows = kTileRows;
  static constexpr int kColumns = kLanes;

  template <bool accumulate>
  static void multiply(const Unit* a, int64_t a_stride, const Unit* b, int64_t b_stride, float* c, int64_t c_stride,
                       int64_t depth, int64_t columns) {
    int64_t j = 0;
    for (; j + kPanel * kLanes <= columns; j += kPanel * kLanes) {
      multiply_panel<T, kPanel, accumulate>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
    }
    const int64_t left = (columns - j) / kLanes;
    if (left == 1) multiply_panel<T, 1, accumulate>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
    if constexpr (kPanel > 2) {
      if (left == 2) multiply_panel<T, 2, accumulate>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
      if (left == 3) multiply_panel<T, 3, accumulate>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
    }
  }
};

// Rows [num_rows <= columns of `dim`] -> [units of dim][columns]: column j is row j, columns past the rows are zero.
template <class T, int columns = kTileKeys>
inline void pack_columns(const T* const* rows, int num_rows, int64_t dim, typename Tile<T>::Unit* to) {
  const int64_t num_units = (dim + Tile<T>::kDepth - 1) / Tile<T>::kDepth;
  for (int j = 0; j < columns; j += kLanes) {
    for (int64_t u = 0; u < num_units; u += kLanes) {
      Vec block[kLanes];
      const int64_t offset = u * Tile<T>::kDepth;
      for (int i = 0; i < kLanes; ++i) {
        block[i] = j + i < num_rows ? Tile<T>::units_of_row(rows[j + i] + offset, dim - offset) : zero();
      }
      transpose(block);
      for (int i = 0; i < kLanes && u + i < num_units; ++i) {
        store(reinterpret_cast<float*>(to) + (u + i) * columns + j, block[i]);
      }
    }
  }
}

// Rows [num_rows <= 64 of `dim`] -> [64 / depth of a unit][stride]: rows past them and elements past dim are zero.
template <class T>
inline void pack_rows(const T* const* rows, int num_rows, int64_t dim, const T* zeros, int64_t stride,
                      typename Tile<T>::Unit* to) {
  constexpr int depth = Tile<T>::kDepth;
  for (int j = 0; j < kTileKeys; j += depth) {
    const T* group[depth];
    for (int i = 0; i < depth; ++i) group[i] = j + i < num_rows ? rows[j + i] : zeros;
    float* line = reinterpret_cast<float*>(to) + j / depth * stride;
    for_lanes(dim, [&](int64_t i, int lanes) { store(line + i, Tile<T>::units_of_rows(group, i, lanes)); });
  }
}

}  // namespace v4flash
