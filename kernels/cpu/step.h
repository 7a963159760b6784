// One token: S = e^a S + R psi v^T, out = R phi S / den. The state keeps the caller's layout and is updated in place, some
// columns at a time. With erase b, v - b (e^a S)^T R psi takes v's place: a first pass reads these columns.
#pragma once
#include "unit_decay.h"

namespace linrope {
namespace {

#if defined(__AVX512F__)
constexpr int kWide = 8;  // vectors of columns at once: their sums and values fit in the registers
#else
constexpr int kWide = 4;
#endif

struct Columns {  // columns of one state (f, stride)
  int f, stride;
  float* kv;
  const float *key, *phi_hat, *v;
  float* out;
  const DecayFactor& factor;
  const FeatureFactors* of_features;  // instead of `factor`, if the decay is per unit; else null
  float scale;
  const float* reader;  // with erase: the key that reads S, times e^a if that is per feature; else null
  float erase;          // b, times e^a if all features share that

  enum { kOfFeatures = DecayFactor::kBelow + 1 };
  int kind(bool change) const {
    return !change ? DecayFactor::kOne : of_features ? (int)kOfFeatures : (int)factor.kind;
  }
  // e^a of feature f, or of W features from it on if they are the lanes
  template <int kind, bool lanes> LINROPE_INLINE vf decayed(vf s, int f) const {
    if constexpr (kind != kOfFeatures) return factor.times<kind>(s);
    const float *whole = of_features->whole + f, *part = of_features->part + f;
    return lanes ? s * load(whole) + s * load(part) : s * *whole + s * *part;
  }
  float decayed(float s, int f) const {
    return of_features ? decayed<kOfFeatures, false>(splat(s), f)[0] : factor(splat(s))[0];
  }
};

// v -= erase S^T reader, for N vectors of columns
template <int N> LINROPE_INLINE void erase_columns(const Columns& x, vf (&v)[N]) {
  vf found[2][N] = {};
  const auto row = [&](int f, vf (&to)[N]) __attribute__((always_inline)) {
    for (int i = 0; i < N; i++) to[i] += load(x.kv + (int64_t)f * x.stride + i * W) * x.reader[f];
  };
  int f = 0;
  for (; f + 1 < x.f; f += 2) {
    row(f, found[0]);
    row(f + 1, found[1]);
  }
  if (f < x.f) row(f, found[0]);
  for (int i = 0; i < N; i++) v[i] -= (found[0][i] + found[1][i]) * x.erase;
}

// N vectors of columns. If `change`, for the first query head: S = e^a S + key v^T. Then out = scale phi_hat^T S
template <int N, int kind> inline void columns(const Columns& x, bool change) {
  vf acc[2][N] = {}, v[N];
  for (int i = 0; i < N; i++) v[i] = load(x.v + i * W);
  if (change && x.reader) erase_columns<N>(x, v);
  const auto row = [&](int f, vf (&to)[N]) __attribute__((always_inline)) {
    float* s = x.kv + (int64_t)f * x.stride;
    for (int i = 0; i < N; i++) {
      vf y = load(s + i * W);
      if (change) {
        __builtin_prefetch(s + i * W + (int64_t)x.f * x.stride, 1, 2);
        y = x.decayed<kind, false>(y, f) + v[i] * x.key[f];
        store(s + i * W, y);
      }
      to[i] += y * x.phi_hat[f];
    }
  };
  int f = 0;
  for (; f + 1 < x.f; f += 2) {
    row(f, acc[0]);
    row(f + 1, acc[1]);
  }
  if (f < x.f) row(f, acc[0]);
  for (int i = 0; i < N; i++) store(x.out + i * W, (acc[0][i] + acc[1][i]) * x.scale);
}

template <int N> inline void columns(const Columns& x, bool change) {
  switch (x.kind(change)) {
    case Columns::kOfFeatures: return columns<N, Columns::kOfFeatures>(x, change);
    case DecayFactor::kNearOne: return columns<N, DecayFactor::kNearOne>(x, change);
    case DecayFactor::kBelow: return columns<N, DecayFactor::kBelow>(x, change);
    default: return columns<N, DecayFactor::kOne>(x, change);
  }
}

// The last columns, fewer than a vector has
inline void last_columns(const Columns& x, int count, bool change) {
  for (int e = 0; e < count; e++) {
    float acc = 0, found = 0;
    for (int f = 0; change && x.reader && f < x.f; f++) found += x.kv[(int64_t)f * x.stride + e] * x.reader[f];
    const float v = x.v[e] - found * x.erase;
    for (int f = 0; f < x.f; f++) {
      float& s = x.kv[(int64_t)f * x.stride + e];
      if (change) s = x.decayed(s, f) + v * x.key[f];
      acc += s * x.phi_hat[f];
    }
    x.out[e] = acc * x.scale;
  }
}

// Columns that lie in memory as rows of f numbers: out = scale S query is a dot product for each of them
template <int kind> inline void swapped_columns(const Columns& x, int count, bool change) {
  for (int e = 0; e < count; e++) {
    float* s = x.kv + (int64_t)e * x.f;
    float value = x.v[e];
    if (change && x.reader) {
      vf found = {};
      vectors(x.f, [&]<bool PART>(int f, int lanes) {
        found += load_lanes<PART>(s + f, lanes) * load_lanes<PART>(x.reader + f, lanes);
      });
      value -= sum(found) * x.erase;
    }
    const vf v = splat(value);
    vf acc[2] = {};
    const auto lanes = [&](int f, vf& to) {
      vf y = load(s + f);
      if (change) {
        y = x.decayed<kind, true>(y, f) + v * load(x.key + f);
        store(s + f, y);
      }
      to += y * load(x.phi_hat + f);
    };
    int f = 0;
    for (; f + 2 * W <= x.f; f += 2 * W) {
      lanes(f, acc[0]);
      lanes(f + W, acc[1]);
    }
    if (f + W <= x.f) {
      lanes(f, acc[0]);
      f += W;
    }
    float rest = 0;
    for (; f < x.f; f++) {
      if (change) s[f] = x.decayed(s[f], f) + value * x.key[f];
      rest += s[f] * x.phi_hat[f];
    }
    x.out[e] = (sum(acc[0] + acc[1]) + rest) * x.scale;
  }
}

inline void swapped_columns(const Columns& x, int count, bool change) {
  switch (x.kind(change)) {
    case Columns::kOfFeatures: return swapped_columns<Columns::kOfFeatures>(x, count, change);
    case DecayFactor::kNearOne: return swapped_columns<DecayFactor::kNearOne>(x, count, change);
    case DecayFactor::kBelow: return swapped_columns<DecayFactor::kBelow>(x, count, change);
    default: return swapped_columns<DecayFactor::kOne>(x, count, change);
  }
}

struct StepScratch : Pieces {
  using Pieces::Pieces;
  float *internal = features(1), *rotated = features(1);
  float *psi = caller_features(), *psi_hat = caller_features(), *phi = caller_features(), *phi_hat = caller_features();
  float *v = values(1), *result = values(1);
  mutable AngleRows k_angles[1] = {{arena, s}}, q_angles[1] = {{arena, s}};
  AngleMemory k_angle{arena, s}, q_angle{arena, s};
  float* carried = caller_features();
  FeatureFactors of_features{arena, s.per_unit ? round_up(s.f, W) + W : 0};
  float* caller_features() const { return arena.take<float>(s.f + W); }
};

// The decay of each feature, in the caller's order
void set_factors(const Shape& s, const Units& units, const StepScratch& w) {
  double D[kMaxDim + W] = {};
  units.read_row(s, 0, D);
  w.of_features.set(D, round_up(s.f, W));
}

// z = e^a z + psi
void add_to_sums(const Shape& s, const DecayFactor& factor, const FeatureFactors* of_features, const float* psi, double* z) {
  const double decay = factor.exact;
  for (int f = 0; f < s.f; f++) z[f] = z[f] * (of_features ? of_features->exact[f] : decay) + psi[f];
}

// z^T phi
double denominator(const Shape& s, const float* phi, const double* z) {
  vd acc = {};
  int f = 0;
  for (; f + W / 2 <= s.f; f += W / 2) acc += *(const vdu*)(z + f) * widen(phi + f);
  double den = sum(acc);
  for (; f < s.f; f++) den += z[f] * phi[f];
  return den;
}

void step_head(const Task& task, const StepScratch& w, const Angles& k_angle, const Angles& q_angle, const Units& units,
               float* kv, double* z) {
  const Call& c = task.c;
  const Shape& s = task.s;
  task.key_features(0, 1, k_angle, w.internal, w.rotated, nullptr);
  task.key_values(0, 1, w.v);
  write_features(s, w.internal, w.psi);
  write_features(s, w.rotated, w.psi_hat);
  const DecayFactor factor(Decay(c, task.span).at(0));
  const FeatureFactors* of_features = s.per_unit ? &w.of_features : nullptr;
  if (of_features) set_factors(s, units, w);
  if (z) add_to_sums(s, factor, of_features, w.psi, z);
  const float* reader = !c.erase.data ? nullptr : of_features ? w.carried : w.psi_hat;
  const float erase = reader ? (float)(task.erase(0) * factor.exact) : 0;
  for (int f = 0; reader && of_features && f < s.f; f++) w.carried[f] = (float)(w.psi_hat[f] * of_features->exact[f]);
  for (int r = 0; r == 0 || r < task.group; r++) {
    double den = 0;
    if (task.group) {
      task.query_features(task.queries(r), 0, 1, q_angle, w.internal, w.rotated, nullptr);
      write_features(s, w.internal, w.phi);
      write_features(s, w.rotated, w.phi_hat);
      if (z) den = denominator(s, w.phi, z);
    }
    const double eps = task.eps, divisor = !c.normalize ? 1 : c.add_eps ? den + eps : den < eps ? eps : den;
    const float scale = (float)(1 / divisor);
    const Columns all{s.f, c.kv_swapped ? s.f : s.e, kv, w.psi_hat, w.phi_hat, w.v, w.result, factor, of_features, scale,
                      reader, erase};
    if (c.kv_swapped) swapped_columns(all, s.e, r == 0);
    for (int e = c.kv_swapped ? s.e : 0; e < s.e;) {
      Columns x = all;
      x.kv += e, x.v += e, x.out += e;
      if (s.e - e >= kWide * W) {  // whole rows if possible: memory is then read in order
        columns<kWide>(x, r == 0);
        e += kWide * W;
      } else if (s.e - e >= 4 * W) {
        columns<4>(x, r == 0);
        e += 4 * W;
      } else if (s.e - e >= W) {
        columns<1>(x, r == 0);
        e += W;
      } else {
        last_columns(x, s.e - e, r == 0);
        e = s.e;
      }
    }
    if (task.group) write_values(s, w.result, s.E, task.query_rows(c.out, r), 0, 1);
  }
}

// Heads [first, last) of one row; kv and z are that row's
void step(const Call& c, int64_t row, int64_t first, int64_t last, float* kv, double* z) {
  const Shape s(c);
  const FlushToZero flush;
  const auto scratch = lay_out<StepScratch>(s);
  const bool same_angles = same_positions(c);
  Units units(c, {row, first, 0, 1}, s, false);
  for (int64_t head = first; head < last; head++) {
    const Span span{row, head, 0, 1};
    const Task task(c, span, {});
    Angles k_angle(c, s, span, c.key_positions, nullptr, scratch.k_angles, scratch.k_angle);
    Angles q_angle(c, s, span, c.positions, nullptr, scratch.q_angles, scratch.q_angle);
    k_angle.forward(0, 1);
    if (!same_angles) q_angle.forward(0, 1);
    if (s.per_unit) units.go_to(c, span);
    step_head(task, scratch, k_angle, same_angles ? k_angle : q_angle, units, kv + head * s.f * s.e,
              z ? z + head * s.f : nullptr);
  }
}

}  // namespace
}  // namespace linrope
