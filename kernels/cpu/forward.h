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

void forward(const Call& c, const Span& span, const Ends& ends, bool emit_out) {
  constexpr int C = kChunk;
  const Shape shape(c);
  const int F = shape.F, E = shape.E;
  Task task(c, span, 5 * C * F + 2 * C * E + C * C + F * E + C + 2 * F);
  const Shape& s = task.s;
  float *psi = task.floats(C * F), *hat = task.floats(C * F), *hat_t = task.floats(C * F), *z = task.floats(C * F);
  float *phi = task.floats(C * F), *v = task.floats(C * E), *result = task.floats(C * E);
  float *scores = task.floats(C * C), *S = task.floats(F * E), *scale = task.floats(C);
  RunningSum sum(F, task.arena);
  Decay decay(c, span);
  Angles k_turn(c, s, span, c.key_positions, ends.angle_in, task.arena);
  const bool same = c.key_positions.data == c.positions.data;
  Angles q_turn(c, s, span, c.positions, ends.angle_in, task.arena);
  const int queries = emit_out ? task.group : 0;

  const Fade first(span.begin < span.end ? decay.at(span.begin) : 0);
  state_in(s, ends.kv_in, S, false, first);
  sums_in(s, ends.z_in, sum.all, first.exact);
  bool fresh = !ends.kv_in;
  for (int64_t t = span.begin, rows; t < span.end; t += rows) {
    rows = decay.plan(t, span.end - t, 1);
    const Angles& turns = same ? k_turn : q_turn;
    k_turn.forth(t, rows);
    if (!same) q_turn.forth(t, rows);
    sum.begin();
    task.key_features(t, 1, rows, psi);
    sum.rows(psi, rows, decay.grown, decay.kept, z);
    for (int i = 0; i < rows; i++) {
      prefetch(task.v, t + i, C, s.e);
      turn<false>(s, psi + i * F, k_turn.cos + i * s.half, k_turn.sin + i * s.half, decay.grown[i], hat + i * F);
      task.key_values(t + i, v + i * NW, NW * C);
    }
    zero_up_to_four(hat, rows, F);
    transpose(hat, rows, F, hat_t);
    const bool finite = queries ? all_finite(v, rows, E) : true;
    for (int r = 0; r < queries; r++) {
      const Rows q = task.query_rows(c.q, r), out = task.query_rows(c.out, r);
      const Output to(s, out, t, result);
      features(s, q, t, 1, rows, psi);
      for (int i = 0; i < rows; i++) {
        prefetch(out, t + i, 0, s.e);
        scale[i] = decay.kept[i] * task.inverse(c.normalize ? dot(psi + i * F, z + i * F, F) : 1);
        turn<false>(s, psi + i * F, turns.cos + i * s.half, turns.sin + i * s.half, 1, phi + i * F);
      }
      emit({(int)rows, F, E, phi, hat_t, v, fresh ? nullptr : S, scale, finite, false, scores, to.rows, to.stride});
      to.write(s, out, t, rows);
    }
    const bool more = t + rows < span.end;
    if (!more && !ends.kv_out && !ends.z_out) break;
    const Fade fade(decay.sum + (more ? decay.at(t + rows) : 0));
    update(rows, F, E, hat_t, v, S, fresh, fade);
    sum.end(fade);
    fresh = false;
  }
  if (ends.kv_out) state_out(s, S, false, ends.kv_out);
  if (ends.z_out) sums_out(s, sum.all, ends.z_out);
}

// Every query of the span from the state of all keys (not causal)
void answer(const Call& c, const Span& span, const Ends& ends) {
  constexpr int C = kChunk;
  const Shape shape(c);
  const int F = shape.F, E = shape.E;
  Task task(c, span, 2 * C * F + C * E + F * E + C + 4 * F);
  const Shape& s = task.s;
  float *phi = task.floats(C * F), *result = task.floats(C * E), *S = task.floats(F * E), *scale = task.floats(C);
  float *x = task.floats(C * F), *z = task.floats(F);
  double* sum = task.arena.take<double>(F);
  Angles turns(c, s, span, c.positions, ends.angle_in, task.arena);
  state_in(s, ends.kv_in, S, false, Fade());
  sums_in(s, ends.z_in, sum, 1);
  for (int i = 0; i < F; i++) z[i] = (float)sum[i];
  for (int64_t t = span.begin; t < span.end; t += C) {
    const int rows = span.end - t < C ? (int)(span.end - t) : C;
    turns.forth(t, rows);
    for (int r = 0; r < task.group; r++) {
      const Rows q = task.query_rows(c.q, r), out = task.query_rows(c.out, r);
      const Output to(s, out, t, result);
      features(s, q, t, 1, rows, x);
      for (int i = 0; i < rows; i++) {
        prefetch(out, t + i, 0, s.e);
        scale[i] = task.inverse(c.normalize ? dot(x + i * F, z, F) : 1);
        turn<false>(s, x + i * F, turns.cos + i * s.half, turns.sin + i * s.half, 1, phi + i * F);
      }
      emit({rows, F, E, phi, nullptr, nullptr, S, scale, true, false, nullptr, to.rows, to.stride});
      to.write(s, out, t, rows);
    }
  }
}

}  // namespace
}  // namespace linrope
