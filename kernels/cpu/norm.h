// The RMS norm of the heads' outputs with a gate and a skip connection, and its gradients:
//
//   u = (out + D v) * silu(z);   u = weight * u * rsqrt(mean(u^2) + eps);   y = (u + D v) * silu(z)
//
// where each D v and each silu(z) stands before or after the norm. A token's rows stay in the first-level cache between
// the two passes over them.
#pragma once
#include "partial.h"

namespace linrope {
namespace {

template <class T> struct NormTokens {
  const Norm& c;
  int E;  // e rounded up: the stride of a head in scratch memory, weight and sums
  bool skip_first, skip_last, gate_first, gate_last;
  float *u, *du;             // (h, E): u, and the gradient of the norm's result
  float *factor, *slopes;    // (h, E): silu(z), and its slope, times dy if gate_last
  float* dv;                 // (g, E)
  float *scale, *dot;        // (h): the norm's factor; <weight du, u>

  NormTokens(const Norm& c, Arena& arena)
      : c(c), E(round_up(c.e, W)), skip_first(c.v.data && c.skip_first), skip_last(c.v.data && !c.skip_first),
        gate_first(c.gate.data && c.gate_first), gate_last(c.gate.data && !c.gate_first),
        u(arena.take<float>(c.h * E)), du(arena.take<float>(c.h * E)), factor(arena.take<float>(c.h * E)),
        slopes(arena.take<float>(c.h * E)), dv(arena.take<float>(c.h * E)), scale(arena.take<float>(c.h)),
        dot(arena.take<float>(c.h)) {}
  static size_t bytes(const Norm& c) { return 4 * c.h * (5 * (size_t)round_up(c.e, W) + 2) + 1024; }

  T* at(const View& x, int64_t batch, int64_t token, int head) const {
    return x.data ? (T*)x.data + batch * x.batch + token * x.token + head * x.head : nullptr;
  }
  const float* weight_of(int head) const { return c.weight ? c.weight + head * E : nullptr; }
  int group(int head) const { return head / (c.h / c.g); }

  // scale = rsqrt(mean(u^2) + eps) from the sums of squares of each head
  void finish_scale() const {
    if (c.over_heads) {
      float total = 0;
      for (int head = 0; head < c.h; head++) total += scale[head];
      for (int head = 0; head < c.h; head++) scale[head] = total;
    }
    const float size = (float)c.e * (c.over_heads ? c.h : 1);
    for (int head = 0; head < c.h; head++) scale[head] = 1 / std::sqrt(scale[head] / size + c.eps);
  }

  void forward(int64_t batch, int64_t token) const {
    // Local copies, because a store may change what a pointer or reference leads to
    for (int head = 0; head < c.h; head++) {
      const T *out = at(c.out, batch, token, head), *z = at(c.gate, batch, token, head);
      const T* v = at(c.v, batch, token, group(head));
      const float D = c.v.data ? c.skip[head] : 0;
      const bool skips = skip_first, gates = gate_first;
      float* to = u + head * E;
      vf squares = {};
      vectors(c.e, [&]<bool PART>(int i, int count) {
        vf x = load_lanes<PART>(out + i, count);
        if (skips) x += load_lanes<PART>(v + i, count) * D;
        if (gates) {
          const Silu silu(load_lanes<PART>(z + i, count));
          x *= silu.y;
        }
        squares += x * x;
        store(to + i, x);
      });
      scale[head] = sum(squares);
    }
    if (c.weight) finish_scale();
    for (int head = 0; head < c.h; head++) {
      const T *z = at(c.gate, batch, token, head), *v = at(c.v, batch, token, group(head));
      const float *from = u + head * E, *weight = weight_of(head);
      const float D = c.v.data ? c.skip[head] : 0, r = scale[head];
      const bool normed = c.weight, skips = skip_last, gates = gate_last;
      T* y = at(c.y, batch, token, head);
      vectors(c.e, [&]<bool PART>(int i, int count) {
        vf x = load(from + i);
        if (normed) x = load(weight + i) * (x * r);
        if (skips) x += load_lanes<PART>(v + i, count) * D;
        if (gates) {
          const Silu silu(load_lanes<PART>(z + i, count));
          x *= silu.y;
        }
        store_lanes<PART>(y + i, x, count);
      });
    }
  }

  // sums (2, h, E): adds the gradient of the weight, and of D as a sum over the values of each head
  void backward(int64_t batch, int64_t token, float* sums) const {
    for (int head = 0; head < c.h; head++) first_pass(batch, token, head);
    if (c.weight) {
      finish_scale();
      if (c.over_heads) {
        float total = 0;
        for (int head = 0; head < c.h; head++) total += dot[head];
        for (int head = 0; head < c.h; head++) dot[head] = total;
      }
    }
    for (int head = 0; head < c.h; head++) second_pass(batch, token, head, sums);
    for (int g = 0; c.v.data && g < c.g; g++) {
      T* to = at(c.d_v, batch, token, g);
      vectors(c.e, [&]<bool PART>(int i, int count) { store_lanes<PART>(to + i, load(dv + g * E + i), count); });
    }
  }

  void first_pass(int64_t batch, int64_t token, int head) const {
    const T *out = at(c.out, batch, token, head), *dy = at(c.dy, batch, token, head);
    const T *z = at(c.gate, batch, token, head), *v = at(c.v, batch, token, group(head));
    const int k = head * E;
    const float D = c.v.data ? c.skip[head] : 0, *weight = weight_of(head);
    float *to_u = u + k, *to_du = du + k, *to_factor = factor + k, *to_slopes = slopes + k;
    const bool skips = skip_first, gated = c.gate.data, gates = gate_first, normed = c.weight;
    vf squares = {}, products = {};
    vectors(c.e, [&]<bool PART>(int i, int count) {
      vf x = load_lanes<PART>(out + i, count), g = load_lanes<PART>(dy + i, count);
      if (skips) x += load_lanes<PART>(v + i, count) * D;
      if (gated) {
        const Silu silu(load_lanes<PART>(z + i, count));
        if (gates) x *= silu.y, store(to_factor + i, silu.y), store(to_slopes + i, silu.slope());
        else store(to_slopes + i, silu.slope() * g), g *= silu.y;
      }
      store(to_u + i, x), store(to_du + i, g);
      squares += x * x;
      if (normed) products += (g * load(weight + i)) * x;
    });
    scale[head] = sum(squares), dot[head] = sum(products);
  }

  void second_pass(int64_t batch, int64_t token, int head, float* sums) const {
    const T *out = at(c.out, batch, token, head), *v = at(c.v, batch, token, group(head));
    T *d_out = at(c.d_out, batch, token, head), *d_gate = at(c.d_gate, batch, token, head);
    const int k = head * E;
    const float size = (float)c.e * (c.over_heads ? c.h : 1), r = scale[head], pull = r * r * r * dot[head] / size;
    const float D = c.v.data ? c.skip[head] : 0;
    const float *weight = weight_of(head), *from_u = u + k, *from_du = du + k;
    const float *from_factor = factor + k, *from_slopes = slopes + k;
    float *of_weight = sums + k, *of_skip = sums + c.h * E + k, *to_dv = dv + group(head) * E;
    const bool normed = c.weight, skipped = c.v.data, skip_before = skip_first, skip_after = skip_last;
    const bool gated = c.gate.data, gate_before = gate_first, gate_after = gate_last;
    const bool first_of_group = head % (c.h / c.g) == 0;
    vectors(c.e, [&]<bool PART>(int i, int count) {
      vf x = load(from_u + i), g = load(from_du + i), v_i = {}, dz = {};
      if (skipped) v_i = load_lanes<PART>(v + i, count);
      vf of_skipped = g;  // the gradient of D v
      vf n = x;           // the norm's result
      if (normed) {
        const vf w = load(weight + i), normal = x * r;
        n = w * normal;
        store(of_weight + i, load(of_weight + i) + g * normal);
        g = g * (w * r) - x * pull;
      }
      if (gate_after) {
        if (skip_after) n += v_i * D;
        dz = n * load(from_slopes + i);
      }
      if (gate_before) {
        vf p = load_lanes<PART>(out + i, count);
        if (skip_before) p += v_i * D;
        dz = g * p * load(from_slopes + i);
        g *= load(from_factor + i);
      }
      if (skip_before) of_skipped = g;
      if (skipped) {
        store(of_skip + i, load(of_skip + i) + of_skipped * v_i);
        const vf d = of_skipped * D;
        store(to_dv + i, first_of_group ? d : load(to_dv + i) + d);
      }
      if (gated) store_lanes<PART>(d_gate + i, dz, count);
      store_lanes<PART>(d_out + i, g, count);
    });
  }
};

void norm(const Norm& c, int64_t batch, int64_t begin, int64_t end) {
  with_type(c.type, [&]<class T>() {
    Arena arena(NormTokens<T>::bytes(c));
    const NormTokens<T> tokens(c, arena);
    for (int64_t token = begin; token < end; token++) tokens.forward(batch, token);
  });
}
void norm_backward(const Norm& c, int64_t batch, int64_t begin, int64_t end, float* sums) {
  with_type(c.type, [&]<class T>() {
    Arena arena(NormTokens<T>::bytes(c));
    const NormTokens<T> tokens(c, arena);
    for (int64_t token = begin; token < end; token++) tokens.backward(batch, token, sums);
  });
}

}  // namespace
}  // namespace linrope
