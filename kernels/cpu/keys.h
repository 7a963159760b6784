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
  struct Scratch : Pieces {
    using Pieces::Pieces;
    float *psi = features(), *psi_hat = features(), *phi = features(), *phi_t = features(), *phi_hat = features();
    float *dden_before = features(C + 1), *dden_phi = dden_before + s.F;  // dden_before: the row before dden_phi
    float *d = features(), *v = values(), *gb = values(), *gb_t = values(), *panels = values(), *dv = values();
    float *scores = score_matrix(), *dS_t = state(), *raw = features(1), *within = features(1);
    float *diagonal = per_token(), *d_of_diagonal = features(), *k_angles = angle_rows(), *q_angles = angle_rows();
    tiles::Factors* factors = split_factors();
  };
  struct Kept : Pieces {
    using Pieces::Pieces;
    float* dS = state();
    double* dz = feature_sums();
    AngleMemory k_angle{arena, s}, q_angle{arena, s};
  };
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

  BackwardKeys(const Call& c, const Span& span, const Ends& ends, bool want_output, const Scratch& w, const Kept& kept)
      : Task(c, span, ends), w(w), want_output(want_output), same_angles(same_positions(c)),
        want_d_log_decay(want_output && c.d_log_decay), want_d_angle_steps(want_output && c.d_angle_steps),
        want_dz(c.normalize || ends.z_in), query_heads(c.causal && c.dout.data ? group : 0), dS(kept.dS),
        sums(ends.sums), dz_sum{s.F, kept.dz, w.within}, decay(c, span),
        k_angle(c, s, span, c.key_positions, ends.angle_in, w.k_angles, kept.k_angle),
        q_angle(c, s, span, c.positions, ends.angle_in, w.q_angles, kept.q_angle), dk(gradients(c.dk, span.head)),
        dv(key_rows(c.dv)) {
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
    for (int i = 0; i < rows; i++) {
      exp_D[i] = decay.exp_D[rows - 1 - i];
      exp_minus_D[i] = decay.exp_minus_D[rows - 1 - i];
    }
    return decay.sum;
  }

  void advance() {
    const int64_t last = span.end - 1 - done;
    const int rows = (int)(last - chunk_begin + 1), F = s.F;
    k_angle.backward(chunk_begin, rows);
    if (!same_angles && query_heads) q_angle.backward(chunk_begin, rows);
    if (want_output) read_keys(last, rows);
    if (want_d_log_decay && is_anchor(last + 1))  // the sweep over queries saved S transposed
      sums[0] = product_at_anchor(last + 1, query_heads ? w.dS_t : dS, dz_sum.total) * std::exp(-decay.sum);
    Operands queries;
    for (int r = 0; r < query_heads; r++) {
      read_queries(last, rows, r);
      queries = operands(rows, s.feature_row, s.value_row, w.phi_t, w.panels, w.factors);
      if (want_output) add_gradients(queries, r);
      if (r < query_heads - 1) update(queries, dS, false, DecayFactor());
    }
    if (!query_heads && want_output) gradients_of_state(rows);
    if (want_dz) add_dden(rows);
    if (want_output) write_gradients(last, rows);
    done += rows;
    const double a = decay.at(chunk_begin);
    const DecayFactor factor(chunk_begin > span.begin ? a + enter_chunk(chunk_begin - 1) : a);
    if (query_heads) update(queries, dS, false, factor);
    else decay_state(dS, F * s.E, factor);
    if (want_dz) dz_sum.end_chunk(factor);
  }
  // Reads a chunk: psi, psi^ and v, and transposes dS
  void read_keys(int64_t last, int rows) {
    key_features(last, -1, rows, w.psi);
    for (int i = 0; i < rows; i++) {
      prefetch(v, last - i, -C, s.e);
      prefetch(dk, last - i, 0, s.f);
      prefetch(dv, last - i, 0, s.e);
      const int at = (rows - 1 - i) * s.half;
      rotate<false>(s, w.psi + i * s.F, k_angle.cos + at, k_angle.sin + at, 1, w.psi_hat + i * s.F);
      key_values(last - i, w.v + i * s.E, NW);
    }
    transpose_state(dS, s.feature_row, s.value_row, w.dS_t);
  }
  // Adds what query head r contributes to d and dv; the first head writes them, and adds the state's share
  void add_gradients(const Operands& queries, int r) {
    const int rows = queries.rows;
    const bool accumulate = r > 0;
    const Operands values_of_queries =
        operands(rows, s.value_row, s.feature_row, w.gb_t, w.phi_hat, w.factors, want_d_log_decay);
    multiply_chunk({.operands = values_of_queries, .A = w.v, .S = accumulate ? nullptr : w.dS_t, .scale = exp_minus_D,
                    .finite = all_finite(w.phi_hat, rows, s.feature_row), .accumulate = accumulate,
                    .scores = w.scores, .out = w.d, .stride = s.F,
                    .diagonal = want_d_log_decay ? w.diagonal : nullptr});
    if (want_d_log_decay) add_diagonal(rows, accumulate);
    multiply_chunk({.operands = queries, .A = w.psi_hat, .S = accumulate ? nullptr : dS, .scale = exp_minus_D,
                    .finite = all_finite(w.panels, rows, s.value_row), .accumulate = accumulate, .scores = w.scores,
                    .out = w.dv, .stride = s.E});
  }
  // d and dv if there are no queries
  void gradients_of_state(int rows) {
    const Operands values_of_state = operands(rows, s.feature_row, s.value_row, nullptr, nullptr, w.factors);
    const Operands features_of_state = operands(rows, s.value_row, s.feature_row, nullptr, nullptr, w.factors);
    multiply_chunk({.operands = values_of_state, .A = w.psi_hat, .S = dS, .scale = exp_minus_D, .out = w.dv,
                    .stride = s.E});
    multiply_chunk({.operands = features_of_state, .A = w.v, .S = w.dS_t, .scale = exp_minus_D, .out = w.d,
                    .stride = s.F});
  }
  // Turns dden phi of each token into the sum over this and all later tokens
  void add_dden(int rows) {
    const int F = s.F;
    if (!query_heads) zero(w.dden_phi, rows * F);
    for (int f = 0; want_d_log_decay && f < F; f++) w.dden_before[f] = (float)dz_sum.total[f] * exp_minus_D[0];
    dz_sum.rows(w.dden_phi, rows, exp_D, exp_minus_D, w.dden_phi);
  }

  // Reads a chunk of query head r: phi^ and gb, both transposed and, times e^D, in panels. The first head writes
  // dden phi to `dden_phi`, the others add to it.
  void read_queries(int64_t last, int rows, int r) {
    const Angles& angles = same_angles ? k_angle : q_angle;
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
      float* panels = w.panels + i * s.value_row.panel;
      for (int e = 0; e < E; e += W) store(at(panels, NW * C, e), load(w.gb + i * E + e) * exp_D[i]);
    }
    zero_to_multiple_of_four(w.phi, rows, F);
    zero_to_multiple_of_four(w.gb, rows, E);
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
    for (int i = 0; i < rows; i++) {
      const int64_t token = last - i;
      float *dy = w.d + i * s.F, *value_gradient = w.dv + i * s.E;
      if (unmasked(token)) {
        finish_key(token, rows, i);
      } else {
        zero(dy, s.F);
        zero(value_gradient, s.E);
      }
      if (c.write.data) split_gradient(token, value_gradient, w.v + i * s.E);
      write_gradient(dy, dk, token);
      write_values(s, value_gradient, dv, token);
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
  // Finishes the key's gradient, and adds the key's terms to the running sums; token i of the chunk from its end
  void finish_key(int64_t token, int rows, int i) {
    const int F = s.F, angle = (rows - 1 - i) * s.half;
    float *y = w.psi + i * F, *dy = w.d + i * F, *dden_row = w.dden_phi + i * F;
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
    if (s.map == kSilu || s.map == kRelu2) {
      features(s, k, token, kIdentity, w.raw);
      raw = w.raw;
    }
    for (int f = 0; f < F; f += W) store(dy + f, load(dy + f) * slope(s.map, load(raw + f), load(y + f)));
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
