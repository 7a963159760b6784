// out, token by token in chunks:  out_i = kept_i (phi^_i S + sum_j<=i grown_j <phi^_i, psi^_j> v_j) / den_i
#pragma once
#include "task.h"

namespace linrope {
namespace {

struct Output {  // rows of results on their way to memory: in place where that is float32 of whole panels
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
    Scratch(const Shape& s, Arena& a)
        : x(a.take<float>(C * s.F)), hat(a.take<float>(C * s.F)), hat_t(a.take<float>(C * s.F)),
          z(a.take<float>(C * s.F)), v(a.take<float>(C * s.E)), result(a.take<float>(C * s.E)),
          scores(a.take<float>(C * C)), scale(a.take<float>(C)), within(a.take<float>(s.F)),
          k_angles(a.take<float>(2 * C * s.half)), q_angles(a.take<float>(2 * C * s.half)) {}
  };
  static size_t bytes(const Shape& s, int count) {
    return 4 * (4 * C * s.F + 2 * C * s.E + C * C + C + s.F + 4 * C * s.half) + 1024 +
           count * (size_t)(4 * s.F * s.E + 8 * s.F + 2 * s.angle_bytes() + 512);
  }
  const Scratch& w;
  const int queries;
  const bool same;  // angles of queries and keys
  int64_t done = 0;
  float* S;
  bool fresh;
  RunningSum sum;
  Decay decay;
  Angles k_turn, q_turn;

  Forward(const Call& c, const Span& span, const Ends& ends, bool emit_out, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), queries(emit_out ? group : 0), same(c.key_positions.data == c.positions.data),
        S(arena.take<float>(s.F * s.E)), fresh(!ends.kv_in), sum(s.F, w.within, arena), decay(c, span),
        k_turn(c, s, span, c.key_positions, ends.angle_in, w.k_angles, arena),
        q_turn(c, s, span, c.positions, ends.angle_in, w.q_angles, arena) {
    const Fade first(span.begin < span.end ? decay.at(span.begin) : 0);
    state_in(s, ends.kv_in, S, false, first);
    sums_in(s, ends.z_in, sum.all, first.exact);
  }

  void advance() {
    const int64_t t = span.begin + done;
    const int rows = decay.plan(t, block_end(t) - t), F = s.F, E = s.E, half = s.half;
    const Angles& turns = same ? k_turn : q_turn;
    k_turn.forth(t, rows);
    if (!same && queries) q_turn.forth(t, rows);  // keys alone: there may be fewer queries than these
    key_features(t, 1, rows, w.x);
    sum.rows(w.x, rows, decay.grown, decay.kept, w.z);
    for (int i = 0; i < rows; i++) {
      prefetch(v, t + i, C, s.e);
      turn<false>(s, w.x + i * F, k_turn.cos + i * half, k_turn.sin + i * half, decay.grown[i], w.hat + i * F);
      key_values(t + i, w.v + i * NW, NW * C);
    }
    zero_up_to_four(w.hat, rows, F);
    transpose(w.hat, rows, F, w.hat_t);
    const bool finite = queries ? all_finite(w.v, rows, E) : true;
    for (int r = 0; r < queries; r++) {
      const Rows q = query_rows(c.q, r), out = query_rows(c.out, r);
      const Output to(s, out, t, w.result);
      features(s, q, t, 1, rows, w.x);
      for (int i = 0; i < rows; i++) {
        prefetch(out, t + i, 0, s.e);
        w.scale[i] = decay.kept[i] * inverse(c.normalize ? dot(w.x + i * F, w.z + i * F, F) : 1);
        turn<false>(s, w.x + i * F, turns.cos + i * half, turns.sin + i * half, 1, w.hat + i * F);
      }
      emit({rows, F, E, w.hat, w.hat_t, w.v, fresh ? nullptr : S, w.scale, finite, false, w.scores, to.rows, to.stride});
      to.write(s, out, t, rows);
    }
    done += rows;
    const bool more = t + rows < span.end, anchor = is_anchor(t + rows);
    if (!more && !ends.kv_out && !ends.z_out) return;
    const double next = more ? decay.at(t + rows) : 0;
    const Fade fade(anchor ? decay.sum : decay.sum + next);
    update(rows, F, E, w.hat_t, w.v, S, fresh, fade);
    sum.end(fade);
    fresh = false;
    if (!anchor) return;
    leave_anchor(t + rows, S, sum.all);
    const Fade past(next);
    fade_state(S, F * E, past), sum.fade(past);
  }
  void finish() {
    if (ends.kv_out) state_out(s, S, false, ends.kv_out);
    if (ends.z_out) sums_out(s, sum.all, ends.z_out);
  }
};

// Every query of the span from the state of all keys (not causal)
struct Answer : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *x, *hat, *result, *scale, *angles;
    Scratch(const Shape& s, Arena& a)
        : x(a.take<float>(C * s.F)), hat(a.take<float>(C * s.F)), result(a.take<float>(C * s.E)),
          scale(a.take<float>(C)), angles(a.take<float>(2 * C * s.half)) {}
  };
  static size_t bytes(const Shape& s, int count) {
    return 4 * (2 * C * s.F + C * s.E + C + 2 * C * s.half) + 1024 +
           count * (size_t)(4 * s.F * s.E + 12 * s.F + s.angle_bytes() + 512);
  }
  const Scratch& w;
  int64_t done = 0;
  float *S, *z;
  Angles turns;

  Answer(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), S(arena.take<float>(s.F * s.E)), z(arena.take<float>(s.F)),
        turns(c, s, span, c.positions, ends.angle_in, w.angles, arena) {
    double* sum = arena.take<double>(s.F);
    state_in(s, ends.kv_in, S, false, Fade());
    sums_in(s, ends.z_in, sum, 1);
    for (int i = 0; i < s.F; i++) z[i] = (float)sum[i];
  }
  void advance() {
    const int64_t t = span.begin + done;
    const int rows = span.end - t < C ? (int)(span.end - t) : C, F = s.F, half = s.half;
    turns.forth(t, rows);
    for (int r = 0; r < group; r++) {
      const Rows q = query_rows(c.q, r), out = query_rows(c.out, r);
      const Output to(s, out, t, w.result);
      features(s, q, t, 1, rows, w.x);
      for (int i = 0; i < rows; i++) {
        prefetch(out, t + i, 0, s.e);
        w.scale[i] = inverse(c.normalize ? dot(w.x + i * F, z, F) : 1);
        turn<false>(s, w.x + i * F, turns.cos + i * half, turns.sin + i * half, 1, w.hat + i * F);
      }
      emit({rows, F, s.E, w.hat, nullptr, nullptr, S, w.scale, true, false, nullptr, to.rows, to.stride});
      to.write(s, out, t, rows);
    }
    done += rows;
  }
  void finish() {}
};

}  // namespace
}  // namespace linrope
