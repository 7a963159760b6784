// Gradients of keys and values, last token to first. With gb = dL/d out / den, and dS the gradient of the state:
//   dv = psi^ dS + tril'(psi^ phi^T) gb        dpsi^ = v dS^T + tril'(v gb^T) phi^
// Running sums over what comes later give the gradients of log decay and angle steps.
#pragma once
#include "task.h"

namespace linrope {
namespace {

struct BackwardKeys : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *psi, *psi_hat, *phi, *phi_t, *phi_hat, *weights, *d, *v, *gb, *gb_t, *panels, *dv, *scores, *S_t, *raw,
        *within, *k_angles, *q_angles;
    Scratch(const Shape& s, Arena& a)
        : psi(a.take<float>(C * s.F)), psi_hat(a.take<float>(C * s.F)), phi(a.take<float>(C * s.F)),
          phi_t(a.take<float>(C * s.F)), phi_hat(a.take<float>(C * s.F)), weights(a.take<float>(C * s.F)),
          d(a.take<float>(C * s.F)), v(a.take<float>(C * s.E)), gb(a.take<float>(C * s.E)),
          gb_t(a.take<float>(C * s.E)), panels(a.take<float>(C * s.E)), dv(a.take<float>(C * s.E)),
          scores(a.take<float>(C * C)), S_t(a.take<float>(s.F * s.E)), raw(a.take<float>(s.F)),
          within(a.take<float>(s.F)), k_angles(a.take<float>(2 * C * s.half)), q_angles(a.take<float>(2 * C * s.half)) {}
  };
  static size_t bytes(const Shape& s, int count) {
    return 4 * (7 * C * s.F + 5 * C * s.E + C * C + s.F * s.E + 2 * s.F + 4 * C * s.half) + 2048 +
           count * (size_t)(4 * s.F * s.E + 8 * s.F + 2 * s.angle_bytes() + 512);
  }
  const Scratch& w;
  const bool emit_out, same, by_decay, by_steps;
  const int queries;
  int64_t done = 0;
  float* S;  // dL/d of the state, as the first token of the chunk at hand sees it
  double* sums;
  RunningSum sum;
  Decay decay;
  int64_t low = 0;  // the first token of the chunk at hand
  float kept[kChunk], grown[kChunk];  // e^D, e^-D of its tokens, the last one first
  Angles k_turn, q_turn;
  Rows dk, dv;

  BackwardKeys(const Call& c, const Span& span, const Ends& ends, bool emit_out, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), emit_out(emit_out), same(c.key_positions.data == c.positions.data),
        by_decay(emit_out && c.d_log_decay), by_steps(emit_out && c.d_angle_steps),
        queries(c.causal && c.grad.data ? group : 0), S(arena.take<float>(s.F * s.E)), sums(ends.sums),
        sum(s.F, w.within, arena), decay(c, span),
        k_turn(c, s, span, c.key_positions, ends.angle_in, w.k_angles, arena),
        q_turn(c, s, span, c.positions, ends.angle_in, w.q_angles, arena), dk(key_rows(c.dk)), dv(key_rows(c.dv)) {
    if (k_turn.steps.base)  // going back starts at the sum of all
      for (int64_t t = span.begin; t < span.end; t++) k_turn.steps.add(t, 1, k_turn.sum);
    memcpy(q_turn.sum, k_turn.sum, 8 * s.half);
    for (int64_t t = span.begin; t < span.end; t++) {  // where no sweep of queries has left its share
      if (by_decay && !queries) c.d_log_decay[key_index(t)] = 0;
      if (by_steps && !c.grad.data) zero(angle_steps_at(t), c.pairs);
    }
    const Fade first(span.begin < span.end ? enter(span.end - 1) : 0);
    state_in(s, ends.kv_in, S, false, first);
    sums_in(s, ends.z_in, sum.all, first.exact);
  }
  // Makes the chunk that ends with token `last` the one at hand. Returns its sum of log decay. Chunks and factors are
  // those of the sweep of queries: so each pair of tokens has the same weight in both sweeps, to the bit.
  double enter(int64_t last) {
    low = decay.start(block_begin(last), last);
    const int rows = decay.plan(low, last - low + 1);
    for (int i = 0; i < rows; i++) kept[i] = decay.kept[rows - 1 - i], grown[i] = decay.grown[rows - 1 - i];
    return decay.sum;
  }

  void advance() {
    const int64_t last = span.end - 1 - done;
    const int rows = (int)(last - low + 1), F = s.F, E = s.E;
    const Angles& q_angles = same ? k_turn : q_turn;
    k_turn.back(low, rows);
    if (!same && queries) q_turn.back(low, rows);
    if (emit_out) {
      key_features(last, -1, rows, w.psi);
      for (int i = 0; i < rows; i++) {
        prefetch(v, last - i, -C, s.e), prefetch(dk, last - i, 0, s.f), prefetch(dv, last - i, 0, s.e);
        const int at = (rows - 1 - i) * s.half;
        turn<false>(s, w.psi + i * F, k_turn.cos + at, k_turn.sin + at, 1, w.psi_hat + i * F);
        key_values(last - i, w.v + i * E, NW);
      }
      transpose_state(S, F, E, w.S_t);
    }
    if (by_decay && is_anchor(last + 1))  // the sweep of queries left its state transposed
      sums[0] = product_at_anchor(last + 1, queries ? w.S_t : S, sum.all) * std::exp(-decay.sum);
    for (int r = 0; r < queries; r++) {
      read_queries(last, rows, r, q_angles);
      if (emit_out) {
        const bool more = r > 0, fine_v = all_finite(w.panels, rows, E), fine_k = all_finite(w.phi_hat, rows, F);
        emit({rows, F, E, w.psi_hat, w.phi_t, w.panels, more ? nullptr : S, grown, fine_v, more, w.scores, w.dv, E});
        emit({rows, E, F, w.v, w.gb_t, w.phi_hat, more ? nullptr : w.S_t, grown, fine_k, more, w.scores, w.d, F});
      }
      if (r < queries - 1) update(rows, F, E, w.phi_t, w.panels, S, false, Fade());
    }
    if (!queries) {
      zero(w.weights, rows * F);
      if (emit_out) {
        emit({rows, F, E, w.psi_hat, nullptr, nullptr, S, grown, true, false, nullptr, w.dv, E});
        emit({rows, E, F, w.v, nullptr, nullptr, w.S_t, grown, true, false, nullptr, w.d, F});
      }
    }
    sum.rows(w.weights, rows, kept, grown, w.weights);
    if (emit_out) write(last, rows);
    done += rows;
    const double a = decay.at(low);
    const Fade fade(low > span.begin ? a + enter(low - 1) : a);
    if (queries) update(rows, F, E, w.phi_t, w.panels, S, false, fade);
    else fade_state(S, F * E, fade);
    sum.end(fade);
  }

  // phi^ and gb transposed, and, as they are kept, as panels; delta phi is added up in `weights`
  void read_queries(int64_t last, int rows, int r, const Angles& angles) {
    const Rows q = query_rows(c.q, r), g = query_rows(c.grad, r);
    const int F = s.F, E = s.E;
    features(s, q, last, -1, rows, w.phi);
    for (int i = 0; i < rows; i++) {
      const int64_t token = last - i, index = query_index(token, r);
      prefetch(g, token, -C, s.e);
      float *x = w.phi + i * F, *weight = w.weights + i * F;
      const float delta = c.delta[index];
      const int angle = (rows - 1 - i) * s.half;
      for (int f = 0; f < F; f += W)
        store(weight + f, r ? load(weight + f) + load(x + f) * delta : load(x + f) * delta);
      turn<false>(s, x, angles.cos + angle, angles.sin + angle, 1, x);
      values(s, g, token, w.gb + i * E, NW, c.inverse[index]);
      for (int f = 0; f < F; f += W) store(at(w.phi_hat + i * NW, NW * C, f), load(x + f) * kept[i]);
      for (int e = 0; e < E; e += W) store(at(w.panels + i * NW, NW * C, e), load(w.gb + i * E + e) * kept[i]);
    }
    zero_up_to_four(w.phi, rows, F), zero_up_to_four(w.gb, rows, E);
    transpose(w.phi, rows, F, w.phi_t);
    if (emit_out) transpose(w.gb, rows, E, w.gb_t);
  }

  void write(int64_t last, int rows) {
    const int F = s.F, E = s.E;
    for (int i = 0; i < rows; i++) {
      const int64_t token = last - i;
      const int angle = (rows - 1 - i) * s.half;
      float *y = w.psi + i * F, *dy = w.d + i * F, *weight = w.weights + i * F;
      if (seen(token)) {
        turn<true>(s, dy, k_turn.cos + angle, k_turn.sin + angle, 1, dy);
        if (by_steps)  // the normalizer's share does not turn
          for (int p = 0; p < s.pairs; p++) sums[1 + p] += y[p] * dy[s.half + p] - y[s.half + p] * dy[p];
        for (int f = 0; f < F; f += W) store(dy + f, load(dy + f) + load(weight + f));
        if (by_decay) sums[0] -= product(y, dy, F);
        const float* raw = y;
        if (s.map == kSilu || s.map == kRelu2) features(s, k, token, kIdentity, w.raw), raw = w.raw;
        for (int f = 0; f < F; f += W) store(dy + f, load(dy + f) * slope(s.map, load(raw + f), load(y + f)));
      } else {
        zero(dy, F), zero(w.dv + i * E, E);
      }
      write_features(s, dy, dk, token), write_values(s, w.dv + i * E, dv, token);
      if (by_decay) {
        float& a = c.d_log_decay[key_index(token)];
        a = (float)(sums[0] += a);
      }
      if (by_steps) {
        float* steps = angle_steps_at(token);
        for (int p = 0; p < s.pairs; p++) steps[p] = (float)(sums[1 + p] += steps[p]);
      }
    }
  }
  void finish() {
    if (ends.kv_out) state_out(s, S, false, ends.kv_out);
    if (ends.z_out) sums_out(s, sum.all, ends.z_out);
  }
};

}  // namespace
}  // namespace linrope
