// Registers the operations. One variant of the library is loaded in a process; shapes for tracing are in fakes.py.
#include <torch/library.h>

#include "ops.h"

TORCH_LIBRARY(v4flash, m) {
  m.def("add_rms_norm(Tensor(a!) residual, Tensor? delta, Tensor? delta_scales, Tensor weight, float eps) -> Tensor");
  m.def(
      "add_rms_norm_int8(Tensor(a!) residual, Tensor? delta, Tensor? delta_scales, Tensor weight, float eps)"
      " -> (Tensor, Tensor)");
  m.def("silu_mul(Tensor gate_up, Tensor? scales, ScalarType dtype) -> Tensor");
  m.def("silu_mul_int8(Tensor gate_up, Tensor? scales, int hadamard) -> (Tensor, Tensor)");
  m.def("quantise_rows(Tensor x) -> (Tensor, Tensor)");
  m.def(
      "rotary_write_kv(Tensor qkv, Tensor? scales, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) body,"
      " int num_heads, Tensor? query_norm, Tensor? key_norm, float eps) -> Tensor");
  m.def(
      "attention(Tensor query, Tensor body, Tensor query_starts, Tensor kv_lens, Tensor block_tables,"
      " Tensor shared_groups) -> Tensor");
  m.def(
      "stored_rotary_write(Tensor qkv, Tensor? scales, Tensor cos, Tensor sin, Tensor query_starts, Tensor kv_lens,"
      " Tensor block_tables, Tensor tail_slots, Tensor(a!) body, Tensor(b!)? body_scales, Tensor(c!) tail,"
      " int group_size, int num_heads, Tensor? query_norm, Tensor? key_norm, float eps) -> (Tensor, Tensor)");
  m.def(
      "stored_attention(Tensor query, Tensor exact, Tensor body, Tensor? body_scales, int group_size,"
      " Tensor query_starts, Tensor kv_lens, Tensor block_tables, Tensor shared_groups) -> Tensor");
  m.def("matvec(Tensor x, Tensor weight, Tensor? weight_scales, Tensor? x_scales) -> Tensor");
  m.def("wide_linear(Tensor x, Tensor weight) -> Tensor");
  m.def("tile_pack(Tensor weight) -> Tensor");
  m.def("tile_linear(Tensor x, Tensor packed, Tensor? bias, int num_outputs) -> Tensor");
  m.def("tile_linear_int8(Tensor x, Tensor packed, Tensor scales, Tensor zeros) -> Tensor");
  m.def("tile_gate(Tensor x, Tensor packed) -> Tensor");
  m.def(
      "tile_gate_int8(Tensor x, Tensor x_scales, Tensor packed, Tensor scales, Tensor zeros, int hadamard)"
      " -> (Tensor, Tensor)");
  m.def("use_amx(bool wanted) -> bool", v4flash::use_amx);
}

TORCH_LIBRARY_IMPL(v4flash, CPU, m) {
  m.impl("add_rms_norm", v4flash::add_rms_norm);
  m.impl("add_rms_norm_int8", v4flash::add_rms_norm_int8);
  m.impl("silu_mul", v4flash::silu_mul);
  m.impl("silu_mul_int8", v4flash::silu_mul_int8);
  m.impl("quantise_rows", v4flash::quantise_rows);
  m.impl("rotary_write_kv", v4flash::rotary_write_kv);
  m.impl("attention", v4flash::attention);
  m.impl("stored_rotary_write", v4flash::stored_rotary_write);
  m.impl("stored_attention", v4flash::stored_attention);
  m.impl("matvec", v4flash::matvec);
  m.impl("tile_pack", v4flash::tile_pack);
  m.impl("tile_linear", v4flash::tile_linear);
  m.impl("tile_linear_int8", v4flash::tile_linear_int8);
  m.impl("tile_gate", v4flash::tile_gate);
  m.impl("tile_gate_int8", v4flash::tile_gate_int8);
  m.impl("wide_linear", v4flash::wide_linear);
}
