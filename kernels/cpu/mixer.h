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
inline void check_matrix(const char* name, const Tensor& x, std::initializer_list<Size> sizes) {
  check_shape(name, x, sizes), check_type(name, x, ScalarType::Float, "float32"), check_contiguous(name, x);
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
  STD_TORCH_CHECK(x.dim() == 2, "x: got shape ", shape_text(x), ", expected 2 dimensions");
  const int64_t b = x.size(0), n = x.size(1);
  check_matrix("x", x, {b, n});
  if (y) check_matrix("y", *y, {b, n});
  NormCall c(as_heads(x, 0, 1, n), {}, {}, weight, {}, eps, false, false, false);
  float* to = (float*)x.data_ptr();
  const float* from = y ? (const float*)y->data_ptr() : nullptr;
  for (int64_t i = 0; y && i < b * n; i++) to[i] += from[i];
  return norm_rows(c);
}

// silu(first half of the columns) * second half
inline Tensor silu_product(Tensor x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x: got shape ", shape_text(x),
                  ", expected an even number of columns");
  const int64_t n = x.size(1) / 2;
  check_matrix("x", x, {x.size(0), 2 * n});
  NormCall c(as_heads(x, n, 1, n), as_token(x, 0, n), {}, {}, {}, 0, false, false, false);
  return norm_rows(c);
}

// x weight^T + bias, for a few rows of x
inline Tensor linear(Tensor x, Tensor weight, Maybe bias) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, "x, weight: got ", x.dim(), " and ", weight.dim(),
                  " dimensions, expected 2 and 2");
  const int64_t rows = x.size(0), n = weight.size(0), k = x.size(1);
  check_matrix("x", x, {rows, k}), check_matrix("weight", weight, {n, k});
  STD_TORCH_CHECK(k < 1 << 30, "x: got ", k, " columns, expected fewer than 2^30");
  const Tensor y = empty(ScalarType::Float, {rows, n});
  const Linear c{(const float*)x.data_ptr(), (const float*)weight.data_ptr(),
                 bias ? parameter("bias", *bias, {n}) : nullptr, (float*)y.data_ptr(), rows, n, k};
  constexpr int64_t kColumns = 64;  // of a task
  const auto columns = [&](int64_t first, int64_t last) {
    isa().linear(c, first * kColumns, last * kColumns < n ? last * kColumns : n);
  };
  const int64_t tasks = (n + kColumns - 1) / kColumns;
  if (rows * n * k < kMinParallelLinear) columns(0, tasks);
  else torch::stable::parallel_for(0, tasks, 1, columns);
  return y;
}

inline double log_sigmoid(double x) { return (x < 0 ? x : 0) - std::log1p(std::exp(-std::fabs(x))); }

// A layer's step between its projections. The columns of x: q (h d), k (g d), v (g e), and if they are wanted the gate
// (h e), and the forget gate and the write gate (g) before their sigmoid. decay (g,) is the log of a fixed decay. The
// other arguments are those of convolve, step and gated_norm; inputs (b, taps - 1, channels) are the convolution's last ones,
// shifted in place. With slots (b,), inputs, kv, z and positions are those of a pool, and sequence i has row slots[i] of each.
inline Tensor mixer_step(Tensor x, int64_t h, bool has_gate, bool has_forget, bool has_write, bool tied, Maybe weight,
                         Maybe bias, Maybe inputs, bool silu, Maybe decay, Tensor kv, Tensor z, Tensor positions,
                         Maybe theta, int64_t layout, int64_t feature_map, bool normalize, double eps, Maybe norm,
                         double norm_eps, bool over_heads, bool gate_first, Maybe skip, bool skip_first, Maybe slots) {
  const auto type = ScalarType::Float;
  STD_TORCH_CHECK(x.dim() == 2 && kv.dim() == 4, "x, kv: got ", x.dim(), " and ", kv.dim(),
                  " dimensions, expected 2 and 4");
  STD_TORCH_CHECK(h >= 1 && h < 1 << 16, "heads: got ", h, ", expected 1 .. 65535");
  STD_TORCH_CHECK(has_forget || !tied, "tied: got true without forget, expected false");
  STD_TORCH_CHECK(weight.has_value() == inputs.has_value(), "weight, inputs: got one of them, expected both or none");
  const int64_t b = x.size(0), g = kv.size(1), d = kv.size(2), e = kv.size(3), channels = (h + g) * d + g * e;
  const int64_t forget_at = channels + has_gate * h * e, write_at = forget_at + has_forget * g;
  check_matrix("x", x, {b, write_at + has_write * g});
  if (decay)
    check_shape("decay", *decay, {g}), check_type("decay", *decay, ScalarType::Double, "float64"),
        check_contiguous("decay", *decay);
  const double* fixed = decay ? (const double*)decay->data_ptr() : nullptr;

  const Tensor starts = slots ? positions_at(*slots, positions, b, kv.size(0)) : positions;
  const Maybe none, state = kv, sums = z, step_positions = theta ? Maybe(starts) : none;
  const Tensor mixed = weight ? empty(type, {b, channels}) : x;
  std::optional<ConvolutionCall> convolution;
  if (weight) convolution.emplace(as_token(x, 0, channels), *weight, bias, inputs, none, slots, silu);
  const Maybe q = as_heads(mixed, 0, h, d);
  const Tensor k = as_heads(mixed, h * d, g, d), v = as_heads(mixed, (h + g) * d, g, e);
  Call c = read_call({q, k, v, feature_map, none, none, theta, step_positions, none, none, none, none, none, state, sums,
                      slots, layout, true, normalize, eps, false});
  int64_t* position = advancing_positions(c, starts);
  const Tensor out = empty(type, {b, 1, h, e});
  NormCall after(out, has_gate ? Maybe(as_token(x, channels, h * e)) : none, skip ? Maybe(v) : none, norm, skip,
                 norm_eps, over_heads, gate_first, skip_first);

  // Everything is checked: from here on, the state is written
  if (convolution) convolution->y = {(char*)mixed.data_ptr(), channels, channels, 0}, run_convolve_step(*convolution);
  std::vector<double> log_decay(has_forget || fixed ? b * g : 0), factors(tied || has_write ? b * g : 0);
  for (int64_t i = 0; i < b * g; i++) {
    const float* row = (const float*)x.data_ptr() + i / g * x.stride(0) + i % g;
    const double log_gate = has_forget ? log_sigmoid(row[forget_at]) : 0;
    if (!log_decay.empty()) log_decay[i] = log_gate + (fixed ? fixed[i % g] : 0);
    if (!factors.empty()) factors[i] = has_write ? 1 / (1 + std::exp(-(double)row[write_at])) : -std::expm1(log_gate);
  }
  if (!log_decay.empty()) c.log_decay = {(const char*)log_decay.data(), kFloat64, g, g, 1, 0};
  if (!factors.empty()) c.write = {(const char*)factors.data(), kFloat64, g, g, 1, 0};
  c.out = view(out);
  run_step(c, kv, z, position);
  for (int64_t i = 0; slots && i < b; i++) ((int64_t*)positions.data_ptr())[c.slots[i]] = position[i];
  return norm_rows(after);
}

}  // namespace linrope
