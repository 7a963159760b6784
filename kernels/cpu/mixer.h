// The parts of a decoding step between its matrix products, for one token of every sequence: rows of x (b, ·). They run
// the kernels of the other operators one after the other.
#pragma once
#include <cmath>

#include "operators.h"
#include "token.h"

namespace linrope {

inline Tensor reinterpret(const Tensor& x, int64_t first, std::initializer_list<int64_t> sizes,
                          std::initializer_list<int64_t> strides) {
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), (int64_t)sizes.size(), sizes.begin(), strides.begin(),
                                                        x.storage_offset() + first, &handle));
  return Tensor(handle);
}
// The columns of x from `first` on, as (b, 1, count) and as (b, 1, heads, width)
inline Tensor as_token(const Tensor& x, int64_t first, int64_t count) {
  return reinterpret(x, first, {x.size(0), 1, count}, {x.stride(0), x.stride(0), 1});
}
inline Tensor as_heads(const Tensor& x, int64_t first, int64_t heads, int64_t width) {
  return reinterpret(x, first, {x.size(0), 1, heads, width}, {x.stride(0), x.stride(0), width, 1});
}

// The norm's result as (b, h e)
inline Tensor norm_rows(NormCall& c) {
  const int64_t numbers = (int64_t)c.h * c.e;
  const Tensor y = empty(ScalarType::Float, {c.b, numbers});
  c.y = {(char*)y.data_ptr(), numbers, numbers, c.e};
  run_norm(c);
  return y;
}

// x += y; then the RMS norm of x
inline Tensor add_norm(Tensor x, Maybe y, Tensor weight, double eps) {
  if (x.dim() != 2) refuse("x: got shape ", shape_text(x), ", expected 2 dimensions");
  const int64_t b = x.size(0), n = x.size(1);
  parameter("x", x, {b, n});
  if (y) parameter("y", *y, {b, n});
  NormCall c(as_heads(x, 0, 1, n), {}, {}, weight, {}, eps, false, false, false);
  float* to = (float*)x.data_ptr();
  const float* from = y ? (const float*)y->data_ptr() : nullptr;
  for (int64_t i = 0; y && i < b * n; i++) to[i] += from[i];
  return norm_rows(c);
}

// silu(first half of the columns) * second half
inline Tensor silu_product(Tensor x) {
  if (x.dim() != 2 || x.size(1) % 2) refuse("x: got shape ", shape_text(x), ", expected an even number of columns");
  const int64_t n = x.size(1) / 2;
  parameter("x", x, {x.size(0), 2 * n});
  NormCall c(as_heads(x, n, 1, n), as_token(x, 0, n), {}, {}, {}, 0, false, false, false);
  return norm_rows(c);
}

// x weight^T + bias, for a few rows of x
inline Tensor linear(Tensor x, Tensor weight, Maybe bias) {
  if (x.dim() != 2 || weight.dim() != 2)
    refuse("x, weight: got ", x.dim(), " and ", weight.dim(), " dimensions, expected 2 and 2");
  const int64_t rows = x.size(0), n = weight.size(0), k = x.size(1);
  const Linear c{.x = parameter("x", x, {rows, k}), .weight = parameter("weight", weight, {n, k}),
                 .bias = bias ? parameter("bias", *bias, {n}) : nullptr, .rows = rows, .n = n, .k = k};
  if (k >= 1 << 30) refuse("x: got ", k, " columns, expected fewer than 2^30");
  const Tensor y = empty(ScalarType::Float, {rows, n});
  constexpr int64_t kColumns = 64;  // of a task
  for_ranges((n + kColumns - 1) / kColumns, rows * n * k >= kMinParallelLinear, [&](int64_t first, int64_t last) {
    isa().linear(c, (float*)y.data_ptr(), first * kColumns, last * kColumns < n ? last * kColumns : n);
  });
  return y;
}

inline double log_sigmoid(double x) { return (x < 0 ? x : 0) - std::log1p(std::exp(-std::fabs(x))); }

// The columns of mixer_step's x: q (h d), k (g d), v (g e), and if they are wanted the gate (h e), and the forget gate
// and the write gate (g) before their sigmoid
struct MixerColumns {
  int64_t b, h, g, d, e;
  int64_t channels, gate, forget, write, count;  // channels: of q, k and v together; gate ..: each part's first column
  MixerColumns(const Tensor& x, const Tensor& kv, int64_t heads, bool has_gate, bool has_forget, bool has_write) {
    if (x.dim() != 2 || kv.dim() != 4)
      refuse("x, kv: got ", x.dim(), " and ", kv.dim(), " dimensions, expected 2 and 4");
    if (heads < 1 || heads >= 1 << 16) refuse("heads: got ", heads, ", expected 1 .. 65535");
    b = x.size(0);
    h = heads;
    g = kv.size(1);
    d = kv.size(2);
    e = kv.size(3);
    channels = gate = (h + g) * d + g * e;
    forget = gate + has_gate * h * e;
    write = forget + has_forget * g;
    count = write + has_write * g;
    parameter("x", x, {b, count});
  }
};

// The log decay and the write factors (b, 1, g) that the gates of a step make; empty: none
struct MixerGates {
  std::vector<double> log_decay, write;
  // fixed (g): the log of a fixed decay, or null
  MixerGates(const float* x, const MixerColumns& at, bool has_forget, bool has_write, bool tied, const double* fixed) {
    const int64_t count = at.b * at.g;
    if (has_forget || fixed) log_decay.resize(count);
    if (has_write || tied) write.resize(count);
    for (int64_t i = 0; i < count; i++) {
      const float* row = x + i / at.g * at.count + i % at.g;
      const double log_gate = has_forget ? log_sigmoid(row[at.forget]) : 0;
      if (!log_decay.empty()) log_decay[i] = log_gate + (fixed ? fixed[i % at.g] : 0);
      if (!write.empty()) write[i] = has_write ? 1 / (1 + std::exp(-(double)row[at.write])) : -std::expm1(log_gate);
    }
  }
  static View view(std::vector<double>& x, int64_t g) {
    return {x.empty() ? nullptr : (char*)x.data(), g, g, 1, 0, kFloat64};
  }
};

// A layer's step between its projections. decay (g,) is the log of a fixed decay. The other arguments are those of
// convolve, step and gated_norm. With slots (b,), inputs, kv, z and positions are those of a pool, and sequence i
// has row slots[i] of each.
inline Tensor mixer_step(Tensor x, int64_t heads, bool has_gate, bool has_forget, bool has_write, bool tied,
                         Maybe weight, Maybe bias, Maybe inputs, bool silu, Maybe decay, Tensor kv, Tensor z,
                         Tensor positions, Maybe theta, int64_t layout, int64_t feature_map, bool normalize, double eps,
                         Maybe norm, double norm_eps, bool over_heads, bool gate_first, Maybe skip, bool skip_first,
                         Maybe slots) {
  const MixerColumns at(x, kv, heads, has_gate, has_forget, has_write);
  if (tied && !has_forget) refuse("tied: got true without forget, expected false");
  if (weight.has_value() != inputs.has_value()) refuse("weight, inputs: got one of them, expected both or none");
  const double* fixed = decay ? numbers<double>("decay", *decay, kFloat64, {at.g}) : nullptr;

  const Tensor starts = slots ? positions_at(*slots, positions, at.b, kv.size(0)) : positions;
  const Tensor mixed = weight ? empty(ScalarType::Float, {at.b, at.channels}) : x;
  std::optional<ConvolutionCall> convolution;
  if (weight) convolution.emplace(as_token(x, 0, at.channels), *weight, bias, inputs, Maybe(), slots, silu);
  Inputs step(kStep);
  step[kQ] = as_heads(mixed, 0, at.h, at.d);
  step[kK] = as_heads(mixed, at.h * at.d, at.g, at.d);
  step[kV] = as_heads(mixed, (at.h + at.g) * at.d, at.g, at.e);
  step[kKv] = kv;
  step[kZ] = z;
  step[kSlots] = slots;
  step[kTheta] = theta;
  step[kPositions] = starts;
  step.call.layout = layout;
  step.call.map = feature_map;
  step.call.normalize = normalize;
  step.call.eps = eps;
  Call& c = read_call(step);
  int64_t* position = advancing_positions(at.b, starts);
  const Tensor out = empty(ScalarType::Float, {at.b, 1, at.h, at.e});
  c.out = view(out);
  NormCall after(out, has_gate ? Maybe(as_token(x, at.gate, at.h * at.e)) : Maybe(), skip ? step[kV] : Maybe(), norm,
                 skip, norm_eps, over_heads, gate_first, skip_first);

  // Everything is checked: from here on, the state is written
  if (convolution) {
    convolution->y = {(char*)mixed.data_ptr(), at.channels, at.channels, 0};
    run_convolve_step(*convolution);
  }
  MixerGates gates((const float*)x.data_ptr(), at, has_forget, has_write, tied, fixed);
  c.log_decay = MixerGates::view(gates.log_decay, at.g);
  c.write = MixerGates::view(gates.write, at.g);
  run_step(c);
  for (int64_t i = 0; i < at.b; i++) {
    position[i]++;
    if (slots) ((int64_t*)positions.data_ptr())[c.state_row(i)] = position[i];
  }
  return norm_rows(after);
}

}  // namespace linrope
