// The parts of a decoding step between its matrix products, for one token of every sequence: rows of x (b, ·). They run
// the kernels of the other operators one after the other.
#pragma once
#include <cmath>

#include "operators.h"
#include "token.h"

namespace linrope {

inline Tensor reinterpret(const Tensor& x, int64_t first, std::initializer_list<int64_t> sizes,
                          std::initializer_list<int64_t> strides) {
  TensorHandle handle;
  succeed(pytorch.aoti_torch__reinterpret_tensor(x.get(), (int64_t)sizes.size(), sizes.begin(), strides.begin(),
                                                 x.storage_offset() + first, &handle),
          "view a tensor");
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
  const Tensor y = empty(kFloat32, {c.b, numbers});
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

inline void run_linear(const Linear& c, float* y) {
  if (c.k >= 1 << 30) refuse("x: got ", c.k, " columns, expected fewer than 2^30");
  constexpr int64_t kColumns = 64;  // of a task
  const int64_t tasks = (c.n + kColumns - 1) / kColumns;
  for_ranges(tasks, c.rows * c.n * c.k >= kMinParallelLinear, [&](int64_t first, int64_t last) {
    isa().linear(c, y, first * kColumns, last * kColumns < c.n ? last * kColumns : c.n);
  });
}

// x weight^T + bias, for a few rows of x
inline Tensor linear(Tensor x, Tensor weight, Maybe bias) {
  if (x.dim() != 2 || weight.dim() != 2)
    refuse("x, weight: got ", x.dim(), " and ", weight.dim(), " dimensions, expected 2 and 2");
  const int64_t rows = x.size(0), n = weight.size(0), k = x.size(1);
  const Linear c{.x = parameter("x", x, {rows, k}), .weight = parameter("weight", weight, {n, k}),
                 .bias = bias ? parameter("bias", *bias, {n}) : nullptr, .rows = rows, .n = n, .k = k, .stride = k};
  const Tensor y = empty(kFloat32, {rows, n});
  run_linear(c, (float*)y.data_ptr());
  return y;
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double log_sigmoid(double x) { return (x < 0 ? x : 0) - std::log1p(std::exp(-std::fabs(x))); }

// The factor w of a value: 1, a gate of its own, 1 - f with the forget gate f, or b of the erase gate
enum WriteFactor : int { kWriteOnes, kWriteGate, kWriteForgotten, kWriteErased };

// The columns of mixer_step's x: q (h d), k (key_heads d), v (g e), and if they are wanted the gate (out_heads e), the
// forget gate (g, or `rank` if it is per feature), the write gate (g) and the erase gate (g) before their sigmoid
struct MixerColumns {
  int64_t b, h, g, d, e;
  int64_t key_heads, out_heads;  // g, h; if there are more heads of values than of queries h, g
  // channels: of q, k and v together; gate ..: each part's first column
  int64_t channels, gate, forget, write, erase, count;
  bool per_feature;             // the forget gate
  int64_t units = 1, rank = 0;  // of a forget gate per feature
  MixerColumns(const Tensor& x, const Tensor& kv, int64_t heads, bool has_gate, bool has_forget, const Maybe& up,
               bool has_write, bool has_erase) {
    if (x.dim() != 2 || kv.dim() != 4)
      refuse("x, kv: got ", x.dim(), " and ", kv.dim(), " dimensions, expected 2 and 4");
    if (heads < 1 || heads >= 1 << 16) refuse("heads: got ", heads, ", expected 1 .. 65535");
    b = x.size(0);
    h = heads;
    g = kv.size(1);
    d = kv.size(2);
    e = kv.size(3);
    key_heads = h < g ? h : g;
    out_heads = h < g ? g : h;
    per_feature = up.has_value();
    if (per_feature) {
      if (!has_forget) refuse("up: got a tensor without forget, expected None");
      if (up->dim() != 3) refuse("up: got shape ", shape_text(*up), ", expected (g, units, rank)");
      units = up->size(1);
      rank = up->size(2);
    }
    channels = gate = (h + key_heads) * d + g * e;
    forget = gate + has_gate * out_heads * e;
    write = forget + has_forget * (per_feature ? rank : g);
    erase = write + has_write * g;
    count = erase + has_erase * g;
    parameter("x", x, {b, count});
  }
};

// The gates of a step, and what `fill` makes of their columns: log decay, write and erase factors
struct MixerGates {
  const MixerColumns& at;
  bool has_forget;
  Linear product{};  // the second one of a forget gate per feature
  double bound;
  int64_t write_factor;
  double largest;                 // of the erase gate; 0: none
  const double* fixed;            // (g): the log of a fixed decay, or null
  Maybe log_decay, write, erase;  // (b, 1, g), log_decay also (b, 1, g, units)

  MixerGates(const Tensor& x, const MixerColumns& at, bool has_forget, const Maybe& up, const Maybe& up_bias,
             double bound, int64_t write_factor, double largest, const Maybe& decay)
      : at(at), has_forget(has_forget), bound(bound), write_factor(write_factor), largest(largest),
        fixed(decay ? numbers<double>("decay", *decay, kFloat64, {at.g}) : nullptr) {
    if (up.has_value() != up_bias.has_value()) refuse("up, up_bias: got one of them, expected both or none");
    if (!(bound >= 0 && std::isfinite(bound)) || (bound > 0 && !up))
      refuse("bound: got ", bound, ", expected ", up ? "0 or a positive finite number" : "0 without up");
    if (write_factor < kWriteOnes || write_factor > kWriteErased)
      refuse("write: got ", write_factor, ", expected 0 .. ", (int)kWriteErased);
    if (write_factor == kWriteForgotten && (!has_forget || up))
      refuse("write: got 2, 1 - f, without a forget gate per head, expected 0, 1 or 3");
    if (write_factor == kWriteErased && !(largest > 0)) refuse("write: got 3, b, without erase, expected 0 .. 2");
    if (!(largest >= 0 && std::isfinite(largest)))
      refuse("erase: got ", largest, ", expected 0 without an erase gate, else the largest number of the gate");
    if (up)
      product = {.x = (const float*)x.data_ptr() + at.forget, .weight = parameter("up", *up, {at.g, at.units, at.rank}),
                 .bias = parameter("up_bias", *up_bias, {at.g, at.units}), .rows = at.b, .n = at.g * at.units,
                 .k = at.rank, .stride = at.count};
    if (up) log_decay = empty(kFloat64, {at.b, 1, at.g, at.units});
    else if (has_forget || fixed) log_decay = empty(kFloat64, {at.b, 1, at.g});
    if (largest > 0) erase = empty(kFloat64, {at.b, 1, at.g});
    if (write_factor == kWriteErased) write = erase;
    else if (write_factor != kWriteOnes) write = empty(kFloat64, {at.b, 1, at.g});
  }

  void fill(const float* x) const {
    if (at.per_feature) fill_per_feature();
    double* decays = at.per_feature ? nullptr : numbers_of(log_decay);
    double *writes = numbers_of(write), *erases = numbers_of(erase);
    for (int64_t i = 0; i < at.b * at.g; i++) {
      const float* row = x + i / at.g * at.count + i % at.g;
      const double log_gate = decays && has_forget ? log_sigmoid(row[at.forget]) : 0;
      if (decays) decays[i] = log_gate + (fixed ? fixed[i % at.g] : 0);
      if (write_factor == kWriteGate) writes[i] = sigmoid(row[at.write]);
      if (write_factor == kWriteForgotten) writes[i] = -std::expm1(log_gate);
      if (erases) erases[i] = largest * sigmoid(row[at.erase]);
    }
  }
  void fill_per_feature() const {
    std::vector<float> gates(at.b * product.n);
    run_linear(product, gates.data());
    double* to = numbers_of(log_decay);
    for (int64_t i = 0; i < at.b * at.g; i++) {
      float* head = gates.data() + i * at.units;
      isa().log_gates(head, (int)at.units, (float)bound);
      for (int64_t unit = 0; unit < at.units; unit++)
        to[i * at.units + unit] = head[unit] + (fixed ? fixed[i % at.g] : 0);
    }
  }
  static double* numbers_of(const Maybe& x) { return x ? (double*)x->data_ptr() : nullptr; }
};

// A layer's step between its projections. up (g, units, rank), up_bias (g, units) and bound are those of a forget gate
// per feature, whose first product is a part of x. write: a WriteFactor. erase: the largest number of the erase gate, or
// 0 without one; with one there is no z. decay (g,) is the log of a fixed decay. The other arguments are those of
// convolve, step and gated_norm; query_length is step's `unit`. With slots (b,), inputs, kv, z and positions are those of a
// pool, and sequence i has row slots[i] of each.
inline Tensor mixer_step(Tensor x, int64_t heads, bool has_gate, bool has_forget, Maybe up, Maybe up_bias, double bound,
                         int64_t write, double erase, Maybe weight, Maybe bias, Maybe inputs, bool silu, Maybe decay,
                         Tensor kv, Maybe z, Tensor positions, Maybe theta, int64_t layout, int64_t feature_map,
                         double query_length, bool normalize, double eps, Maybe norm, double norm_eps, bool over_heads,
                         bool gate_first, Maybe skip, bool skip_first, Maybe slots) {
  const MixerColumns at(x, kv, heads, has_gate, has_forget, up, write == kWriteGate, erase > 0);
  const MixerGates gates(x, at, has_forget, up, up_bias, bound, write, erase, decay);
  if (weight.has_value() != inputs.has_value()) refuse("weight, inputs: got one of them, expected both or none");

  const Tensor starts = slots ? positions_at(*slots, positions, at.b, kv.size(0)) : positions;
  const Tensor mixed = weight ? empty(kFloat32, {at.b, at.channels}) : x;
  std::optional<ConvolutionCall> convolution;
  if (weight) convolution.emplace(as_token(x, 0, at.channels), *weight, bias, inputs, Maybe(), slots, silu);
  Inputs step(kStep);
  step[kQ] = as_heads(mixed, 0, at.h, at.d);
  step[kK] = as_heads(mixed, at.h * at.d, at.key_heads, at.d);
  step[kV] = as_heads(mixed, (at.h + at.key_heads) * at.d, at.g, at.e);
  step[kLogDecay] = gates.log_decay;
  step[kWrite] = gates.write;
  step[kErase] = gates.erase;
  step[kKv] = kv;
  step[kZ] = z;
  step[kSlots] = slots;
  step[kTheta] = theta;
  step[kPositions] = starts;
  step.call.layout = layout;
  step.call.map = feature_map;
  step.call.query_length = query_length;
  step.call.normalize = normalize;
  step.call.eps = eps;
  Call& c = read_call(step);
  int64_t* position = advancing_positions(at.b, starts);
  const Tensor out = empty(kFloat32, {at.b, 1, at.out_heads, at.e});
  c.out = view(out);
  NormCall after(out, has_gate ? Maybe(as_token(x, at.gate, at.out_heads * at.e)) : Maybe(), skip ? step[kV] : Maybe(),
                 norm, skip, norm_eps, over_heads, gate_first, skip_first);

  // Everything is checked: from here on, the state is written
  gates.fill((const float*)x.data_ptr());
  if (convolution) {
    convolution->y = {(char*)mixed.data_ptr(), at.channels, at.channels, 0};
    run_convolve_step(*convolution);
  }
  run_step(c);
  for (int64_t i = 0; i < at.b; i++) {
    position[i]++;
    if (slots) ((int64_t*)positions.data_ptr())[c.state_row(i)] = position[i];
  }
  return norm_rows(after);
}

}  // namespace linrope
