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

// weight (c, taps), or (c, 1, taps) as in torch.nn.Conv1d
#define LINROPE_CONVOLVE(ARGUMENT)                                                                \
  ARGUMENT(Tensor, x) ARGUMENT(Tensor, weight) ARGUMENT(Maybe, bias) ARGUMENT(Maybe, before)      \
  ARGUMENT(Maybe, cu_seqlens) ARGUMENT(bool, silu)
LINROPE_RECORD(ConvolutionArguments, LINROPE_CONVOLVE)

struct ConvolutionCall : Convolution {
  std::vector<float> padded_weights;
  std::vector<int64_t> sequence_bounds;
  int64_t b;

  explicit ConvolutionCall(const ConvolutionArguments& a, const Maybe& rows = {}) : Convolution{} {
    type = tokens_type("x", a.x, 3);
    silu = a.silu;
    b = a.x.size(0);
    n = a.x.size(1);
    c = a.x.size(2);
    x = tokens("x", a.x, type, {b, n, c});
    const bool middle = a.weight.dim() == 3 && a.weight.size(1) == 1;
    const int64_t last = middle || a.weight.dim() == 2 ? a.weight.size(a.weight.dim() - 1) : 0;
    if (last < 1 || last > kMaxTaps)
      refuse("weight: got shape ", shape_text(a.weight), ", expected (c, 1 to ", kMaxTaps, " taps)");
    taps = (int)last;
    stride = whole_vectors(c);
    pad_weights(middle ? parameter("weight", a.weight, {c, 1, taps}) : parameter("weight", a.weight, {c, taps}),
                a.bias ? parameter("bias", *a.bias, {c}) : nullptr);
    sequences = b;
    if (a.cu_seqlens) {
      check_cu_seqlens(*a.cu_seqlens);
      sequence_bounds = rising_bounds(a.cu_seqlens->data_ptr(), a.cu_seqlens->type(), a.cu_seqlens->size(0), n);
      if (b != 1) refuse("cu_seqlens: got a batch of ", b, ", expected a batch of 1");
      sequences = (int64_t)sequence_bounds.size() - 1;
      bounds = sequence_bounds.data();
    }
    const int64_t count = rows ? read_slots(*rows, a.before) : sequences;
    if (a.before) before = tokens("before", *a.before, type, {count, taps - 1, c});
    if (a.before && taps == 1) before.data = nullptr;
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

inline Tensor convolve(const ConvolutionArguments& a) {
  ConvolutionCall c(a);
  Tensor y = empty(c.type, {c.b, c.n, c.c}, !c.covers_all_tokens());
  c.y = view(y);
  Tasks(c.b, c.n).run(c.c, [&](int64_t, int64_t batch, int64_t begin, int64_t end) {
    isa().convolve(c, batch, begin, end);
  });
  return y;
}

#define LINROPE_CONVOLVE_GRADIENTS(RESULT) \
  RESULT(Tensor, x) RESULT(Tensor, weight) RESULT(Maybe, bias) RESULT(Maybe, before)
LINROPE_RECORD(ConvolutionGradients, LINROPE_CONVOLVE_GRADIENTS)

inline ConvolutionGradients convolve_backward(const WithGradient<ConvolutionArguments>& arguments) {
  const ConvolutionArguments& a = arguments.call;
  ConvolutionCall c(a);
  c.dy = tokens("gradient", arguments.gradient, c.type, {c.b, c.n, c.c});
  Tensor dx = empty(c.type, {c.b, c.n, c.c}, !c.covers_all_tokens());
  const Maybe d_before = empty_if(a.before.has_value(), c.type, {c.sequences, c.taps - 1, c.c}, true);
  c.dx = view(dx);
  if (d_before && c.taps > 1) c.d_before = view(*d_before);
  const Tasks tasks(c.b, c.n);
  const int64_t size = (c.taps + 1) * c.stride;
  std::vector<float> sums(tasks.count() * size);
  tasks.run(c.c, [&](int64_t task, int64_t batch, int64_t begin, int64_t end) {
    isa().convolve_backward(c, batch, begin, end, sums.data() + task * size);
  });
  const std::vector<double> sum = total(sums, size);
  const Tensor d_weight = empty(kFloat32, {c.c, c.taps});
  const Maybe d_bias = empty_if(a.bias.has_value(), kFloat32, {c.c});
  float *to_weight = (float*)d_weight.data_ptr(), *to_bias = data_of<float>(d_bias);
  for (int64_t i = 0; i < c.c; i++)
    for (int64_t t = 0; t < c.taps; t++) to_weight[i * c.taps + t] = (float)sum[t * c.stride + i];
  for (int64_t i = 0; to_bias && i < c.c; i++) to_bias[i] = (float)sum[c.taps * c.stride + i];
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

// weight (e,) or (h, e), and with over_heads also (h e,)
#define LINROPE_GATED_NORM(ARGUMENT)                                                                               \
  ARGUMENT(Tensor, out) ARGUMENT(Maybe, weight) ARGUMENT(Maybe, gate) ARGUMENT(Maybe, v) ARGUMENT(Maybe, skip)     \
  ARGUMENT(double, eps) ARGUMENT(bool, over_heads) ARGUMENT(bool, gate_first) ARGUMENT(bool, skip_first)           \
  ARGUMENT(bool, sigmoid)
LINROPE_RECORD(NormArguments, LINROPE_GATED_NORM)

struct NormCall : Norm {
  std::vector<float> padded_weights;
  int64_t b, stride;
  bool shared = false;  // all heads have one weight of e numbers

  explicit NormCall(const NormArguments& a) : Norm{} {
    type = tokens_type("out", a.out, 4);
    if (a.out.size(2) > kMaxValues || a.out.size(3) > kMaxValues)
      refuse("out: got shape ", shape_text(a.out), ", expected fewer than 65536 heads and values");
    b = a.out.size(0);
    n = a.out.size(1);
    h = (int)a.out.size(2);
    e = (int)a.out.size(3);
    g = h ? h : 1;
    stride = whole_vectors(e);
    out = tokens("out", a.out, type, {b, n, h, e});
    if (a.gate) gate = tokens("gate", *a.gate, type, {b, n, (int64_t)h * e}, e);
    if (a.v.has_value() != a.skip.has_value()) refuse("v, skip: got one of them, expected both or none");
    if (a.v) {
      if (a.v->dim() != 4 || a.v->size(2) < 1 || h % a.v->size(2))
        refuse("v: got shape ", shape_text(*a.v), ", expected (b, n, g, e) with a divisor g of ", h);
      g = (int)a.v->size(2);
      v = tokens("v", *a.v, type, {b, n, g, e});
      skip = parameter("skip", *a.skip, {h});
    }
    over_heads = a.over_heads;
    if (a.weight) pad_weights(*a.weight);
    if (a.weight && !(a.eps > 0)) refuse("eps: got ", a.eps, ", expected a positive number");
    eps = (float)a.eps;
    gate_first = a.gate_first;
    skip_first = a.skip_first;
    sigmoid = a.sigmoid;
  }
  NormCall(const NormCall&) = delete;

  void pad_weights(const Tensor& weights) {
    const int64_t all = (int64_t)h * e;
    const bool flat = over_heads && weights.dim() == 1 && weights.size(0) == all;
    shared = weights.dim() == 1 && !flat;
    const float* from = flat     ? parameter("weight", weights, {all})
                        : shared ? parameter("weight", weights, {e})
                                 : parameter("weight", weights, {h, e});
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

inline Tensor gated_norm(const NormArguments& a) {
  NormCall c(a);
  const int64_t numbers = (int64_t)c.h * c.e;
  Tensor y = empty(c.type, {c.b, c.n, numbers});
  c.y = {(char*)y.data_ptr(), c.n * numbers, numbers, c.e};
  run_norm(c);
  return y;
}

#define LINROPE_GATED_NORM_GRADIENTS(RESULT) \
  RESULT(Tensor, out) RESULT(Maybe, weight) RESULT(Maybe, gate) RESULT(Maybe, v) RESULT(Maybe, skip)
LINROPE_RECORD(NormGradients, LINROPE_GATED_NORM_GRADIENTS)

inline NormGradients gated_norm_backward(const WithGradient<NormArguments>& arguments) {
  const NormArguments& a = arguments.call;
  NormCall c(a);
  const int64_t numbers = (int64_t)c.h * c.e;
  c.dy = tokens("gradient", arguments.gradient, c.type, {c.b, c.n, numbers}, c.e);
  const Tensor d_out = empty(c.type, {c.b, c.n, c.h, c.e});
  const Maybe d_gate = empty_if(a.gate.has_value(), c.type, {c.b, c.n, numbers});
  const Maybe d_v = empty_if(a.v.has_value(), c.type, {c.b, c.n, c.g, c.e});
  c.d_out = view(d_out);
  c.d_gate = {data_of<char>(d_gate), c.n * numbers, numbers, c.e};
  c.d_v = view_of(d_v);
  const Tasks tasks(c.b, c.n);
  const int64_t size = 2 * c.h * c.stride;
  std::vector<float> sums(tasks.count() * size);
  tasks.run(numbers, [&](int64_t task, int64_t batch, int64_t begin, int64_t end) {
    isa().norm_backward(c, batch, begin, end, sums.data() + task * size);
  });
  const std::vector<double> sum = total(sums, size);
  std::vector<double> of_weight((c.shared ? 1 : c.h) * c.e), of_skip(c.h);
  for (int64_t head = 0; head < c.h; head++)
    for (int64_t i = 0; i < c.e; i++) {
      of_weight[(c.shared ? 0 : head) * c.e + i] += sum[head * c.stride + i];
      of_skip[head] += sum[(c.h + head) * c.stride + i];
    }
  const Maybe d_weight = empty_if(a.weight.has_value(), kFloat32, {(int64_t)of_weight.size()});
  const Maybe d_skip = empty_if(a.skip.has_value(), kFloat32, {c.h});
  if (d_weight) std::copy(of_weight.begin(), of_weight.end(), data_of<float>(d_weight));
  if (d_skip) std::copy(of_skip.begin(), of_skip.end(), data_of<float>(d_skip));
  return {d_out, d_weight, d_gate, d_v, d_skip};
}

}  // namespace linrope
