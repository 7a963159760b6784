// The forward pass, chunk by chunk:  out_i = e^(D_i) (phi^_i S + sum_(j <= i) e^(-D_j) <phi^_i, psi^_j> v_j) / den_i
#pragma once
#include "task.h"

namespace linrope {
namespace {

// Rows of results: written in place if the output is float32 and has whole panels, else copied from scratch
struct Output {
  float* rows;
  int64_t stride;
  bool direct;
  Output(const Shape& s, const Rows& to, int64_t token, float* scratch)
      : rows(scratch), stride(s.E), direct(to.type == kFloat32 && s.E == s.e) {
    if (direct) rows = (float*)to.at(token), stride = to.stride / 4;
  }
  void write(const Shape& s, const Rows& to, int64_t token, int count) const {
    if (!direct)
      for (int i = 0; i < count; i++) write_values(s, rows + i * stride, to, token + i);
  }
};

struct Forward : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *x, *hat, *hat_t, *z, *v, *result, *scores, *scale, *within, *k_angles, *q_angles;
    tiles::Factors* factors;
    Scratch(const Shape& s, Arena& a)
        : x(a.take<float>(C * s.F)), hat(a.take<float>(C * s.F)), hat_t(a.take<float>(C * s.F)),
          z(a.take<float>(C * s.F)), v(a.take<float>(C * s.E)), result(a.take<float>(C * s.E)),
          scores(a.take<float>(C * C)), scale(a.take<float>(C)), within(a.take<float>(s.F)),
          k_angles(a.take<float>(2 * C * s.half)), q_angles(a.take<float>(2 * C * s.half)),
          factors(a.take<tiles::Factors>(1)) {}
  };
  static size_t bytes(const Shape& s, int count) {
    return sizeof(tiles::Factors) + 4 * (4 * C * s.F + 2 * C * s.E + C * C + C + s.F + 4 * C * s.half) + 1024 +
           count * (size_t)(4 * s.F * s.E + 8 * s.F + 2 * s.angle_bytes() + 512);
  }
  const Scratch& w;
  const int query_heads;
  const bool same_angles;  // queries and keys have the same angles
  const bool want_z;
  int64_t done = 0;
  float* S;
  bool fresh;
  RunningSum z_sum;
  Decay decay;
  Angles k_angle, q_angle;

  Forward(const Call& c, const Span& span, const Ends& ends, bool want_output, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), query_heads(want_output ? group : 0),
        same_angles(same_positions(c)), want_z(c.normalize || ends.z_out || ends.anchors),
        S(arena.take<float>(s.F * s.E)), fresh(!ends.kv_in), z_sum(s.F, w.within, arena), decay(c, span),
        k_angle(c, s, span, c.key_positions, ends.angle_in, w.k_angles, arena),
        q_angle(c, s, span, c.positions, ends.angle_in, w.q_angles, arena) {
    const DecayFactor first_factor(span.begin < span.end ? decay.at(span.begin) : 0);
    state_in(s, ends.kv_in, S, false, first_factor);
    z_in(s, ends.z_in, z_sum.total, first_factor.exact);
  }

  void advance() {
    const int64_t t = span.begin + done;
    const int rows = decay.plan(t, anchor_after(t) - t), F = s.F, E = s.E, half = s.half;
    const Angles& query_angles = same_angles ? k_angle : q_angle;
    k_angle.forward(t, rows);
    // Without query heads the sweep runs over keys alone, and c.positions may have fewer entries than there are keys.
    if (!same_angles && query_heads) q_angle.forward(t, rows);
    key_features(t, 1, rows, w.x);
    if (want_z) z_sum.rows(w.x, rows, decay.exp_minus_D, decay.exp_D, w.z);
    for (int i = 0; i < rows; i++) {
      prefetch(v, t + i, C, s.e);
      rotate<false>(s, w.x + i * F, k_angle.cos + i * half, k_angle.sin + i * half, decay.exp_minus_D[i],
                    w.hat + i * F);
      key_values(t + i, w.v + i * s.value_row.panel, NW * C);
    }
    zero_to_multiple_of_four(w.hat, rows, F);
    transpose(w.hat, rows, F, w.hat_t);
    const Operands keys = operands(rows, s.feature_row, s.value_row, w.hat_t, w.v, w.factors);
    const bool finite = query_heads ? all_finite(w.v, rows, s.value_row) : true;
    for (int r = 0; r < query_heads; r++) {
      const Rows q = queries(r), out = query_rows(c.out, r);
      const Output to(s, out, t, w.result);
      features(s, q, t, 1, rows, w.x);
      for (int i = 0; i < rows; i++) {
        prefetch(out, t + i, 0, s.e);
        w.scale[i] = decay.exp_D[i] * inverse_den(c.normalize ? dot(w.x + i * F, w.z + i * F, F) : 1);
        rotate<false>(s, w.x + i * F, query_angles.cos + i * half, query_angles.sin + i * half, 1, w.hat + i * F);
      }
      multiply_chunk({keys, w.hat, fresh ? nullptr : S, w.scale, finite, false, w.scores, to.rows, to.stride});
      to.write(s, out, t, rows);
    }
    done += rows;
    const bool more = t + rows < span.end, anchor = is_anchor(t + rows);
    if (!more && !ends.kv_out && !ends.z_out) return;
    const double next = more ? decay.at(t + rows) : 0;
    // An anchor is the state before the next token's own decay.
    const DecayFactor factor(anchor ? decay.sum : decay.sum + next);
    update(keys, S, fresh, factor);
    if (want_z) z_sum.end_chunk(factor);
    fresh = false;
    if (!anchor) return;
    save_anchor(t + rows, S, z_sum.total);
    const DecayFactor next_factor(next);
    decay_state(S, F * E, next_factor), z_sum.decay(next_factor);
  }
  void finish() {
    if (ends.kv_out) state_out(s, S, false, ends.kv_out);
    if (ends.z_out) z_out(s, z_sum.total, ends.z_out);
  }
};

// Bidirectional: every query of the span reads the state of all keys
struct Bidirectional : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *x, *hat, *result, *scale, *angles;
    tiles::Factors* factors;
    Scratch(const Shape& s, Arena& a)
        : x(a.take<float>(C * s.F)), hat(a.take<float>(C * s.F)), result(a.take<float>(C * s.E)),
          scale(a.take<float>(C)), angles(a.take<float>(2 * C * s.half)), factors(a.take<tiles::Factors>(1)) {}
  };
  static size_t bytes(const Shape& s, int count) {
    return sizeof(tiles::Factors) + 4 * (2 * C * s.F + C * s.E + C + 2 * C * s.half) + 1024 +
           count * (size_t)(4 * s.F * s.E + 12 * s.F + s.angle_bytes() + 512);
  }
  const Scratch& w;
  int64_t done = 0;
  float *S, *z;
  Angles query_angles;

  Bidirectional(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), S(arena.take<float>(s.F * s.E)), z(arena.take<float>(s.F)),
        query_angles(c, s, span, c.positions, ends.angle_in, w.angles, arena) {
    double* z_sum = arena.take<double>(s.F);
    state_in(s, ends.kv_in, S, false, DecayFactor());
    z_in(s, ends.z_in, z_sum, 1);
    for (int i = 0; i < s.F; i++) z[i] = (float)z_sum[i];
  }
  void advance() {
    const int64_t t = span.begin + done;
    const int rows = span.end - t < C ? (int)(span.end - t) : C, F = s.F, half = s.half;
    query_angles.forward(t, rows);
    const Operands no_keys = operands(rows, s.feature_row, s.value_row, nullptr, nullptr, w.factors);
    for (int r = 0; r < group; r++) {
      const Rows q = queries(r), out = query_rows(c.out, r);
      const Output to(s, out, t, w.result);
      features(s, q, t, 1, rows, w.x);
      for (int i = 0; i < rows; i++) {
        prefetch(out, t + i, 0, s.e);
        w.scale[i] = inverse_den(c.normalize ? dot(w.x + i * F, z, F) : 1);
        rotate<false>(s, w.x + i * F, query_angles.cos + i * half, query_angles.sin + i * half, 1, w.hat + i * F);
      }
      multiply_chunk({no_keys, w.hat, S, w.scale, true, false, nullptr, to.rows, to.stride});
      to.write(s, out, t, rows);
    }
    done += rows;
  }
  void finish() {}
};

}  // namespace
}  // namespace linrope
