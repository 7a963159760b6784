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

#define LINROPE_ADD_NORM(ARGUMENT) \
  ARGUMENT(Written, x) ARGUMENT(Maybe, y) ARGUMENT(Tensor, weight) ARGUMENT(double, eps)
LINROPE_RECORD(AddNormArguments, LINROPE_ADD_NORM)

// x += y; then the RMS norm of x
inline Tensor add_norm(const AddNormArguments& a) {
  const Tensor& x = a.x;
  const Maybe& y = a.y;
  if (x.dim() != 2) refuse("x: got shape ", shape_text(x), ", expected 2 dimensions");
  const int64_t b = x.size(0), n = x.size(1);
  parameter("x", x, {b, n});
  if (y) parameter("y", *y, {b, n});
  NormCall c({.out = as_heads(x, 0, 1, n), .weight = a.weight, .eps = a.eps});
  float* to = (float*)x.data_ptr();
  const float* from = y ? (const float*)y->data_ptr() : nullptr;
  for (int64_t i = 0; y && i < b * n; i++) to[i] += from[i];
  return norm_rows(c);
}

struct Product {  // c into y
  Linear c;
  float* y;
};
// All products at once: together they are cut into tasks of a few columns
inline void run_products(std::span<const Product> products) {
  constexpr int64_t kColumns = 64;
  const auto tasks_of = [](const Linear& c) { return (c.n + kColumns - 1) / kColumns; };
  int64_t tasks = 0, work = 0;
  for (const auto& [c, y] : products) {
    if (c.k >= 1 << 30) refuse("x: got ", c.k, " columns, expected fewer than 2^30");
    tasks += tasks_of(c);
    work += c.rows * c.n * c.k;
  }
  for_ranges(tasks, work >= kMinParallelLinear, [&](int64_t first, int64_t last) {
    for (const auto& [c, y] : products) {
      const int64_t count = tasks_of(c), begin = first > 0 ? first : 0, end = last < count ? last : count;
      if (begin < end) isa().linear(c, y, begin * kColumns, end * kColumns < c.n ? end * kColumns : c.n);
      first -= count;
      last -= count;
    }
  });
}
inline void run_product(const Linear& c, float* y) {
  const Product one[] = {{c, y}};
  run_products(one);
}

// The product of rows of k numbers, which are `stride` numbers apart
inline Linear linear_of(const float* x, int64_t rows, int64_t k, int64_t stride, const char* name, const Tensor& weight,
                        const char* bias_name, const Maybe& bias, int64_t n) {
  return {.x = x, .weight = parameter(name, weight, {n, k}), .bias = bias ? parameter(bias_name, *bias, {n}) : nullptr,
          .rows = rows, .n = n, .k = k, .stride = stride, .y_stride = n};
}
inline int64_t first_size(const Tensor& x) { return x.dim() ? x.size(0) : 0; }
// The numbers of x (b, k)
inline const float* read_rows(const Tensor& x) {
  if (x.dim() != 2) refuse("x: got shape ", shape_text(x), ", expected 2 dimensions");
  return parameter("x", x, {x.size(0), x.size(1)});
}

#define LINROPE_LINEAR(ARGUMENT) ARGUMENT(Tensor, x) ARGUMENT(Tensor, weight) ARGUMENT(Maybe, bias)
LINROPE_RECORD(LinearArguments, LINROPE_LINEAR)

// x weight^T + bias, for a few rows of x
inline Tensor linear(const LinearArguments& a) {
  const float* rows = read_rows(a.x);
  const int64_t b = a.x.size(0), k = a.x.size(1), n = first_size(a.weight);
  const Linear c = linear_of(rows, b, k, k, "weight", a.weight, "bias", a.bias, n);
  const Tensor y = empty(kFloat32, {b, n});
  run_product(c, (float*)y.data_ptr());
  return y;
}

#define LINROPE_SWIGLU(ARGUMENT)                                                                       \
  ARGUMENT(Tensor, x) ARGUMENT(Tensor, w1) ARGUMENT(Maybe, bias1) ARGUMENT(Tensor, w3)                 \
  ARGUMENT(Maybe, bias3) ARGUMENT(Tensor, w2) ARGUMENT(Maybe, bias2)
LINROPE_RECORD(SwigluArguments, LINROPE_SWIGLU)

// W_2 (silu(W_1 x) * W_3 x), for a few rows of x
inline Tensor swiglu(const SwigluArguments& a) {
  const float* rows = read_rows(a.x);
  const int64_t b = a.x.size(0), k = a.x.size(1), n = first_size(a.w1), outputs = first_size(a.w2);
  const Tensor both = empty(kFloat32, {b, 2 * n}), y = empty(kFloat32, {b, outputs});
  float* to = (float*)both.data_ptr();
  Product products[] = {{linear_of(rows, b, k, k, "w1", a.w1, "bias1", a.bias1, n), to},
                        {linear_of(rows, b, k, k, "w3", a.w3, "bias3", a.bias3, n), to + n}};
  for (Product& product : products) product.c.y_stride = 2 * n;
  NormCall c({.out = as_heads(both, n, 1, n), .gate = as_token(both, 0, n)});
  run_products(products);
  const Tensor inner = norm_rows(c);
  run_product(linear_of((const float*)inner.data_ptr(), b, n, n, "w2", a.w2, "bias2", a.bias2, outputs), (float*)y.data_ptr());
  return y;
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double log_sigmoid(double x) { return (x < 0 ? x : 0) - std::log1p(std::exp(-std::fabs(x))); }

// The arguments of mixer_step. First those that differ from token to token.
#define LINROPE_MIXER_STEP(ARGUMENT)                                                                                  \
  ARGUMENT(Tensor, x) ARGUMENT(Written, kv) ARGUMENT(MaybeWritten, z) ARGUMENT(Written, positions)                    \
  ARGUMENT(MaybeWritten, inputs) ARGUMENT(Maybe, slots) ARGUMENT(Maybe, decay)                                        \
  ARGUMENT(Maybe, q_proj) ARGUMENT(Maybe, q_bias) ARGUMENT(Maybe, k_proj) ARGUMENT(Maybe, k_bias)                     \
  ARGUMENT(Maybe, v_proj) ARGUMENT(Maybe, v_bias) ARGUMENT(Maybe, gate_proj) ARGUMENT(Maybe, gate_bias)               \
  ARGUMENT(Maybe, forget_proj) ARGUMENT(Maybe, forget_bias) ARGUMENT(Maybe, write_proj) ARGUMENT(Maybe, write_bias)   \
  ARGUMENT(Maybe, erase_proj) ARGUMENT(Maybe, erase_bias) ARGUMENT(Maybe, o_proj) ARGUMENT(Maybe, o_bias)             \
  ARGUMENT(int64_t, heads) ARGUMENT(bool, gate) ARGUMENT(bool, forget) ARGUMENT(Maybe, up) ARGUMENT(Maybe, up_bias)   \
  ARGUMENT(double, bound) ARGUMENT(int64_t, write) ARGUMENT(double, erase)                                            \
  ARGUMENT(Maybe, weight) ARGUMENT(Maybe, bias) ARGUMENT(bool, silu) ARGUMENT(Maybe, theta) ARGUMENT(int64_t, layout) \
  ARGUMENT(int64_t, feature_map) ARGUMENT(double, query_factor) ARGUMENT(bool, normalize) ARGUMENT(double, eps)       \
  ARGUMENT(Maybe, norm) ARGUMENT(double, norm_eps) ARGUMENT(bool, over_heads) ARGUMENT(bool, gate_first)              \
  ARGUMENT(Maybe, skip) ARGUMENT(bool, skip_first)

// x: the layer's input (b, 1, dim) or (b, dim), if the projections are given, and then the result is the layer's output in
// this shape. Without the projections: their results (b, ·) side by side, and the result (b, out_heads e) is what W_o
// takes. up (g, units, rank), up_bias (g, units) and bound are those of a forget gate per feature, whose first product is
// forget_proj. write: a WriteFactor. erase: the largest number of the erase gate, or 0 without one; with one there is no z.
// decay (g,) is the log of a fixed decay. The other arguments are those of convolve, step and gated_norm. With slots (b,),
// inputs, kv, z and positions (rows,) are those of a pool, and sequence i has row slots[i] of each.
LINROPE_RECORD(MixerArguments, LINROPE_MIXER_STEP)

// The sizes of a step, and the columns of its projections: q (h d), k (key_heads d), v (g e), and if they are wanted the
// gate (out_heads e), the forget gate (g, or `rank` if it is per feature), the write gate (g) and the erase gate (g) before
// their sigmoid
struct MixerColumns {
  int64_t b, h, g, d, e;
  int64_t key_heads, out_heads;  // g, h; if there are more heads of values than of queries h, g
  // channels: of q, k and v together; gate ..: each part's first column
  int64_t channels, gate, forget, write, erase, count;
  bool per_feature;             // the forget gate
  int64_t units = 1, rank = 0;  // of a forget gate per feature
  explicit MixerColumns(const MixerArguments& a) {
    const Tensor &x = a.x, &kv = a.kv;
    const int64_t dims = x.dim(), most = a.q_proj ? 3 : 2;
    if (dims < 2 || dims > most || (dims == 3 && x.size(1) != 1) || kv.dim() != 4)
      refuse("x, kv: got ", dims, " and ", kv.dim(), " dimensions, expected 2 and 4");
    if (a.heads < 1 || a.heads >= 1 << 16) refuse("heads: got ", a.heads, ", expected 1 .. 65535");
    b = x.size(0);
    h = a.heads;
    g = kv.size(1);
    d = kv.size(2);
    e = kv.size(3);
    key_heads = h < g ? h : g;
    out_heads = h < g ? g : h;
    per_feature = a.up.has_value();
    if (per_feature) {
      if (!a.forget) refuse("up: got a tensor without forget, expected None");
      if (a.up->dim() != 3) refuse("up: got shape ", shape_text(*a.up), ", expected (g, units, rank)");
      units = a.up->size(1);
      rank = a.up->size(2);
    }
    channels = gate = (h + key_heads) * d + g * e;
    forget = gate + a.gate * out_heads * e;
    write = forget + a.forget * (per_feature ? rank : g);
    erase = write + (a.write == kWriteGate) * g;
    count = erase + (a.erase > 0) * g;
  }
};

// The projections of a step: from the layer's input to the columns, and from the norm's rows to the layer's output
struct MixerProjections {
  const MixerArguments& a;
  int64_t rows, dim;  // of the layer's input
  std::vector<Product> parts;
  Linear last{};

  MixerProjections(const MixerArguments& a, const MixerColumns& at, const Tensor& columns)
      : a(a), rows(at.b), dim(a.x.size(a.x.dim() - 1)) {
    check_device("x", a.x);
    check_type("x", a.x, kFloat32);
    check_last_stride("x", a.x);
    const float* from = (const float*)a.x.data_ptr();
    const auto add = [&](const char* name, const Maybe& weight, const char* bias_name, const Maybe& bias, int64_t first,
                         int64_t end) {
      const bool wanted = end > first;
      if (weight.has_value() != wanted)
        refuse(name, ": got ", wanted ? "None, expected a tensor" : "a tensor, expected None");
      if (!weight) return;
      const Linear c = linear_of(from, rows, dim, a.x.stride(0), name, *weight, bias_name, bias, end - first);
      parts.push_back({c, (float*)columns.data_ptr() + first});
      parts.back().c.y_stride = at.count;
    };
    parts.reserve(7);
    const int64_t k = at.h * at.d, v = k + at.key_heads * at.d, numbers = at.out_heads * at.e;
    add("q_proj", a.q_proj, "q_bias", a.q_bias, 0, k);
    add("k_proj", a.k_proj, "k_bias", a.k_bias, k, v);
    add("v_proj", a.v_proj, "v_bias", a.v_bias, v, at.channels);
    add("gate_proj", a.gate_proj, "gate_bias", a.gate_bias, at.gate, at.forget);
    add("forget_proj", a.forget_proj, "forget_bias", a.forget_bias, at.forget, at.write);
    add("write_proj", a.write_proj, "write_bias", a.write_bias, at.write, at.erase);
    add("erase_proj", a.erase_proj, "erase_bias", a.erase_bias, at.erase, at.count);
    if (!a.o_proj) refuse("o_proj: got None with q_proj, expected a tensor");
    last = linear_of(nullptr, rows, numbers, numbers, "o_proj", *a.o_proj, "o_bias", a.o_bias, first_size(*a.o_proj));
  }
  MixerProjections(const MixerProjections&) = delete;

  // The layer's output, still empty
  Tensor output() const {
    return a.x.dim() == 3 ? empty(kFloat32, {rows, 1, last.n}) : empty(kFloat32, {rows, last.n});
  }
  void finish(const Tensor& normed, const Tensor& y) {
    last.x = (const float*)normed.data_ptr();
    run_product(last, (float*)y.data_ptr());
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

  // x (b, at.count): the columns
  MixerGates(const MixerArguments& a, const MixerColumns& at, const Tensor& x)
      : at(at), has_forget(a.forget), bound(a.bound), write_factor(a.write), largest(a.erase),
        fixed(a.decay ? numbers<double>("decay", *a.decay, kFloat64, {at.g}) : nullptr) {
    const Maybe &up = a.up, &up_bias = a.up_bias;
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
                 .k = at.rank, .stride = at.count, .y_stride = at.g * at.units};
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
    run_product(product, gates.data());
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

// One token of a layer
inline Tensor mixer_step(const MixerArguments& a) {
  const MixerColumns at(a);
  const Tensor x = a.q_proj ? empty(kFloat32, {at.b, at.count}) : a.x;
  parameter("x", x, {at.b, at.count});
  std::optional<MixerProjections> projections;
  if (a.q_proj) projections.emplace(a, at, x);
  const MixerGates gates(a, at, x);
  if (a.weight.has_value() != a.inputs.has_value()) refuse("weight, inputs: got one of them, expected both or none");
  const int64_t rows = a.slots ? a.kv.size(0) : at.b;
  numbers<int64_t>("positions", a.positions, kInt64, {rows});
  const Tensor positions = reinterpret(a.positions, 0, {rows, 1}, {1, 1});
  const Tensor starts = a.slots ? positions_at(*a.slots, positions, at.b, a.kv.size(0)) : positions;
  const Tensor mixed = a.weight ? empty(kFloat32, {at.b, at.channels}) : x;
  std::optional<ConvolutionCall> convolution;
  if (a.weight)
    convolution.emplace(ConvolutionArguments{as_token(x, 0, at.channels), *a.weight, a.bias, a.inputs, {}, a.silu},
                        a.slots);
  Inputs step(kStep);
  step[kQ] = as_heads(mixed, 0, at.h, at.d);
  step[kK] = as_heads(mixed, at.h * at.d, at.key_heads, at.d);
  step[kV] = as_heads(mixed, (at.h + at.key_heads) * at.d, at.g, at.e);
  step[kLogDecay] = gates.log_decay;
  step[kWrite] = gates.write;
  step[kErase] = gates.erase;
  step[kKv] = a.kv;
  step[kZ] = a.z;
  step[kSlots] = a.slots;
  step[kTheta] = a.theta;
  step[kPositions] = starts;
  step.call.layout = a.layout;
  step.call.map = a.feature_map;
  step.call.query_factor = a.query_factor;
  step.call.normalize = a.normalize;
  step.call.eps = a.eps;
  Call& c = read_call(step);
  int64_t* position = advancing_positions(at.b, starts);
  const Tensor out = empty(kFloat32, {at.b, 1, at.out_heads, at.e});
  c.out = view(out);
  const Maybe gate = a.gate ? Maybe(as_token(x, at.gate, at.out_heads * at.e)) : Maybe();
  NormCall after({.out = out, .weight = a.norm, .gate = gate, .v = a.skip ? step[kV] : Maybe(), .skip = a.skip,
                  .eps = a.norm_eps, .over_heads = a.over_heads, .gate_first = a.gate_first, .skip_first = a.skip_first});
  const int64_t numbers = at.out_heads * at.e;
  const Tensor normed = empty(kFloat32, {at.b, numbers}), y = projections ? projections->output() : normed;
  after.y = {(char*)normed.data_ptr(), numbers, numbers, at.e};

  // Everything is checked: from here on, the state is written
  if (projections) run_products(projections->parts);
  gates.fill((const float*)x.data_ptr());
  if (convolution) {
    convolution->y = {(char*)mixed.data_ptr(), at.channels, at.channels, 0};
    run_convolve_step(*convolution);
  }
  run_step(c);
  for (int64_t i = 0; i < at.b; i++) {
    position[i]++;
    if (a.slots) ((int64_t*)a.positions.data_ptr())[c.state_row(i)] = position[i];
  }
  run_norm(after);
  if (projections) projections->finish(normed, y);
  return y;
}

}  // namespace linrope
