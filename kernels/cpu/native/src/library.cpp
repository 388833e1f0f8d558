// Registers the operations. One variant of the library is loaded in a process; shapes for tracing are in fakes.py.
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY(v4flash, m) {
  const auto define = [&](const char* schema, auto* operation) {
    m.def(schema, torch::dispatch(c10::kCPU, operation));
  };
  define("add_rms_norm(Tensor(a!) residual, Tensor? delta, Tensor? delta_scales, Tensor weight, float eps) -> Tensor",
         v4flash::add_rms_norm);
  define(
      "add_rms_norm_int8(Tensor(a!) residual, Tensor? delta, Tensor? delta_scales, Tensor weight, float eps)"
      " -> (Tensor, Tensor)",
      v4flash::add_rms_norm_int8);
  define("silu_mul(Tensor gate_up, Tensor? scales, ScalarType dtype) -> Tensor", v4flash::silu_mul);
  define("quantise_rows(Tensor x, int hadamard=0) -> (Tensor, Tensor)", v4flash::quantise_rows);
  define(
      "rotary_write_kv(Tensor qkv, Tensor? scales, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) body,"
      " int num_heads, Tensor? query_norm, Tensor? key_norm, float eps) -> Tensor",
      v4flash::rotary_write_kv);
  define(
      "stored_rotary_write(Tensor qkv, Tensor? scales, Tensor cos, Tensor sin, Tensor query_starts, Tensor kv_lens,"
      " Tensor block_tables, Tensor tail_slots, Tensor(a!) body, Tensor(b!)? body_scales, Tensor(c!) tail,"
      " int group_size, int num_heads, Tensor? query_norm, Tensor? key_norm, float eps) -> (Tensor, Tensor)",
      v4flash::stored_rotary_write);
  define(
      "attention(Tensor query, Tensor body, Tensor query_starts, Tensor kv_lens, Tensor block_tables,"
      " Tensor shared_groups, Tensor? exact=None, Tensor? body_scales=None, int group_size=64) -> Tensor",
      v4flash::attention);
  define("matvec(Tensor x, Tensor weight, Tensor? weight_scales, Tensor? x_scales) -> Tensor", v4flash::matvec);
  define("wide_linear(Tensor x, Tensor weight) -> Tensor", v4flash::wide_linear);
  define("wide_best(Tensor x, Tensor weight) -> (Tensor, Tensor)", v4flash::wide_best);
  define("tile_pack(Tensor weight) -> Tensor", v4flash::tile_pack);
  define("tile_linear(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) out) -> ()", v4flash::tile_linear);
  define("tile_linear_int8(Tensor x, Tensor packed, Tensor scales, Tensor zeros, Tensor(a!) out) -> ()",
         v4flash::tile_linear_int8);
  define("tile_best(Tensor x, Tensor packed, int num_outputs) -> (Tensor, Tensor)", v4flash::tile_best);
  define("tile_gate(Tensor x, Tensor packed) -> Tensor", v4flash::tile_gate);
  define(
      "tile_gate_int8(Tensor x, Tensor x_scales, Tensor packed, Tensor scales, Tensor zeros, int hadamard)"
      " -> (Tensor, Tensor)",
      v4flash::tile_gate_int8);
  m.def("use_amx(bool wanted) -> bool", v4flash::use_amx);
}
