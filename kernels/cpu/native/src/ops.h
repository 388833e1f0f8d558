// All operations, as `library.cpp` registers them. Shape letters are those of kernels/api.py.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace v4flash {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor add_rms_norm(Tensor& residual, const OptionalTensor& delta, const OptionalTensor& delta_scales,
                    const Tensor& weight, double eps);
std::tuple<Tensor, Tensor> add_rms_norm_int8(Tensor& residual, const OptionalTensor& delta,
                                             const OptionalTensor& delta_scales, const Tensor& weight, double eps);
Tensor silu_mul(const Tensor& gate_up, const OptionalTensor& scales, at::ScalarType dtype);
std::tuple<Tensor, Tensor> quantise_rows(const Tensor& x, int64_t hadamard);
Tensor rotary_write_kv(const Tensor& qkv, const OptionalTensor& scales, const Tensor& cos, const Tensor& sin,
                       const Tensor& slots, Tensor& body, int64_t num_heads, const OptionalTensor& query_norm,
                       const OptionalTensor& key_norm, double eps);
Tensor attention(const Tensor& query, const Tensor& body, const Tensor& query_starts, const Tensor& kv_lens,
                 const Tensor& block_tables, const Tensor& shared_groups, const OptionalTensor& exact,
                 const OptionalTensor& body_scales, int64_t group_size);
Tensor matvec(const Tensor& x, const Tensor& weight, const OptionalTensor& weight_scales,
              const OptionalTensor& x_scales);
std::tuple<Tensor, Tensor> stored_rotary_write(const Tensor& qkv, const OptionalTensor& scales, const Tensor& cos,
                                               const Tensor& sin, const Tensor& query_starts, const Tensor& kv_lens,
                                               const Tensor& block_tables, const Tensor& tail_slots, Tensor& body,
                                               const OptionalTensor& body_scales, Tensor& tail, int64_t group_size,
                                               int64_t num_heads, const OptionalTensor& query_norm,
                                               const OptionalTensor& key_norm, double eps);
// Whether products are made by tiles from now on: if wanted and the system grants it. The CPU must have them.
bool use_amx(bool wanted);

Tensor tile_pack(const Tensor& weight);
void tile_linear(const Tensor& x, const Tensor& packed, const OptionalTensor& bias, Tensor& out);
void tile_linear_int8(const Tensor& x, const Tensor& packed, const Tensor& scales, const Tensor& zeros, Tensor& out);
Tensor tile_gate(const Tensor& x, const Tensor& packed);
std::tuple<Tensor, Tensor> tile_gate_int8(const Tensor& x, const Tensor& x_scales, const Tensor& packed,
                                          const Tensor& scales, const Tensor& zeros, int64_t hadamard);
std::tuple<Tensor, Tensor> tile_best(const Tensor& x, const Tensor& packed, int64_t num_outputs);
Tensor wide_linear(const Tensor& x, const Tensor& weight);
std::tuple<Tensor, Tensor> wide_best(const Tensor& x, const Tensor& weight);

}  // namespace v4flash
