// Gradients of keys and values, last token to first. With gb = dout / den and dS the gradient of the state:
//   dv = psi^ dS + triu(psi^ phi^T) gb        dpsi^ = v dS^T + triu(v gb^T) phi^
// v is what is written into the state: the caller's value times its factor w. Its gradient is split between the two:
//   d(value) = w dv        dw = <dv, value>
// The gradients of log decay and angle steps are running sums over all later tokens. A pair of a query and a key adds
// the same number to the sum at the query's token and takes it away at the key's. For a token's own query and key the two
// cancel but for a rounding error, which is all that is left under strong decay. Log decay's sum leaves this pair out.
#pragma once
#include "task.h"

namespace linrope {
namespace {

struct BackwardKeys : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *psi, *psi_hat, *phi, *phi_t, *phi_hat, *dden_before, *dden_phi, *d, *v, *gb, *gb_t, *panels, *dv, *scores, *dS_t, *raw,
        *within, *diagonal, *d_of_diagonal, *k_angles, *q_angles;
    tiles::Factors* factors;
    Scratch(const Shape& s, Arena& a)
        : psi(a.take<float>(C * s.F)), psi_hat(a.take<float>(C * s.F)), phi(a.take<float>(C * s.F)),
          phi_t(a.take<float>(C * s.F)), phi_hat(a.take<float>(C * s.F)), dden_before(a.take<float>((C + 1) * s.F)),
          dden_phi(dden_before + s.F), d(a.take<float>(C * s.F)), v(a.take<float>(C * s.E)), gb(a.take<float>(C * s.E)),
          gb_t(a.take<float>(C * s.E)), panels(a.take<float>(C * s.E)), dv(a.take<float>(C * s.E)),
          scores(a.take<float>(C * C)), dS_t(a.take<float>(s.F * s.E)), raw(a.take<float>(s.F)),
          within(a.take<float>(s.F)), diagonal(a.take<float>(C)), d_of_diagonal(a.take<float>(C * s.F)),
          k_angles(a.take<float>(2 * C * s.half)),
          q_angles(a.take<float>(2 * C * s.half)), factors(a.take<tiles::Factors>(1)) {}
  };
  static size_t bytes(const Shape& s, int count) {
    return sizeof(tiles::Factors) + 4 * (8 * C * s.F + 5 * C * s.E + C * C + s.F * s.E + C + 3 * s.F + 4 * C * s.half) + 2560 +
           count * (size_t)(4 * s.F * s.E + 8 * s.F + 2 * s.angle_bytes() + 512);
  }
  const Scratch& w;
  const bool want_output, same_angles, want_d_log_decay, want_d_angle_steps, want_dz;
  const int query_heads;
  int64_t done = 0;
  float* dS;  // the gradient of the state, decayed to the current chunk
  double* sums;
  RunningSum dz_sum;
  Decay decay;
  int64_t chunk_begin = 0;  // the first token of the current chunk
  float exp_D[kChunk], exp_minus_D[kChunk];  // of its tokens, the last one first
  Angles k_angle, q_angle;
  Rows dk, dv;

  BackwardKeys(const Call& c, const Span& span, const Ends& ends, bool want_output, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), want_output(want_output), same_angles(same_positions(c)),
        want_d_log_decay(want_output && c.d_log_decay), want_d_angle_steps(want_output && c.d_angle_steps),
        want_dz(z_has_gradient(ends.z_in)),
        query_heads(c.causal && c.dout.data ? group : 0), dS(arena.take<float>(s.F * s.E)), sums(ends.sums),
        dz_sum(s.F, w.within, arena), decay(c, span),
        k_angle(c, s, span, c.key_positions, ends.angle_in, w.k_angles, arena),
        q_angle(c, s, span, c.positions, ends.angle_in, w.q_angles, arena), dk(gradients(c.dk, span.head)), dv(key_rows(c.dv)) {
    if (k_angle.steps.base)  // the backward sweep starts from the total angle
      for (int64_t t = span.begin; t < span.end; t++) k_angle.steps.add(t, 1, k_angle.sum);
    memcpy(q_angle.sum, k_angle.sum, 8 * s.half);
    for (int64_t t = span.begin; t < span.end; t++) {  // if no sweep over queries has written its terms
      if (want_d_log_decay && !query_heads) c.d_log_decay[key_index(t)] = 0;
      if (want_d_angle_steps && !c.dout.data) zero(angle_steps_at(t), c.pairs);
    }
    const DecayFactor first_factor(span.begin < span.end ? enter_chunk(span.end - 1) : 0);
    state_in(s, ends.kv_in, dS, false, first_factor);
    z_in(s, ends.z_in, dz_sum.total, first_factor.exact);
  }
  // Makes the chunk that ends with token `last` the current one and returns its sum of log decay. Chunks and
  // factors equal those of the sweep over queries, so that each pair of tokens has the same weight in both
  // sweeps, bit for bit.
  double enter_chunk(int64_t last) {
    chunk_begin = decay.start(anchor_before(last), last);
    const int rows = decay.plan(chunk_begin, last - chunk_begin + 1);
    for (int i = 0; i < rows; i++)
      exp_D[i] = decay.exp_D[rows - 1 - i], exp_minus_D[i] = decay.exp_minus_D[rows - 1 - i];
    return decay.sum;
  }

  void advance() {
    const int64_t last = span.end - 1 - done;
    const int rows = (int)(last - chunk_begin + 1), F = s.F, E = s.E;
    const Angles& query_angles = same_angles ? k_angle : q_angle;
    k_angle.backward(chunk_begin, rows);
    if (!same_angles && query_heads) q_angle.backward(chunk_begin, rows);
    if (want_output) {
      key_features(last, -1, rows, w.psi);
      for (int i = 0; i < rows; i++) {
        prefetch(v, last - i, -C, s.e), prefetch(dk, last - i, 0, s.f), prefetch(dv, last - i, 0, s.e);
        const int at = (rows - 1 - i) * s.half;
        rotate<false>(s, w.psi + i * F, k_angle.cos + at, k_angle.sin + at, 1, w.psi_hat + i * F);
        key_values(last - i, w.v + i * E, NW);
      }
      transpose_state(dS, s.feature_row, s.value_row, w.dS_t);
    }
    if (want_d_log_decay && is_anchor(last + 1))  // the sweep over queries saved S transposed
      sums[0] = product_at_anchor(last + 1, query_heads ? w.dS_t : dS, dz_sum.total) * std::exp(-decay.sum);
    Operands queries;
    for (int r = 0; r < query_heads; r++) {
      read_queries(last, rows, r, query_angles);
      const bool accumulate = r > 0;
      if (want_output) {
        multiply_chunk({operands(rows, s.value_row, s.feature_row, w.gb_t, w.phi_hat, w.factors, want_d_log_decay), w.v,
                        accumulate ? nullptr : w.dS_t, exp_minus_D, all_finite(w.phi_hat, rows, s.feature_row), accumulate,
                        w.scores, w.d, F, want_d_log_decay ? w.diagonal : nullptr});
        if (want_d_log_decay) add_diagonal(rows, accumulate);
      }
      queries = operands(rows, s.feature_row, s.value_row, w.phi_t, w.panels, w.factors);
      if (want_output)
        multiply_chunk({queries, w.psi_hat, accumulate ? nullptr : dS, exp_minus_D, all_finite(w.panels, rows, s.value_row),
                        accumulate, w.scores, w.dv, E});
      if (r < query_heads - 1) update(queries, dS, false, DecayFactor());
    }
    if (!query_heads) {
      if (want_dz) zero(w.dden_phi, rows * F);
      if (want_output) {
        multiply_chunk({operands(rows, s.feature_row, s.value_row, nullptr, nullptr, w.factors), w.psi_hat, dS, exp_minus_D, true, false,
                        nullptr, w.dv, E});
        multiply_chunk({operands(rows, s.value_row, s.feature_row, nullptr, nullptr, w.factors), w.v, w.dS_t, exp_minus_D, true, false,
                        nullptr, w.d, F});
      }
    }
    for (int f = 0; want_dz && want_d_log_decay && f < F; f++) w.dden_before[f] = (float)dz_sum.total[f] * exp_minus_D[0];
    if (want_dz) dz_sum.rows(w.dden_phi, rows, exp_D, exp_minus_D, w.dden_phi);
    if (want_output) write_gradients(last, rows);
    done += rows;
    const double a = decay.at(chunk_begin);
    const DecayFactor factor(chunk_begin > span.begin ? a + enter_chunk(chunk_begin - 1) : a);
    if (query_heads) update(queries, dS, false, factor);
    else decay_state(dS, F * E, factor);
    if (want_dz) dz_sum.end_chunk(factor);
  }

  // Reads a chunk of query head r: phi^ and gb, both transposed and, times e^D, in panels. The first head writes
  // dden phi to `dden_phi`, the others add to it.
  void read_queries(int64_t last, int rows, int r, const Angles& angles) {
    const Rows q = queries(r), dout = query_rows(c.dout, r);
    const int F = s.F, E = s.E;
    features(s, q, last, -1, rows, w.phi);
    for (int i = 0; i < rows; i++) {
      const int64_t token = last - i, index = query_index(token, r);
      prefetch(dout, token, -C, s.e);
      float *x = w.phi + i * F, *dden_row = w.dden_phi + i * F;
      const float dden = want_dz ? c.dden[index] : 0;
      const int angle = (rows - 1 - i) * s.half;
      for (int f = 0; want_dz && f < F; f += W)
        store(dden_row + f, r ? load(dden_row + f) + load(x + f) * dden : load(x + f) * dden);
      rotate<false>(s, x, angles.cos + angle, angles.sin + angle, 1, x);
      values(s, dout, token, w.gb + i * E, NW, c.inverse_den[index]);
      for (int f = 0; f < F; f += W) store(at(w.phi_hat + i * s.feature_row.panel, NW * C, f), load(x + f) * exp_D[i]);
      for (int e = 0; e < E; e += W) store(at(w.panels + i * s.value_row.panel, NW * C, e), load(w.gb + i * E + e) * exp_D[i]);
    }
    zero_to_multiple_of_four(w.phi, rows, F), zero_to_multiple_of_four(w.gb, rows, E);
    transpose(w.phi, rows, F, w.phi_t);
    if (want_output) transpose(w.gb, rows, E, w.gb_t);
  }

  // d_of_diagonal: what the queries of the same token add to d
  void add_diagonal(int rows, bool accumulate) {
    const int F = s.F;
    for (int i = 0; i < rows; i++) {
      const float scale = w.diagonal[i] * exp_minus_D[i];
      float *row = w.d_of_diagonal + i * F, *phi = w.phi_hat + i * s.feature_row.panel;
      for (int f = 0; f < F; f += W) {
        const vf x = load(at(phi, NW * C, f)) * scale;
        store(row + f, accumulate ? load(row + f) + x : x);
      }
    }
  }

  void write_gradients(int64_t last, int rows) {
    const int F = s.F, E = s.E;
    for (int i = 0; i < rows; i++) {
      const int64_t token = last - i;
      const int angle = (rows - 1 - i) * s.half;
      float *y = w.psi + i * F, *dy = w.d + i * F, *dden_row = w.dden_phi + i * F;
      if (unmasked(token)) {
        if (want_d_log_decay) {
          sums[0] -= product(w.psi_hat + i * F, dy, F);
          if (query_heads) {
            const float* rest = w.d_of_diagonal + i * F;
            for (int f = 0; f < F; f += W) store(dy + f, load(dy + f) + load(rest + f));
          }
          if (want_dz)  // of later tokens
            sums[0] -= dot(y, dden_row - F, F) * (i ? exp_minus_D[i] * exp_D[i - 1] : 1);
        }
        rotate<true>(s, dy, k_angle.cos + angle, k_angle.sin + angle, 1, dy);
        if (want_d_angle_steps)  // the normalizer's share is not rotated
          for (int p = 0; p < s.pairs; p++) {
            const int first = p * s.pair_stride, second = first + s.partner;
            sums[1 + p] += y[first] * dy[second] - y[second] * dy[first];
          }
        for (int f = 0; want_dz && f < F; f += W) store(dy + f, load(dy + f) + load(dden_row + f));
        const float* raw = y;
        if (s.map == kSilu || s.map == kRelu2) features(s, k, token, kIdentity, w.raw), raw = w.raw;
        for (int f = 0; f < F; f += W) store(dy + f, load(dy + f) * slope(s.map, load(raw + f), load(y + f)));
      } else {
        zero(dy, F), zero(w.dv + i * E, E);
      }
      if (c.write.data) split_gradient(token, w.dv + i * E, w.v + i * E);
      write_gradient(dy, dk, token), write_values(s, w.dv + i * E, dv, token);
      if (want_d_log_decay) {
        float& a = c.d_log_decay[key_index(token)];
        a = (float)(sums[0] += a);
      }
      if (want_d_angle_steps) {
        float* steps = angle_steps_at(token);
        for (int p = 0; p < s.pairs; p++) steps[p] = (float)(sums[1 + p] += steps[p]);
      }
    }
  }
  // Turns the gradient of what is written (E) into that of the value, and stores that of its factor. value: scratch (E)
  void split_gradient(int64_t token, float* gradient, float* value) const {
    const float factor = unmasked(token) ? write(token) : 0;
    float product_with_value = 0;
    if (c.d_write && unmasked(token)) {
      values(s, v, token, value, NW);
      product_with_value = (float)product(gradient, value, s.E);
    }
    if (c.d_write) c.d_write[key_index(token)] = product_with_value;
    for (int e = 0; e < s.E; e += W) store(gradient + e, load(gradient + e) * factor);
  }
  void finish() {
    if (ends.kv_out) state_out(s, dS, false, ends.kv_out);
    if (ends.z_out) z_out(s, dz_sum.total, ends.z_out);
  }
};

}  // namespace
}  // namespace linrope
