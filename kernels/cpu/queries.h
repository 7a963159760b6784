// Gradients of queries, first token to last. With gb = dL/d out / den:
//   dphi^ = gb S^T + tril(gb v^T) psi^,  and den and delta = dL/d den for the sweep of keys
#pragma once
#include "forward.h"

namespace linrope {
namespace {

// What remains of a query's gradient once the core gave its rotated part: `d` (F), turned back here in place.
struct QueryEnd {
  const Task& task;
  float* raw;  // scratch (F)

  // Returns dL/d den. `turned`, `grown` (or null) get the gradients of angle steps and log decay added.
  float operator()(const Rows& q, const Rows& dq, int64_t token, const float* phi, float* d, const float* z,
                   const float* cos, const float* sin, double den, float inverse, float* turned, float* grown) const {
    const Shape& s = task.s;
    const Call& c = task.c;
    turn<true>(s, d, cos, sin, 1, d);
    const double exact = grown ? product(phi, d, s.F) : 0;
    const float x = grown ? (float)exact : dot(phi, d, s.F);  // = gb num
    const bool constant = !c.normalize || (!c.add_eps && den < c.eps);
    const float delta = constant ? 0 : -x * inverse;
    if (turned)
      for (int p = 0; p < s.pairs; p++) turned[p] += phi[p] * d[s.half + p] - phi[s.half + p] * d[p];
    // <phi, dphi> = x + delta den; with the normalizer and no eps in it that is 0
    if (grown) *grown += (float)(exact + (delta == 0 ? 0 : delta * den));
    const float* from = phi;
    if (s.map == kSilu || s.map == kRelu2) features(s, q, token, kIdentity, raw), from = raw;
    for (int i = 0; i < s.F; i += W) {
      const vf y = load(d + i) + load(z + i) * delta;
      store(d + i, y * slope(s.map, load(from + i), load(phi + i)));
    }
    write_features(s, d, dq, token);
    return delta;
  }
};

struct BackwardQueries : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *x, *hat, *z, *d, *v, *v_t, *gb, *scores, *raw, *within, *k_angles, *q_angles;
    double* dens;
    Scratch(const Shape& s, Arena& a)
        : x(a.take<float>(C * s.F)), hat(a.take<float>(C * s.F)), z(a.take<float>(C * s.F)), d(a.take<float>(C * s.F)),
          v(a.take<float>(C * s.E)), v_t(a.take<float>(C * s.E)), gb(a.take<float>(C * s.E)),
          scores(a.take<float>(C * C)), raw(a.take<float>(s.F)), within(a.take<float>(s.F)),
          k_angles(a.take<float>(2 * C * s.half)), q_angles(a.take<float>(2 * C * s.half)), dens(a.take<double>(C)) {}
  };
  static size_t bytes(const Shape& s, int count) {
    return 4 * (4 * C * s.F + 3 * C * s.E + C * C + 2 * C + 2 * s.F + 4 * C * s.half) + 1024 +
           count * (size_t)(4 * s.F * s.E + 8 * s.F + 2 * s.angle_bytes() + 512);
  }
  const Scratch& w;
  const bool same;
  int64_t done = 0;
  float* S;  // S^T, (E, F)
  bool fresh;
  RunningSum sum;
  Decay decay;
  Angles k_turn, q_turn;

  BackwardQueries(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), same(c.key_positions.data == c.positions.data), S(arena.take<float>(s.F * s.E)),
        fresh(!ends.kv_in), sum(s.F, w.within, arena), decay(c, span),
        k_turn(c, s, span, c.key_positions, ends.angle_in, w.k_angles, arena),
        q_turn(c, s, span, c.positions, ends.angle_in, w.q_angles, arena) {
    const Fade first(span.begin < span.end ? decay.at(span.begin) : 0);
    state_in(s, ends.kv_in, S, true, first);
    sums_in(s, ends.z_in, sum.all, first.exact);
  }

  void advance() {
    const int64_t t = span.begin + done;
    const int rows = decay.plan(t, block_end(t) - t), F = s.F, E = s.E, half = s.half;
    const Angles& turns = same ? k_turn : q_turn;
    k_turn.forth(t, rows);
    if (!same) q_turn.forth(t, rows);
    key_features(t, 1, rows, w.x);
    sum.rows(w.x, rows, decay.grown, decay.kept, w.z);
    for (int i = 0; i < rows; i++) {
      prefetch(v, t + i, C, s.e);
      turn<false, NW * C>(s, w.x + i * F, k_turn.cos + i * half, k_turn.sin + i * half, decay.grown[i],
                           w.hat + i * NW);
      key_values(t + i, w.v + i * E, NW);
      if (c.d_log_decay) c.d_log_decay[key_index(t + i)] = 0;
      if (c.d_angle_steps) zero(angle_steps_at(t + i), c.pairs);
    }
    zero_up_to_four(w.v, rows, E);
    transpose(w.v, rows, E, w.v_t);
    const bool finite = all_finite(w.hat, rows, F);
    for (int r = 0; r < group; r++) queries(t, rows, r, turns, finite);
    done += rows;
    const bool more = t + rows < span.end, anchor = is_anchor(t + rows);
    if (!more && !ends.kv_out && !ends.z_out) return;
    const double next = more ? decay.at(t + rows) : 0;
    const Fade fade(anchor ? decay.sum : decay.sum + next);
    update(rows, E, F, w.v_t, w.hat, S, fresh, fade);
    sum.end(fade);
    fresh = false;
    if (!anchor) return;
    leave_anchor(t + rows, S, sum.all);
    const Fade past(next);
    fade_state(S, F * E, past), sum.fade(past);
  }
  void queries(int64_t t, int rows, int r, const Angles& turns, bool finite) {
    const Rows q = query_rows(c.q, r), g = query_rows(c.grad, r), dq = query_rows(c.dq, r);
    const int F = s.F, E = s.E, half = s.half;
    features(s, q, t, 1, rows, w.x);
    for (int i = 0; i < rows; i++) {
      prefetch(g, t + i, C, s.e), prefetch(dq, t + i, 0, s.f);
      const float *phi = w.x + i * F, *z = w.z + i * F;
      w.dens[i] = !c.normalize ? 1 : c.d_log_decay ? product(phi, z, F) : dot(phi, z, F);
      const float by = inverse((float)w.dens[i]);
      c.inverse[query_index(t + i, r)] = by;
      values(s, g, t + i, w.gb + i * E, NW, by);
    }
    emit({rows, E, F, w.gb, w.v_t, w.hat, fresh ? nullptr : S, decay.kept, finite, false, w.scores, w.d, F});
    const QueryEnd end{*this, w.raw};
    for (int i = 0; i < rows; i++) {
      const int64_t at = query_index(t + i, r);
      c.delta[at] = end(q, dq, t + i, w.x + i * F, w.d + i * F, w.z + i * F, turns.cos + i * half, turns.sin + i * half,
                        w.dens[i], c.inverse[at], angle_steps_at(t + i),
                        c.d_log_decay ? c.d_log_decay + key_index(t + i) : nullptr);
    }
  }
  void finish() {
    if (ends.kv_out) state_out(s, S, true, ends.kv_out);
    if (ends.z_out) sums_out(s, sum.all, ends.z_out);
  }
};

// The same where the state is that of all keys; the ends' `out` is the gradient of that state.
struct AnswerBackward : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *x, *hat, *hat_t, *d, *gb, *panels, *dens, *ones, *raw, *angles;
    Scratch(const Shape& s, Arena& a)
        : x(a.take<float>(C * s.F)), hat(a.take<float>(C * s.F)), hat_t(a.take<float>(C * s.F)),
          d(a.take<float>(C * s.F)), gb(a.take<float>(C * s.E)), panels(a.take<float>(C * s.E)),
          dens(a.take<float>(C)), ones(a.take<float>(C)), raw(a.take<float>(s.F)),
          angles(a.take<float>(2 * C * s.half)) {
      for (int i = 0; i < C; i++) ones[i] = 1;
    }
  };
  static size_t bytes(const Shape& s, int count) {
    return 4 * (4 * C * s.F + 2 * C * s.E + 2 * C + s.F + 2 * C * s.half) + 1024 +
           count * (size_t)(8 * s.F * s.E + 20 * s.F + s.angle_bytes() + 512);
  }
  const Scratch& w;
  int64_t done = 0;
  float *S, *dS, *z;
  double* dz;
  Angles turns;

  AnswerBackward(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), S(arena.take<float>(s.F * s.E)), dS(arena.take<float>(s.F * s.E)),
        z(arena.take<float>(s.F)), dz(arena.take<double>(s.F)),
        turns(c, s, span, c.positions, ends.angle_in, w.angles, arena) {
    state_in(s, ends.kv_in, S, true, Fade());
    sums_in(s, ends.z_in, dz, 1);
    for (int i = 0; i < s.F; i++) z[i] = (float)dz[i], dz[i] = 0;
    zero(dS, s.F * s.E);
  }
  void advance() {
    const int64_t t = span.begin + done;
    const int rows = span.end - t < C ? (int)(span.end - t) : C, F = s.F, E = s.E, half = s.half;
    turns.forth(t, rows);
    if (c.d_angle_steps)
      for (int i = 0; i < rows; i++) zero(angle_steps_at(t + i), c.pairs);
    for (int r = 0; r < group; r++) {
      const Rows q = query_rows(c.q, r), g = query_rows(c.grad, r), dq = query_rows(c.dq, r);
      features(s, q, t, 1, rows, w.x);
      for (int i = 0; i < rows; i++) {
        prefetch(g, t + i, C, s.e), prefetch(dq, t + i, 0, s.f);
        w.dens[i] = c.normalize ? dot(w.x + i * F, z, F) : 1;
        values(s, g, t + i, w.gb + i * E, NW, inverse(w.dens[i]));
        spread(w.gb + i * E, E, w.panels + i * NW, NW * C);
        turn<false>(s, w.x + i * F, turns.cos + i * half, turns.sin + i * half, 1, w.hat + i * F);
      }
      zero_up_to_four(w.hat, rows, F);
      transpose(w.hat, rows, F, w.hat_t);
      emit({rows, E, F, w.gb, nullptr, nullptr, S, w.ones, true, false, nullptr, w.d, F});
      const QueryEnd end{*this, w.raw};
      for (int i = 0; i < rows; i++) {
        const float delta = end(q, dq, t + i, w.x + i * F, w.d + i * F, z, turns.cos + i * half, turns.sin + i * half,
                                w.dens[i], inverse(w.dens[i]), angle_steps_at(t + i), nullptr);
        for (int f = 0; f < F; f++) dz[f] += delta * w.x[i * F + f];
      }
      update(rows, F, E, w.hat_t, w.panels, dS, false, Fade());
    }
    done += rows;
  }
  void finish() {
    state_out(s, dS, false, ends.kv_out);
    sums_out(s, dz, ends.z_out);
  }
};

}  // namespace
}  // namespace linrope
