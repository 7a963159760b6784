// Gradients. With gb = dL/d out / den, in two sweeps, each of the product core:
//   first token to last    dphi^ = gb S^T + tril(gb v^T) psi^               (and den, delta = dL/d den)
//   last token to first    dv = psi^ dS + tril'(psi^ phi^T) gb              dpsi^ = v dS^T + tril'(v gb^T) phi^
#pragma once
#include "forward.h"

namespace linrope {
namespace {

// What remains of a query's gradient once the core gave its rotated part: `d` (F), turned back here in place.
struct QueryEnd {
  Task& task;
  float *phi, *raw;  // features; scratch for the numbers they were made of

  // Returns dL/d den. `turned`, `grown` (or null) get the gradients of angle steps and log decay added.
  float operator()(const Rows& q, const Rows& dq, int64_t token, float* d, const float* z, const float* cos,
                   const float* sin, float den, float inverse, float* turned, float* grown) const {
    const Shape& s = task.s;
    const Call& c = task.c;
    turn<true>(s, d, cos, sin, 1, d);
    const float x = dot(phi, d, s.F);  // = gb num
    const bool constant = !c.normalize || (!c.add_eps && den < c.eps);
    const float delta = constant ? 0 : -x * inverse;
    if (turned)
      for (int p = 0; p < s.pairs; p++) turned[p] += phi[p] * d[s.half + p] - phi[s.half + p] * d[p];
    // <phi, dphi> = x + delta den; with the normalizer and no eps in it that is 0
    if (grown) *grown += constant ? x : c.add_eps ? x * c.eps * inverse : 0;
    if (s.map == kSilu || s.map == kRelu2) features(s, q, token, kIdentity, raw);
    else memcpy(raw, phi, 4 * s.F);
    for (int i = 0; i < s.F; i += W) {
      const vf y = load(d + i) + load(z + i) * delta;
      store(d + i, y * slope(s.map, load(raw + i), load(phi + i)));
    }
    write_features(s, d, dq, token);
    return delta;
  }
};

void backward_queries(const Call& c, const Span& span, const Ends& ends, bool emit_out) {
  constexpr int C = kChunk;
  const Shape shape(c);
  const int F = shape.F, E = shape.E;
  Task task(c, span, 6 * C * F + 3 * C * E + C * C + F * E + 2 * C + 4 * F);
  const Shape& s = task.s;
  float *phi = task.floats(C * F), *z = task.floats(C * F), *hat = task.floats(C * F), *d = task.floats(C * F);
  float *v = task.floats(C * E), *v_t = task.floats(C * E), *gb = task.floats(C * E), *scores = task.floats(C * C);
  float *S = task.floats(F * E), *x = task.floats(C * F), *raw = task.floats(F), *dens = task.floats(C);
  RunningSum sum(F, task.arena);
  Decay decay(c, span);
  Angles k_turn(c, s, span, c.key_positions, ends.angle_in, task.arena);
  const bool same = c.key_positions.data == c.positions.data;
  Angles q_turn(c, s, span, c.positions, ends.angle_in, task.arena);
  const int queries = emit_out ? task.group : 0;

  const Fade first(span.begin < span.end ? decay.at(span.begin) : 0);
  state_in(s, ends.kv_in, S, true, first);
  sums_in(s, ends.z_in, sum.all, first.exact);
  bool fresh = !ends.kv_in;
  for (int64_t t = span.begin, rows; t < span.end; t += rows) {
    rows = decay.plan(t, span.end - t, 1);
    const Angles& turns = same ? k_turn : q_turn;
    k_turn.forth(t, rows);
    if (!same) q_turn.forth(t, rows);
    sum.begin();
    task.key_features(t, 1, rows, x);
    sum.rows(x, rows, decay.grown, decay.kept, z);
    for (int i = 0; i < rows; i++) {
      prefetch(task.v, t + i, C, s.e);
      turn<false, NW * C>(s, x + i * F, k_turn.cos + i * s.half, k_turn.sin + i * s.half, 1, hat + i * NW);
      task.key_values(t + i, v + i * E, NW, decay.grown[i]);
      if (queries && c.d_log_decay) c.d_log_decay[task.key_index(t + i)] = 0;
      if (queries && c.d_angle_steps) zero(c.d_angle_steps + task.key_index(t + i) * c.pairs, c.pairs);
    }
    zero_up_to_four(v, rows, E);
    transpose(v, rows, E, v_t);
    const bool finite = queries ? all_finite(hat, rows, F) : true;
    for (int r = 0; r < queries; r++) {
      const Rows q = task.query_rows(c.q, r), g = task.query_rows(c.grad, r), dq = task.query_rows(c.dq, r);
      features(s, q, t, 1, rows, phi);
      for (int i = 0; i < rows; i++) {
        prefetch(g, t + i, C, s.e), prefetch(dq, t + i, 0, s.f);
        dens[i] = c.normalize ? dot(phi + i * F, z + i * F, F) : 1;
        const float inverse = task.inverse(dens[i]);
        c.inverse[task.query_index(t + i, r)] = inverse;
        values(s, g, t + i, gb + i * E, NW, inverse);
      }
      emit({(int)rows, E, F, gb, v_t, hat, fresh ? nullptr : S, decay.kept, finite, false, scores, d, F});
      for (int i = 0; i < rows; i++) {
        const int64_t at = task.query_index(t + i, r), key = task.key_index(t + i);
        c.delta[at] = QueryEnd{task, phi + i * F, raw}(
            q, dq, t + i, d + i * F, z + i * F, turns.cos + i * s.half, turns.sin + i * s.half, dens[i], c.inverse[at],
            c.d_angle_steps ? c.d_angle_steps + key * c.pairs : nullptr, c.d_log_decay ? c.d_log_decay + key : nullptr);
      }
    }
    const bool more = t + rows < span.end;
    if (!more && !ends.kv_out && !ends.z_out) break;
    const Fade fade(decay.sum + (more ? decay.at(t + rows) : 0));
    update(rows, E, F, v_t, hat, S, fresh, fade);
    sum.end(fade);
    fresh = false;
  }
  if (ends.kv_out) state_out(s, S, true, ends.kv_out);
  if (ends.z_out) sums_out(s, sum.all, ends.z_out);
}

// The same where the state is that of all keys; the ends' `out` is the gradient of that state.
void answer_backward(const Call& c, const Span& span, const Ends& ends) {
  constexpr int C = kChunk;
  const Shape shape(c);
  const int F = shape.F, E = shape.E;
  Task task(c, span, 4 * C * F + 2 * C * E + 2 * F * E + 2 * C + 4 * F);
  const Shape& s = task.s;
  float *phi = task.floats(C * F), *hat = task.floats(C * F), *hat_t = task.floats(C * F), *d = task.floats(C * F);
  float *gb = task.floats(C * E), *panels = task.floats(C * E), *S = task.floats(F * E), *dS = task.floats(F * E);
  float *z = task.floats(F), *raw = task.floats(F), *dens = task.floats(C), *ones = task.floats(C);
  double *sum = task.arena.take<double>(F), *dz = task.arena.take<double>(F);
  Angles turns(c, s, span, c.positions, ends.angle_in, task.arena);
  state_in(s, ends.kv_in, S, true, Fade());
  sums_in(s, ends.z_in, sum, 1);
  for (int i = 0; i < F; i++) z[i] = (float)sum[i], dz[i] = 0;
  for (int i = 0; i < C; i++) ones[i] = 1;
  zero(dS, F * E);
  for (int64_t t = span.begin; t < span.end; t += C) {
    const int rows = span.end - t < C ? (int)(span.end - t) : C;
    turns.forth(t, rows);
    if (c.d_angle_steps)
      for (int i = 0; i < rows; i++) zero(c.d_angle_steps + task.key_index(t + i) * c.pairs, c.pairs);
    for (int r = 0; r < task.group; r++) {
      const Rows q = task.query_rows(c.q, r), g = task.query_rows(c.grad, r), dq = task.query_rows(c.dq, r);
      features(s, q, t, 1, rows, phi);
      for (int i = 0; i < rows; i++) {
        prefetch(g, t + i, C, s.e), prefetch(dq, t + i, 0, s.f);
        dens[i] = c.normalize ? dot(phi + i * F, z, F) : 1;
        values(s, g, t + i, gb + i * E, NW, task.inverse(dens[i]));
        spread(gb + i * E, E, panels + i * NW, NW * C);
        turn<false>(s, phi + i * F, turns.cos + i * s.half, turns.sin + i * s.half, 1, hat + i * F);
      }
      zero_up_to_four(hat, rows, F);
      transpose(hat, rows, F, hat_t);
      emit({rows, E, F, gb, nullptr, nullptr, S, ones, true, false, nullptr, d, F});
      for (int i = 0; i < rows; i++) {
        float* turned = c.d_angle_steps ? c.d_angle_steps + task.key_index(t + i) * c.pairs : nullptr;
        const float delta = QueryEnd{task, phi + i * F, raw}(
            q, dq, t + i, d + i * F, z, turns.cos + i * s.half, turns.sin + i * s.half, dens[i], task.inverse(dens[i]),
            turned, nullptr);
        for (int f = 0; f < F; f++) dz[f] += delta * phi[i * F + f];
      }
      update(rows, F, E, hat_t, panels, dS, false, Fade());
    }
  }
  state_out(s, dS, false, ends.kv_out);
  sums_out(s, dz, ends.z_out);
}

void backward_keys(const Call& c, const Span& span, const Ends& ends, double* sums, bool emit_out) {
  constexpr int C = kChunk;
  const Shape shape(c);
  const int F = shape.F, E = shape.E;
  Task task(c, span, 10 * C * F + 6 * C * E + C * C + 2 * F * E + 8 * F);
  const Shape& s = task.s;
  float *psi = task.floats(C * F), *psi_hat = task.floats(C * F), *raw = task.floats(F);
  float *scaled = task.floats(C * F), *phi_t = task.floats(C * F), *phi_hat = task.floats(C * F);
  float *weights = task.floats(C * F), *d = task.floats(C * F), *v = task.floats(C * E);
  float *gb = task.floats(C * E), *gb_t = task.floats(C * E), *panels = task.floats(C * E), *dv = task.floats(C * E);
  float *scores = task.floats(C * C), *S = task.floats(F * E), *S_t = task.floats(F * E);
  RunningSum sum(F, task.arena);
  Decay decay(c, span);
  Angles k_turn(c, s, span, c.key_positions, ends.angle_in, task.arena);
  const bool same = c.key_positions.data == c.positions.data;
  Angles q_turn(c, s, span, c.positions, ends.angle_in, task.arena);
  for (Angles* turns : {&k_turn, &q_turn})
    if (turns->steps.base)
      for (int64_t t = span.begin; t < span.end; t++) turns->steps.add(t, 1, turns->sum);
  const int queries = c.causal && c.grad.data ? task.group : 0;
  const bool by_decay = emit_out && c.d_log_decay, by_steps = emit_out && c.d_angle_steps;
  if (by_decay && !queries)
    for (int64_t t = span.begin; t < span.end; t++) c.d_log_decay[task.key_index(t)] = 0;
  if (by_steps && !c.grad.data)
    for (int64_t t = span.begin; t < span.end; t++) zero(c.d_angle_steps + task.key_index(t) * c.pairs, c.pairs);

  state_in(s, ends.kv_in, S, false, Fade());
  state_in(s, ends.kv_in, S_t, true, Fade());
  sums_in(s, ends.z_in, sum.all, 1);
  const Rows dk_rows = task.key_rows(c.dk), dv_rows = task.key_rows(c.dv);
  for (int64_t last = span.end - 1, rows; last >= span.begin; last -= rows) {
    rows = decay.plan(last, last - span.begin + 1, -1);
    const int64_t low = last - rows + 1;
    const Angles& turns = same ? k_turn : q_turn;
    k_turn.back(low, rows);
    if (!same && queries) q_turn.back(low, rows);
    const auto angle = [&](const float* table, int i) { return table + (rows - 1 - i) * s.half; };
    if (emit_out) task.key_features(last, -1, rows, psi);
    if (emit_out)
      for (int i = 0; i < rows; i++) {
        prefetch(task.v, last - i, -C, s.e);
        turn<false>(s, psi + i * F, angle(k_turn.cos, i), angle(k_turn.sin, i), 1, psi_hat + i * F);
        task.key_values(last - i, v + i * E, NW);
      }
    if (!queries) zero(weights, rows * F);
    const Fade fade(decay.sum + decay.at(low));
    for (int r = 0; r < queries; r++) {
      const Rows q = task.query_rows(c.q, r), g = task.query_rows(c.grad, r);
      features(s, q, last, -1, rows, scaled);
      for (int i = 0; i < rows; i++) {
        const int64_t token = last - i, at = task.query_index(token, r);
        prefetch(g, token, -C, s.e);
        float *x = scaled + i * F, *weight = weights + i * F;
        const float delta = c.delta[at], grown = decay.grown[i];
        for (int f = 0; f < F; f += W)
          store(weight + f, r ? load(weight + f) + load(x + f) * delta : load(x + f) * delta);
        turn<false, NW * C>(s, x, angle(turns.cos, i), angle(turns.sin, i), 1, phi_hat + i * NW);
        values(s, g, token, panels + i * NW, NW * C, c.inverse[at]);
        for (int f = 0; f < F; f += W) store(x + f, load(linrope::at(phi_hat + i * NW, NW * C, f)) * grown);
        for (int e = 0; e < E; e += W) store(gb + i * E + e, load(linrope::at(panels + i * NW, NW * C, e)) * grown);
      }
      zero_up_to_four(scaled, rows, F), zero_up_to_four(gb, rows, E);
      transpose(scaled, rows, F, phi_t), transpose(gb, rows, E, gb_t);
      const bool more = r > 0;
      if (emit_out) {
        const bool fine_v = all_finite(panels, rows, E), fine_k = all_finite(phi_hat, rows, F);
        emit({(int)rows, F, E, psi_hat, phi_t, panels, more ? nullptr : S, decay.kept, fine_v, more, scores, dv, E});
        emit({(int)rows, E, F, v, gb_t, phi_hat, more ? nullptr : S_t, decay.kept, fine_k, more, scores, d, F});
      }
      const Fade after = r == queries - 1 ? fade : Fade();
      update(rows, F, E, phi_t, panels, S, false, after);
      if (emit_out) update(rows, E, F, gb_t, phi_hat, S_t, false, after);
    }
    if (!queries && emit_out) {
      emit({(int)rows, F, E, psi_hat, nullptr, nullptr, S, decay.kept, true, false, nullptr, dv, E});
      emit({(int)rows, E, F, v, nullptr, nullptr, S_t, decay.kept, true, false, nullptr, d, F});
    }
    if (!queries && fade.kind != Fade::kNothing)
      for (int i = 0; i < F * E; i += W) store(S + i, fade(load(S + i))), store(S_t + i, fade(load(S_t + i)));
    sum.begin();
    sum.rows(weights, rows, decay.grown, decay.kept, weights);
    for (int i = 0; i < (emit_out ? rows : 0); i++) {
      const int64_t token = last - i, key = task.key_index(token);
      float *y = psi + i * F, *dy = d + i * F, *w = weights + i * F;
      if (task.seen(token)) {
        turn<true>(s, dy, angle(k_turn.cos, i), angle(k_turn.sin, i), 1, dy);
        if (by_steps)
          for (int p = 0; p < s.pairs; p++) sums[1 + p] += (double)y[p] * dy[s.half + p] - (double)y[s.half + p] * dy[p];
        for (int f = 0; f < F; f += W) store(dy + f, load(dy + f) + load(w + f));
        if (by_decay) sums[0] -= dot(y, dy, F);
        if (s.map == kSilu || s.map == kRelu2) features(s, task.k, token, kIdentity, raw);
        else memcpy(raw, y, 4 * F);
        for (int f = 0; f < F; f += W) store(dy + f, load(dy + f) * slope(s.map, load(raw + f), load(y + f)));
      } else {
        zero(dy, F), zero(dv + i * E, E);
      }
      write_features(s, dy, dk_rows, token), write_values(s, dv + i * E, dv_rows, token);
      if (by_decay) {
        float& a = c.d_log_decay[key];
        a = (float)(sums[0] += a);
      }
      if (by_steps)
        for (int p = 0; p < c.pairs; p++) {
          float& step = c.d_angle_steps[key * c.pairs + p];
          step = (float)(sums[1 + p] += step);
        }
    }
    sum.end(fade);
  }
  if (ends.kv_out) state_out(s, S, false, ends.kv_out);
  if (ends.z_out) sums_out(s, sum.all, ends.z_out);
}

}  // namespace
}  // namespace linrope
