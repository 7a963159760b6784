// The convolution before linear_rope_attention and the gated norm after it: checks, padded parameters, tasks of
// consecutive tokens, sums over the tasks.
#pragma once
#include <algorithm>

#include "checks.h"
#include "parallel.h"

namespace linrope {

// Tokens per task at most: a row's last part, and short rows taken together, may have fewer. It fixes which sums a
// gradient of a parameter consists of, so the bits do not depend on the number of threads.
constexpr int64_t kTaskTokens = 128;

struct Tasks {
  int64_t b, n, rows, parts;  // a task has `rows` rows of the batch, or one of `parts` parts of a row
  Tasks(int64_t b, int64_t n)
      : b(b), n(n), rows(n >= kTaskTokens ? 1 : kTaskTokens / (n ? n : 1)),
        parts((n + kTaskTokens - 1) / kTaskTokens) {}
  int64_t count() const { return n ? (b + rows - 1) / rows * parts : 0; }

  // Calls f(task, batch, begin, end) for all tokens, in parallel if a token's `numbers` make that worthwhile
  template <class F> void run(int64_t numbers, F f) const {
    const auto range = [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; task++) {
        const int64_t row = task / parts * rows, begin = task % parts * kTaskTokens;
        const int64_t end = begin + kTaskTokens < n ? begin + kTaskTokens : n;
        for (int64_t batch = row; batch < row + rows && batch < b; batch++) f(task, batch, begin, end);
      }
    };
    for_ranges(count(), b * n * numbers >= kMinParallel, range);
  }
};

// The sums of all tasks, `size` numbers each, added in the order of the tasks
inline std::vector<double> total(const std::vector<float>& sums, size_t size) {
  std::vector<double> result(size);
  for (size_t first = 0; first < sums.size(); first += size)
    for (size_t i = 0; i < size; i++) result[i] += sums[first + i];
  return result;
}

inline int tokens_type(const char* name, const Tensor& x, int64_t dims) {
  if (x.dim() != dims) refuse(name, ": got shape ", shape_text(x), ", expected ", dims, " dimensions");
  check_types(name, x.type(), 1u << kFloat32 | 1u << kBFloat16 | 1u << kFloat16);
  return x.type();
}

// A tensor whose rows are read in place; `head` is the stride of heads, if the last dimension holds them
inline View tokens(const char* name, const Tensor& x, int type, std::initializer_list<int64_t> sizes,
                   int64_t head = 0) {
  check_shape(name, x, sizes);
  require(x.type() == type, name, ": got another dtype, expected that of the first argument");
  check_last_stride(name, x);
  return {(char*)x.data_ptr(), x.stride(0), x.stride(1), x.dim() == 4 ? x.stride(2) : head, 1, type};
}

inline const float* parameter(const char* name, const Tensor& x, std::initializer_list<int64_t> sizes) {
  return numbers<float>(name, x, kFloat32, sizes);
}

inline int64_t whole_vectors(int64_t count) { return (count + isa().lanes - 1) / isa().lanes * isa().lanes; }

struct ConvolutionCall : Convolution {
  std::vector<float> padded_weights;
  std::vector<int64_t> sequence_bounds;
  int64_t b;

  ConvolutionCall(const Tensor& tokens_in, const Tensor& taps_in, const Maybe& bias, const Maybe& inputs,
                  const Maybe& cu_seqlens, const Maybe& rows, bool with_silu)
      : Convolution{} {
    type = tokens_type("x", tokens_in, 3);
    silu = with_silu;
    b = tokens_in.size(0);
    n = tokens_in.size(1);
    c = tokens_in.size(2);
    x = tokens("x", tokens_in, type, {b, n, c});
    if (taps_in.dim() != 2 || taps_in.size(1) < 1 || taps_in.size(1) > kMaxTaps)
      refuse("weight: got shape ", shape_text(taps_in), ", expected (c, 1 to ", kMaxTaps, " taps)");
    taps = (int)taps_in.size(1);
    stride = whole_vectors(c);
    pad_weights(parameter("weight", taps_in, {c, taps}), bias ? parameter("bias", *bias, {c}) : nullptr);
    sequences = b;
    if (cu_seqlens) {
      check_cu_seqlens(*cu_seqlens);
      sequence_bounds = rising_bounds(cu_seqlens->data_ptr(), cu_seqlens->type(), cu_seqlens->size(0), n);
      if (b != 1) refuse("cu_seqlens: got a batch of ", b, ", expected a batch of 1");
      sequences = (int64_t)sequence_bounds.size() - 1;
      bounds = sequence_bounds.data();
    }
    const int64_t count = rows ? read_slots(*rows, inputs) : sequences;
    if (inputs) before = tokens("before", *inputs, type, {count, taps - 1, c});
    if (inputs && taps == 1) before.data = nullptr;
  }
  ConvolutionCall(const ConvolutionCall&) = delete;

  // Returns the number of the pool's rows
  int64_t read_slots(const Tensor& rows, const Maybe& inputs) {
    slots = numbers<int64_t>("slots", rows, kInt64, {sequences});
    if (!inputs || inputs->dim() != 3)
      refuse("slots: got a tensor without inputs, expected a pool's inputs with it");
    const int64_t count = inputs->size(0);
    for (int64_t i = 0; i < sequences; i++)
      if (slots[i] < 0 || slots[i] >= count) refuse("slots: got ", slots[i], ", expected 0 .. ", count - 1);
    return count;
  }
  void pad_weights(const float* from, const float* bias) {
    padded_weights.resize((taps + 1) * stride);
    weight = padded_weights.data();
    for (int64_t t = 0; t < taps; t++)
      for (int64_t i = 0; i < c; i++) padded_weights[t * stride + i] = from[i * taps + t];
    if (bias) memcpy(padded_weights.data() + taps * stride, bias, 4 * c);
  }
  bool covers_all_tokens() const { return !bounds || (bounds[0] == 0 && bounds[sequences] == n); }
};

inline Tensor convolve(Tensor x, Tensor weight, Maybe bias, Maybe before, Maybe cu_seqlens, bool silu) {
  ConvolutionCall c(x, weight, bias, before, cu_seqlens, {}, silu);
  Tensor y = empty(x.type(), {c.b, c.n, c.c}, !c.covers_all_tokens());
  c.y = view(y);
  Tasks(c.b, c.n).run(c.c, [&](int64_t, int64_t batch, int64_t begin, int64_t end) {
    isa().convolve(c, batch, begin, end);
  });
  return y;
}

// dx, d_weight, d_bias, d_before
inline std::tuple<Tensor, Tensor, Tensor, Tensor> convolve_backward(Tensor gradient, Tensor x, Tensor weight,
                                                                    Maybe bias, Maybe before, Maybe cu_seqlens,
                                                                    bool silu) {
  ConvolutionCall c(x, weight, bias, before, cu_seqlens, {}, silu);
  const auto type = x.type();
  c.dy = tokens("gradient", gradient, c.type, {c.b, c.n, c.c});
  Tensor dx = empty(type, {c.b, c.n, c.c}, !c.covers_all_tokens());
  Tensor d_before = before ? empty(type, {c.sequences, c.taps - 1, c.c}, true) : empty(type, {0});
  c.dx = view(dx);
  if (before && c.taps > 1) c.d_before = view(d_before);
  const Tasks tasks(c.b, c.n);
  const int64_t size = (c.taps + 1) * c.stride;
  std::vector<float> sums(tasks.count() * size);
  tasks.run(c.c, [&](int64_t task, int64_t batch, int64_t begin, int64_t end) {
    isa().convolve_backward(c, batch, begin, end, sums.data() + task * size);
  });
  const std::vector<double> sum = total(sums, size);
  Tensor d_weight = empty(kFloat32, {c.c, c.taps}), d_bias = empty(kFloat32, {bias ? c.c : 0});
  float *to_weight = (float*)d_weight.data_ptr(), *to_bias = (float*)d_bias.data_ptr();
  for (int64_t i = 0; i < c.c; i++)
    for (int64_t t = 0; t < c.taps; t++) to_weight[i * c.taps + t] = (float)sum[t * c.stride + i];
  for (int64_t i = 0; bias && i < c.c; i++) to_bias[i] = (float)sum[c.taps * c.stride + i];
  return {dx, d_weight, d_bias, d_before};
}

// One token of each sequence into c.y. Its inputs are shifted in place.
inline void run_convolve_step(const ConvolutionCall& c) {
  const int64_t size = c.type == kFloat32 ? 4 : 2, width = c.taps - 1;
  Tasks(c.b, 1).run(c.c, [&](int64_t, int64_t batch, int64_t, int64_t) {
    isa().convolve(c, batch, 0, 1);
    char* row = c.before.data + (c.slots ? c.slots[batch] : batch) * c.before.batch * size;
    for (int64_t i = 0; i < width; i++)
      memcpy(row + i * c.before.token * size,
             i + 1 < width ? row + (i + 1) * c.before.token * size : c.x.data + batch * c.x.batch * size, c.c * size);
  });
}

struct NormCall : Norm {
  std::vector<float> padded_weights;
  int64_t b, stride;

  NormCall(const Tensor& x, const Maybe& z, const Maybe& values, const Maybe& weights, const Maybe& skips,
           double epsilon, bool all_heads, bool z_first, bool values_first, bool with_sigmoid = false)
      : Norm{} {
    type = tokens_type("out", x, 4);
    if (x.size(2) >= 1 << 16 || x.size(3) >= 1 << 16)
      refuse("out: got shape ", shape_text(x), ", expected fewer than 65536 heads and values");
    b = x.size(0);
    n = x.size(1);
    h = (int)x.size(2);
    e = (int)x.size(3);
    g = h ? h : 1;
    stride = whole_vectors(e);
    out = tokens("out", x, type, {b, n, h, e});
    if (z) gate = tokens("gate", *z, type, {b, n, (int64_t)h * e}, e);
    if (values.has_value() != skips.has_value()) refuse("v, skip: got one of them, expected both or none");
    if (values) {
      if (values->dim() != 4 || values->size(2) < 1 || h % values->size(2))
        refuse("v: got shape ", shape_text(*values), ", expected (b, n, g, e) with a divisor g of ", h);
      g = (int)values->size(2);
      v = tokens("v", *values, type, {b, n, g, e});
      skip = parameter("skip", *skips, {h});
    }
    if (weights) pad_weights(*weights);
    if (weights && !(epsilon > 0)) refuse("eps: got ", epsilon, ", expected a positive number");
    eps = (float)epsilon;
    over_heads = all_heads;
    gate_first = z_first;
    skip_first = values_first;
    sigmoid = with_sigmoid;
  }
  NormCall(const NormCall&) = delete;

  void pad_weights(const Tensor& weights) {
    const bool shared = weights.dim() == 1;  // by all heads
    const float* from = shared ? parameter("weight", weights, {e}) : parameter("weight", weights, {h, e});
    padded_weights.resize(h * stride);
    for (int64_t head = 0; head < h; head++)
      memcpy(padded_weights.data() + head * stride, from + (shared ? 0 : head * e), 4 * e);
    weight = padded_weights.data();
  }
};

inline void run_norm(const NormCall& c) {
  Tasks(c.b, c.n).run((int64_t)c.h * c.e, [&](int64_t, int64_t batch, int64_t begin, int64_t end) {
    isa().norm(c, batch, begin, end);
  });
}

inline Tensor gated_norm(Tensor out, Maybe gate, Maybe v, Maybe weight, Maybe skip, double eps, bool over_heads,
                         bool gate_first, bool skip_first, bool sigmoid) {
  NormCall c(out, gate, v, weight, skip, eps, over_heads, gate_first, skip_first, sigmoid);
  const int64_t numbers = (int64_t)c.h * c.e;
  Tensor y = empty(out.type(), {c.b, c.n, numbers});
  c.y = {(char*)y.data_ptr(), c.n * numbers, numbers, c.e};
  run_norm(c);
  return y;
}

// d_out, d_gate, d_v, d_weight, d_skip
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_norm_backward(
    Tensor gradient, Tensor out, Maybe gate, Maybe v, Maybe weight, Maybe skip, double eps, bool over_heads,
    bool gate_first, bool skip_first, bool sigmoid) {
  NormCall c(out, gate, v, weight, skip, eps, over_heads, gate_first, skip_first, sigmoid);
  const auto type = out.type();
  const int64_t numbers = (int64_t)c.h * c.e;
  c.dy = tokens("gradient", gradient, c.type, {c.b, c.n, numbers}, c.e);
  Tensor d_out = empty(type, {c.b, c.n, c.h, c.e});
  Tensor d_gate = gate ? empty(type, {c.b, c.n, numbers}) : empty(type, {0});
  Tensor d_v = v ? empty(type, {c.b, c.n, c.g, c.e}) : empty(type, {0});
  c.d_out = view(d_out);
  c.d_gate = {(char*)d_gate.data_ptr(), c.n * numbers, numbers, c.e};
  if (v) c.d_v = view(d_v);
  const Tasks tasks(c.b, c.n);
  const int64_t size = 2 * c.h * c.stride;
  std::vector<float> sums(tasks.count() * size);
  tasks.run(numbers, [&](int64_t task, int64_t batch, int64_t begin, int64_t end) {
    isa().norm_backward(c, batch, begin, end, sums.data() + task * size);
  });
  const std::vector<double> sum = total(sums, size);
  const bool shared = weight && weight->dim() == 1;  // by all heads
  std::vector<double> of_weight((weight ? shared ? 1 : c.h : 0) * c.e), of_skip(skip ? c.h : 0);
  for (int64_t head = 0; head < c.h; head++)
    for (int64_t i = 0; i < c.e; i++) {
      if (weight) of_weight[(shared ? 0 : head) * c.e + i] += sum[head * c.stride + i];
      if (skip) of_skip[head] += sum[(c.h + head) * c.stride + i];
    }
  Tensor d_weight = empty(kFloat32, {(int64_t)of_weight.size()});
  Tensor d_skip = empty(kFloat32, {(int64_t)of_skip.size()});
  std::copy(of_weight.begin(), of_weight.end(), (float*)d_weight.data_ptr());
  std::copy(of_skip.begin(), of_skip.end(), (float*)d_skip.data_ptr());
  return {d_out, d_gate, d_v, d_weight, d_skip};
}

}  // namespace linrope
