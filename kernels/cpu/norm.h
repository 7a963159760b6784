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
  float *u, *du, *factor, *slopes, *dv;  // (h, E): u, the gradient of the norm's result, silu(z), its slope; (g, E)
  float *scale, *dot;                    // (h): the norm's factor; <weight du, u>

  NormTokens(const Norm& c, Arena& arena)
      : c(c), E(round_up(c.e, W)), skip_first(c.v.data && c.skip_first), skip_last(c.v.data && !c.skip_first),
        gate_first(c.gate.data && c.gate_first), gate_last(c.gate.data && !c.gate_first),
        u(arena.take<float>(c.h * E)), du(arena.take<float>(c.h * E)), factor(arena.take<float>(c.h * E)),
        slopes(arena.take<float>(c.h * E)), dv(arena.take<float>(c.h * E)), scale(arena.take<float>(c.h)),
        dot(arena.take<float>(c.h)) {}
  static size_t bytes(const Norm& c) { return 4 * c.h * (5 * (size_t)round_up(c.e, W) + 2) + 1024; }

  T* at(const View& x, int64_t batch, int64_t token, int head) const {
    return (T*)x.data + batch * x.batch + token * x.token + head * x.head;
  }
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
    const auto silu = [&]<bool PART>(int head, int i, int count) {
      return apply(kSilu, load_lanes<PART>(at(c.gate, batch, token, head) + i, count));
    };
    const auto skipped = [&]<bool PART>(int head, int i, int count) {
      return load_lanes<PART>(at(c.v, batch, token, group(head)) + i, count) * c.skip[head];
    };
    for (int head = 0; head < c.h; head++) {
      vf squares = {};
      const T* out = at(c.out, batch, token, head);
      vectors(c.e, [&]<bool PART>(int i, int count) {
        vf x = load_lanes<PART>(out + i, count);
        if (skip_first) x += skipped.template operator()<PART>(head, i, count);
        if (gate_first) x *= silu.template operator()<PART>(head, i, count);
        squares += x * x;
        store(u + head * E + i, x);
      });
      scale[head] = sum(squares);
    }
    if (c.weight) finish_scale();
    for (int head = 0; head < c.h; head++) {
      T* y = at(c.y, batch, token, head);
      vectors(c.e, [&]<bool PART>(int i, int count) {
        vf x = load(u + head * E + i);
        if (c.weight) x = load(c.weight + head * E + i) * (x * scale[head]);
        if (skip_last) x += skipped.template operator()<PART>(head, i, count);
        if (gate_last) x *= silu.template operator()<PART>(head, i, count);
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
    vf squares = {}, products = {};
    vectors(c.e, [&]<bool PART>(int i, int count) {
      const int k = head * E + i;
      vf x = load_lanes<PART>(at(c.out, batch, token, head) + i, count);
      vf g = load_lanes<PART>(at(c.dy, batch, token, head) + i, count);
      if (skip_first) x += load_lanes<PART>(at(c.v, batch, token, group(head)) + i, count) * c.skip[head];
      if (c.gate.data) {
        const vf z = load_lanes<PART>(at(c.gate, batch, token, head) + i, count), s = sigmoid(z), y = z * s;
        store(factor + k, y), store(slopes + k, silu_slope(z, s));
        if (gate_first) x *= y;
        else g *= y;
      }
      store(u + k, x), store(du + k, g);
      squares += x * x;
      if (c.weight) products += (g * load(c.weight + k)) * x;
    });
    scale[head] = sum(squares), dot[head] = sum(products);
  }

  void second_pass(int64_t batch, int64_t token, int head, float* sums) const {
    const float r = scale[head], size = (float)c.e * (c.over_heads ? c.h : 1), pull = r * r * r * dot[head] / size;
    const bool first_of_group = head % (c.h / c.g) == 0;
    vectors(c.e, [&]<bool PART>(int i, int count) {
      const int k = head * E + i;
      vf x = load(u + k), g = load(du + k), v = {}, dz = {};
      float* of_weight = sums + k;
      float* of_skip = sums + c.h * E + k;
      if (c.v.data) v = load_lanes<PART>(at(c.v, batch, token, group(head)) + i, count);
      if (gate_last) {
        vf q = c.weight ? load(c.weight + k) * (x * r) : x;
        if (skip_last) q += v * c.skip[head];
        dz = load_lanes<PART>(at(c.dy, batch, token, head) + i, count) * q * load(slopes + k);
      }
      vf skipped = g;  // the gradient of D v
      if (c.weight) {
        store(of_weight, load(of_weight) + g * (x * r));
        g = g * load(c.weight + k) * r - x * pull;
      }
      if (gate_first) {
        vf p = load_lanes<PART>(at(c.out, batch, token, head) + i, count);
        if (skip_first) p += v * c.skip[head];
        dz = g * p * load(slopes + k);
        g *= load(factor + k);
      }
      if (skip_first) skipped = g;
      if (c.v.data) {
        store(of_skip, load(of_skip) + skipped * v);
        float* to = dv + group(head) * E + i;
        const vf d = skipped * c.skip[head];
        store(to, first_of_group ? d : load(to) + d);
      }
      if (c.gate.data) store_lanes<PART>(at(c.d_gate, batch, token, head) + i, dz, count);
      store_lanes<PART>(at(c.d_out, batch, token, head) + i, g, count);
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
