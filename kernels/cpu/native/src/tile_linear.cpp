// Linears by the tile unit (AMX) over weights packed into tiles in the order in which they are multiplied: one layout
// serves one row and thousands, and is read as one stream. While two columns of tiles are multiplied the next two come.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "amx.h"
#include "checks.h"
#include "ops.h"
#include "parallel.h"

namespace v4flash {
namespace {

constexpr int64_t kTileBytes = 1024, kLineBytes = 64;
constexpr int64_t kUnitBytes = 4;        // neighbours in depth that one lane multiplies
constexpr int64_t kTileOutputs = 16;
constexpr int64_t kOutputs = 32;         // of two columns of tiles: a *strip*, what a thread works on
constexpr int64_t kGroupRows = 32;       // rows that are multiplied at a time
constexpr int64_t kBlockRows = 512;      // rows that stay in the nearer cache while all strips pass by

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

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
    _tile_loadconfig(&config);
  }

  // products [rows][kOutputs] = rows of `steps` lines times a strip; fetch() is called before each step.
  template <class Fetch>
  void multiply(const char* x, int64_t x_bytes, const char* strip, int64_t steps, void* products, Fetch fetch) const {
    rows_ > 16 ? run<true>(x, x_bytes, strip, steps, products, fetch)
               : run<false>(x, x_bytes, strip, steps, products, fetch);
  }

 private:
  // Rows are loaded past the nearest cache, which the strip fills.
  template <bool has_lower, class Fetch>
  static void run(const char* x, int64_t x_bytes, const char* strip, int64_t steps, void* products, Fetch fetch) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; ++k, x += kLineBytes, strip += 2 * kTileBytes) {
      fetch();
      _tile_stream_loadd(4, x, x_bytes);
      _tile_loadd(6, strip, kLineBytes);
      _tile_loadd(7, strip + kTileBytes, kLineBytes);
      if constexpr (has_lower) _tile_stream_loadd(5, x + 16 * x_bytes, x_bytes);
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
    char* to = static_cast<char*>(products);
    constexpr int64_t stride = kOutputs * kUnitBytes;
    _tile_stored(0, to, stride);
    _tile_stored(1, to + kLineBytes, stride);
    if constexpr (has_lower) {
      _tile_stored(2, to + 16 * stride, stride);
      _tile_stored(3, to + 16 * stride + kLineBytes, stride);
    }
  }

  int64_t rows_ = 0;
};

// finish(row, output, product lanes, lanes) for all rows and outputs, kLanes outputs at a time.
template <bool is_int8, class Finish>
void multiply(const Tensor& x, const Tensor& packed, int64_t num_outputs, Finish finish) {
  const int64_t num_rows = x.size(0), x_bytes = x.size(1) * x.element_size(), num_strips = packed.size(0);
  const int64_t steps = x_bytes / kLineBytes, strip_bytes = 2 * kTileBytes * steps;
  const char* const rows = static_cast<const char*>(x.const_data_ptr());
  const char* const strips = static_cast<const char*>(packed.const_data_ptr());
  const int64_t num_tasks = pieces(num_rows, kBlockRows) * num_strips;
  for_workers(num_tasks, [&](auto each_task) {
    TileGroup<is_int8> group;
    alignas(64) int32_t products[kGroupRows * kOutputs];
    each_task([&](int64_t task, int64_t next_task) {
      const int64_t strip = task % num_strips, begin = task / num_strips * kBlockRows;
      const int64_t end = std::min(begin + kBlockRows, num_rows);
      const char* coming = strips + next_task % num_strips * strip_bytes;
      const char* const last = next_task < num_tasks ? coming + strip_bytes : coming;
      const int64_t at_once = pieces(2 * kTileBytes, pieces(end - begin, kGroupRows) * kLineBytes) * kLineBytes;
      const auto fetch = [&] {
        for (const char* stop = std::min(coming + at_once, last); coming < stop; coming += kLineBytes) {
          _mm_prefetch(coming, _MM_HINT_T1);
        }
      };
      for (int64_t t = begin; t < end; t += kGroupRows) {
        const int64_t count = std::min(kGroupRows, end - t);
        group.set_rows(count);
        group.multiply(rows + t * x_bytes, x_bytes, strips + strip * strip_bytes, steps, products, fetch);
        for (int64_t i = 0; i < kOutputs; i += kLanes) {
          const int64_t output = strip * kOutputs + i;
          const auto lanes = static_cast<int>(std::clamp<int64_t>(num_outputs - output, 0, kLanes));
          for (int64_t r = 0; lanes > 0 && r < count; ++r) finish(t + r, output, products + r * kOutputs + i, lanes);
        }
      }
    });
  });
}
#endif

// Rows as they are, or with zeros behind them where they do not fill whole lines.
Tensor whole_lines(const Tensor& x, int64_t width) {
  if (x.size(1) == width) return x;
  Tensor out = at::zeros({x.size(0), width}, x.options());
  out.narrow(1, 0, x.size(1)).copy_(x);
  return out;
}

Tensor checked_rows(const Tensor& x, const Tensor& packed, int64_t num_outputs, at::ScalarType rows,
                    at::ScalarType weights) {
  check_rows(x, 2, "x");
  check_rows(packed, 4, "packed");
  TORCH_CHECK(x.scalar_type() == rows && packed.scalar_type() == weights, "x and packed must be ", rows, " and ",
              weights, ", not ", x.scalar_type(), " and ", packed.scalar_type());
  const int64_t line = kLineBytes / x.element_size();
  TORCH_CHECK(packed.size(0) == pieces(num_outputs, kOutputs) && packed.size(1) == pieces(x.size(1), line),
              "packed is no weight of ", num_outputs, " outputs over ", x.size(1));
#if defined(__AMX_BF16__)
  TORCH_CHECK(amx_in_use(), "the tile unit is not in use");
#else
  TORCH_CHECK(false, "this variant has no tiles");
#endif
  return whole_lines(x, packed.size(1) * line);
}

}  // namespace

Tensor tile_pack(const Tensor& weight) {
  check_rows(weight, 2, "weight");
  TORCH_CHECK(weight.scalar_type() == at::kChar || weight.scalar_type() == at::kBFloat16,
              "weight must be int8 or bfloat16, not ", weight.scalar_type());
  const int64_t num_outputs = weight.size(0), bytes = weight.size(1) * weight.element_size();
  const int64_t num_strips = pieces(num_outputs, kOutputs), steps = pieces(bytes, kLineBytes);
  Tensor out = at::zeros({num_strips, steps, 2, kTileBytes / weight.element_size()}, weight.options());
  const char* from = static_cast<const char*>(weight.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for_rows(num_strips, kOutputs * bytes, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin * kOutputs; o < std::min(end * kOutputs, num_outputs); ++o) {
      for (int64_t b = 0; b < bytes; b += kUnitBytes) {  // line of a tile: a unit of each of its outputs
        const int64_t tile = (o / kOutputs * steps + b / kLineBytes) * 2 + o % kOutputs / kTileOutputs;
        const int64_t line = b % kLineBytes / kUnitBytes;
        char* unit = to + tile * kTileBytes + line * kLineBytes + o % kTileOutputs * kUnitBytes;
        std::copy_n(from + o * bytes + b, std::min(kUnitBytes, bytes - b), unit);
      }
    }
  });
  return out;
}

Tensor tile_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, int64_t num_outputs) {
  const Tensor rows = checked_rows(x, packed, num_outputs, at::kBFloat16, at::kBFloat16);
  if (bias) check_vector(*bias, at::kBFloat16, num_outputs, "bias");
  Tensor out = at::empty({x.size(0), num_outputs}, x.options());
#if defined(__AMX_BF16__)
  BF16* to = out.mutable_data_ptr<BF16>();
  const BF16* added = bias ? bias->const_data_ptr<BF16>() : nullptr;
  multiply<false>(rows, packed, num_outputs, [=](int64_t t, int64_t o, const int32_t* products, int lanes) {
    const Vec x = load(reinterpret_cast<const float*>(products));
    store_lanes(to + t * num_outputs + o, added ? x + load_lanes(added + o, lanes) : x, lanes);
  });
#endif
  return out;
}

Tensor tile_linear_int8(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& zeros) {
  const int64_t num_outputs = scales.numel();
  const Tensor rows = checked_rows(x, packed, num_outputs, at::kByte, at::kChar);
  check_vector(scales, at::kFloat, num_outputs, "scales");
  check_vector(zeros, at::kInt, num_outputs, "zeros");
  Tensor out = at::empty({x.size(0), num_outputs}, x.options().dtype(at::kFloat));
#if defined(__AMX_INT8__)
  float* to = out.mutable_data_ptr<float>();
  const float* scale = scales.const_data_ptr<float>();
  const int32_t* zero = zeros.const_data_ptr<int32_t>();
  multiply<true>(rows, packed, num_outputs, [=](int64_t t, int64_t o, const int32_t* products, int lanes) {
    const __m512i exact = _mm512_sub_epi32(_mm512_load_si512(products), _mm512_maskz_loadu_epi32(first_lanes(lanes), zero + o));
    store_lanes(to + t * num_outputs + o, _mm512_cvtepi32_ps(exact) * load_lanes(scale + o, lanes), lanes);
  });
#endif
  return out;
}

}  // namespace v4flash
