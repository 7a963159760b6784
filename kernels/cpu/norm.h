// The RMS norm of the heads' outputs with a gate and a skip connection, and its gradients:
//
//   u = (out + D v) * f(z);   u = weight * u * rsqrt(mean(u^2) + eps);   y = (u + D v) * f(z)
//
// where f is silu or sigmoid, and D v and f(z) each stand before or after the norm. A token's rows stay in the first-level
// cache between the two passes over them.
#pragma once
#include "arena.h"
#include "partial.h"

namespace linrope {
namespace {

// Which parts a call has. The forms that models use most are compiled with constants: their loops have no branches.
struct AnyForm {
  bool normed, skip_first, skip_last, gate_first, gate_last, sigmoid;
};
template <bool NORMED, bool SKIP, bool GATE, bool SIGMOID = false> struct FixedForm {
  static constexpr bool normed = NORMED, skip_first = false, skip_last = SKIP, gate_first = false, gate_last = GATE;
  static constexpr bool sigmoid = SIGMOID;
};
template <class F> void with_form(const Norm& c, F f) {
  const bool skip = c.v.data, gate = c.gate.data, skip_first = skip && c.skip_first, gate_first = gate && c.gate_first;
  if (!skip_first && !gate_first && c.weight && !skip && gate) {  // Gated DeltaNet, Kimi Delta Attention
    if (c.sigmoid) return f(FixedForm<true, false, true, true>{});
    return f(FixedForm<true, false, true>{});
  }
  if (!skip_first && !gate_first && !c.sigmoid) {
    if (c.weight && !skip && !gate) return f(FixedForm<true, false, false>{});   // RMSNorm
    if (!c.weight && !skip && gate) return f(FixedForm<false, false, true>{});   // the product of a SwiGLU
    if (c.weight && skip && gate) return f(FixedForm<true, true, true>{});       // the block of linrope.models
  }
  f(AnyForm{c.weight != nullptr, skip_first, skip && !skip_first, gate_first, gate && !gate_first, c.sigmoid});
}

struct Gate {  // the factor f(z), and its slope
  vf y, slope;
  LINROPE_INLINE Gate(vf z, bool sigmoid) {
    const Silu silu(z);
    y = sigmoid ? silu.s : silu.y;
    slope = sigmoid ? silu.s * (1.0f - silu.s) : silu.slope();
  }
};

template <class T, class Form> struct NormTokens {
  const Norm& c;
  const Form form;
  int E;  // e rounded up: the stride of a head in scratch memory, weight and sums
  float *u, *du;             // (h, E): u, and the gradient of the norm's result
  float *factor, *slopes;    // (h, E): f(z) if gate_first; f'(z), times dy if gate_last
  float* dv;                 // (g, E)
  float *scale, *dot;        // (h): the norm's factor; <weight du, u>

  NormTokens(Arena& arena, const Norm& c, Form form)
      : c(c), form(form), E(round_up(c.e, W)), u(arena.take<float>(c.h * E)), du(arena.take<float>(c.h * E)),
        factor(arena.take<float>(c.h * E)), slopes(arena.take<float>(c.h * E)), dv(arena.take<float>(c.g * E)),
        scale(arena.take<float>(c.h)), dot(arena.take<float>(c.h)) {}

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
    float* const to = scale;
    const float size = (float)c.e * (c.over_heads ? c.h : 1), eps = c.eps;
    const int h = c.h;
    for (int head = 0; head < h; head++) to[head] = 1 / std::sqrt(to[head] / size + eps);
  }

  void forward(int64_t batch, int64_t token) const {
    // Local copies, because a store may change what a pointer or reference leads to
    const Form form = this->form;
    const int e = c.e;
    for (int head = 0; head < c.h; head++) {
      const T *out = at(c.out, batch, token, head), *z = at(c.gate, batch, token, head);
      const T* v = at(c.v, batch, token, group(head));
      const float D = c.v.data ? c.skip[head] : 0;
      float* to = u + head * E;
      vf squares = {};
      vectors(e, [&]<bool PART>(int i, int count) {
        vf x = load_lanes<PART>(out + i, count);
        if (form.skip_first) x += load_lanes<PART>(v + i, count) * D;
        if (form.gate_first) {
          const Gate gate(load_lanes<PART>(z + i, count), form.sigmoid);
          x *= gate.y;
        }
        if (form.normed) squares += x * x;
        store(to + i, x);
      });
      if (form.normed) scale[head] = sum(squares);
    }
    if (form.normed) finish_scale();
    for (int head = 0; head < c.h; head++) {
      const T *z = at(c.gate, batch, token, head), *v = at(c.v, batch, token, group(head));
      const float *from = u + head * E, *weight = weight_of(head);
      const float D = c.v.data ? c.skip[head] : 0, r = scale[head];
      T* y = at(c.y, batch, token, head);
      vectors(e, [&]<bool PART>(int i, int count) {
        vf x = load(from + i);
        if (form.normed) x = load(weight + i) * (x * r);
        if (form.skip_last) x += load_lanes<PART>(v + i, count) * D;
        if (form.gate_last) {
          const Gate gate(load_lanes<PART>(z + i, count), form.sigmoid);
          x *= gate.y;
        }
        store_lanes<PART>(y + i, x, count);
      });
    }
  }

  // sums (2, h, E): adds the gradient of the weight, and of D as a sum over the values of each head
  void backward(int64_t batch, int64_t token, float* sums) const {
    for (int head = 0; head < c.h; head++) first_pass(batch, token, head);
    if (form.normed) {
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
    const Form form = this->form;
    const T *out = at(c.out, batch, token, head), *dy = at(c.dy, batch, token, head);
    const T *z = at(c.gate, batch, token, head), *v = at(c.v, batch, token, group(head));
    const int k = head * E;
    const float D = c.v.data ? c.skip[head] : 0, *weight = weight_of(head);
    float *to_u = u + k, *to_du = du + k, *to_factor = factor + k, *to_slopes = slopes + k;
    vf squares = {}, products = {};
    vectors(c.e, [&]<bool PART>(int i, int count) {
      vf x = load_lanes<PART>(out + i, count), g = load_lanes<PART>(dy + i, count);
      if (form.skip_first) x += load_lanes<PART>(v + i, count) * D;
      if (form.gate_first || form.gate_last) {
        const Gate gate(load_lanes<PART>(z + i, count), form.sigmoid);
        if (form.gate_first) {
          x *= gate.y;
          store(to_factor + i, gate.y);
          store(to_slopes + i, gate.slope);
        } else {
          store(to_slopes + i, gate.slope * g);
          g *= gate.y;
        }
      }
      store(to_u + i, x);
      store(to_du + i, g);
      if (!form.normed) return;
      squares += x * x;
      products += (g * load(weight + i)) * x;
    });
    if (!form.normed) return;
    scale[head] = sum(squares);
    dot[head] = sum(products);
  }

  void second_pass(int64_t batch, int64_t token, int head, float* sums) const {
    const Form form = this->form;
    const T *out = at(c.out, batch, token, head), *v = at(c.v, batch, token, group(head));
    T *d_out = at(c.d_out, batch, token, head), *d_gate = at(c.d_gate, batch, token, head);
    const int k = head * E;
    const float size = (float)c.e * (c.over_heads ? c.h : 1), r = scale[head], pull = r * r * r * dot[head] / size;
    const float D = c.v.data ? c.skip[head] : 0;
    const float *weight = weight_of(head), *from_u = u + k, *from_du = du + k;
    const float *from_factor = factor + k, *from_slopes = slopes + k;
    float *of_weight = sums + k, *of_skip = sums + c.h * E + k, *to_dv = dv + group(head) * E;
    const bool first_of_group = head % (c.h / c.g) == 0;
    vectors(c.e, [&]<bool PART>(int i, int count) {
      vf x = load(from_u + i), g = load(from_du + i), v_i = {}, dz = {};
      if (form.skip_first || form.skip_last) v_i = load_lanes<PART>(v + i, count);
      vf of_skipped = g;  // the gradient of D v
      vf n = x;           // the norm's result
      if (form.normed) {
        const vf w = load(weight + i), normal = x * r;
        n = w * normal;
        store(of_weight + i, load(of_weight + i) + g * normal);
        g = g * (w * r) - x * pull;
      }
      if (form.gate_last) {
        if (form.skip_last) n += v_i * D;
        dz = n * load(from_slopes + i);
      }
      if (form.gate_first) {
        vf p = load_lanes<PART>(out + i, count);
        if (form.skip_first) p += v_i * D;
        dz = g * p * load(from_slopes + i);
        g *= load(from_factor + i);
      }
      if (form.skip_first) of_skipped = g;
      if (form.skip_first || form.skip_last) {
        store(of_skip + i, load(of_skip + i) + of_skipped * v_i);
        const vf d = of_skipped * D;
        store(to_dv + i, first_of_group ? d : load(to_dv + i) + d);
      }
      if (form.gate_first || form.gate_last) store_lanes<PART>(d_gate + i, dz, count);
      store_lanes<PART>(d_out + i, g, count);
    });
  }
};

void norm(const Norm& c, int64_t batch, int64_t begin, int64_t end) {
  with_type(c.type, [&]<class T>() {
    with_form(c, [&](auto form) {
      const auto tokens = lay_out<NormTokens<T, decltype(form)>>(c, form);
      for (int64_t token = begin; token < end; token++) tokens.forward(batch, token);
    });
  });
}
void norm_backward(const Norm& c, int64_t batch, int64_t begin, int64_t end, float* sums) {
  with_type(c.type, [&]<class T>() {
    with_form(c, [&](auto form) {
      const auto tokens = lay_out<NormTokens<T, decltype(form)>>(c, form);
      for (int64_t token = begin; token < end; token++) tokens.backward(batch, token, sums);
    });
  });
}

}  // namespace
}  // namespace linrope
