// Gradients of queries, first token to last. With gb = dout / den:
//   dphi^ = gb S^T + tril(gb v^T) psi^,  and 1 / den and dden for the sweep over keys
#pragma once
#include "forward.h"

namespace linrope {
namespace {

// Finishes a query's gradient, given d (F) = dphi^ without the normalizer's share; rotates it back in place.
struct FinishQuery {
  const Task& task;
  float* raw;  // scratch (F)

  // The query's own key, which log decay's gradient leaves out (see keys.h)
  struct OwnKey {
    float* d_log_decay;  // the query's term is added here; null: this gradient is not wanted
    const float* key;    // (F): the own key, rotated by its angle minus the query's; d does not contain its share yet
    float score;         // the factor of the own key in d
    float product;       // <phi, own key>
    float den;           // the denominator without the own key
  };

  // Returns dden. Adds the query's terms to the gradients of angle steps and log decay, if these are not null.
  float operator()(const Rows& q, const Rows& dq, int64_t token, const float* phi, float* d, const float* z,
                   const float* cos, const float* sin, float den, float inverse_den, float* d_angle_steps,
                   const OwnKey& own) const {
    const Shape& s = task.s;
    const Call& c = task.c;
    rotate<true>(s, d, cos, sin, 1, d);
    const double without_own = own.d_log_decay ? product(phi, d, s.F) : 0;
    // <gb, num>, where d_log_decay leaves out the token's own key
    float x = own.d_log_decay ? (float)without_own : dot(phi, d, s.F);
    if (own.d_log_decay) {
      x += own.product * own.score;
      for (int i = 0; i < s.F; i += W) store(d + i, load(d + i) + load(own.key + i) * own.score);
    }
    const bool constant_den = !c.normalize || (!c.add_eps && den < task.eps);
    const float dden = constant_den ? 0 : -x * inverse_den;
    if (d_angle_steps)
      for (int p = 0; p < s.pairs; p++) {
        const int x = p * s.pair_stride, y = x + s.partner;
        d_angle_steps[p] += phi[x] * d[y] - phi[y] * d[x];
      }
    if (own.d_log_decay) *own.d_log_decay += (float)(without_own + (dden == 0 ? 0 : dden * own.den));
    const float* from = phi;
    if (s.map == kSilu || s.map == kRelu2) {
      features(s, q, token, kIdentity, raw);
      from = raw;
    }
    for (int i = 0; i < s.F; i += W) {
      const vf y = dden == 0 ? load(d + i) : load(d + i) + load(z + i) * dden;
      store(d + i, y * slope(s.map, load(from + i), load(phi + i)));
    }
    task.write_gradient(d, dq, token);
    return dden;
  }
};

struct BackwardQueries : ForwardSweep {  // S^T
  static constexpr int C = kChunk;
  struct Scratch : ForwardSweep::Scratch {
    using ForwardSweep::Scratch::Scratch;
    float *psi = features(), *phi = features(), *hat = features();
    float *z_before = features(C + 1), *z = z_before + s.F;  // z_before: the row before z
    float *d = features(), *v = values(), *v_t = values(), *gb = values(), *scores = score_matrix();
    float *raw = features(1), *key = features(1);
    float *dens = per_token(), *dens_before = per_token(), *products = per_token(), *diagonal = per_token();
    tiles::Factors* factors = split_factors();
  };
  const Scratch& w;

  BackwardQueries(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, const Kept& kept)
      : ForwardSweep(c, span, ends, true, c.normalize || c.g_z.data, w, kept), w(w) {}

  void advance() {
    const int64_t t = span.begin + done;
    const int rows = decay.plan(t, anchor_after(t) - t);
    k_angle.forward(t, rows);
    if (!same_angles) q_angle.forward(t, rows);
    read_keys(t, rows);
    const bool finite = all_finite(w.hat, rows, s.feature_row);
    const Operands keys = operands(rows, s.value_row, s.feature_row, w.v_t, w.hat, w.factors, c.d_log_decay);
    for (int r = 0; r < group; r++) {
      read_queries(t, rows, r);
      multiply_chunk({.operands = keys, .A = w.gb, .S = fresh ? nullptr : S, .scale = decay.exp_D, .finite = finite,
                      .scores = w.scores, .out = w.d, .stride = s.F,
                      .diagonal = c.d_log_decay ? w.diagonal : nullptr});
      write_gradients(t, rows, r);
    }
    done += rows;
    end_chunk(keys, t + rows);
  }
  // Reads a chunk: psi, psi^ e^-D in panels, v transposed, and z of each token
  void read_keys(int64_t t, int rows) {
    const int F = s.F, E = s.E, half = s.half;
    key_features(t, 1, rows, w.psi);
    for (int f = 0; want_z && c.d_log_decay && f < F; f++) w.z_before[f] = (float)z_sum.total[f];
    if (want_z) z_sum.rows(w.psi, rows, decay.exp_minus_D, decay.exp_D, w.z);
    for (int i = 0; i < rows; i++) {
      prefetch(v, t + i, C, s.e);
      rotate<false, NW * C>(s, w.psi + i * F, k_angle.cos + i * half, k_angle.sin + i * half, decay.exp_minus_D[i],
                            w.hat + i * s.feature_row.panel);
      key_values(t + i, w.v + i * E, NW);
      if (c.d_log_decay) c.d_log_decay[key_index(t + i)] = 0;
      if (c.d_angle_steps) zero(angle_steps_at(t + i), c.pairs);
    }
    zero_to_multiple_of_four(w.v, rows, E);
    transpose(w.v, rows, E, w.v_t);
  }
  // Reads a chunk of query head r: phi, its denominators and gb
  void read_queries(int64_t t, int rows, int r) {
    const Rows q = queries(r), dout = query_rows(c.dout, r), dq = gradients(c.dq, query_head(r));
    const int F = s.F, E = s.E;
    features(s, q, t, 1, rows, w.phi);
    for (int i = 0; i < rows; i++) {
      prefetch(dout, t + i, C, s.e);
      prefetch(dq, t + i, 0, s.f);
      const float *phi = w.phi + i * F, *z = w.z + i * F;
      if (!c.d_log_decay) {
        w.dens[i] = c.normalize ? dot(phi, z, F) : 1;
      } else {  // the share of earlier keys alone, too
        w.products[i] = dot(phi, w.psi + i * F, F);
        w.dens_before[i] = c.normalize ? dot(phi, z - F, F) * decay.between(i) : 0;
        w.dens[i] = c.normalize ? w.dens_before[i] + w.products[i] : 1;
      }
      const float inverse = inverse_den(w.dens[i]);
      c.inverse_den[query_index(t + i, r)] = inverse;
      values(s, dout, t + i, w.gb + i * E, NW, inverse);
    }
  }
  // Finishes the gradients of query head r, of which d is the share of the chunk's keys and of S
  void write_gradients(int64_t t, int rows, int r) {
    const int F = s.F, half = s.half;
    const Angles& query_angles = same_angles ? k_angle : q_angle;
    const Rows q = queries(r), dq = gradients(c.dq, query_head(r));
    const FinishQuery finish_query{*this, w.raw};
    FinishQuery::OwnKey own{};
    for (int i = 0; i < rows; i++) {
      const int64_t at = query_index(t + i, r);
      if (c.d_log_decay) {
        own = {c.d_log_decay + key_index(t + i), w.psi + i * F, w.diagonal[i], w.products[i], w.dens_before[i]};
        if (!same_angles) {
          rotate<false>(s, own.key, k_angle.cos + i * half, k_angle.sin + i * half, 1, w.key);
          rotate<true>(s, w.key, q_angle.cos + i * half, q_angle.sin + i * half, 1, w.key);
          own.key = w.key;
          own.product = dot(w.phi + i * F, w.key, F);
        }
      }
      c.dden[at] = finish_query(q, dq, t + i, w.phi + i * F, w.d + i * F, w.z + i * F, query_angles.cos + i * half,
                                query_angles.sin + i * half, w.dens[i], c.inverse_den[at], angle_steps_at(t + i),
                                own);
    }
  }
};

// Bidirectional: gradients of queries that read the state of all keys; Ends' out receives the gradient of that state.
struct BidirectionalBackward : Task {
  static constexpr int C = kChunk;
  struct Scratch : Pieces {
    using Pieces::Pieces;
    float *x = features(), *hat = features(), *hat_t = features(), *d = features(), *gb = values(), *panels = values();
    float *dens = per_token(), *ones = per_token(), *raw = features(1), *angles = angle_rows();
    tiles::Factors* factors = split_factors();
  };
  struct Kept : Pieces {
    using Pieces::Pieces;
    float *S = state(), *dS = state(), *z = features(1);
    double* dz = feature_sums();
    AngleMemory angle{arena, s};
  };
  const Scratch& w;
  int64_t done = 0;
  float *S, *dS, *z;
  double* dz;
  Angles query_angles;

  BidirectionalBackward(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, const Kept& kept)
      : Task(c, span, ends), w(w), S(kept.S), dS(kept.dS), z(kept.z), dz(kept.dz),
        query_angles(c, s, span, c.positions, ends.angle_in, w.angles, kept.angle) {
    for (int i = 0; i < C; i++) w.ones[i] = 1;
    state_in(s, ends.kv_in, S, true, DecayFactor());
    z_in(s, ends.z_in, dz, 1);
    for (int i = 0; i < s.F; i++) {
      z[i] = (float)dz[i];
      dz[i] = 0;
    }
    zero(dS, s.F * s.E);
  }
  void advance() {
    const int64_t t = span.begin + done;
    const int rows = span.end - t < C ? (int)(span.end - t) : C, F = s.F, E = s.E, half = s.half;
    query_angles.forward(t, rows);
    if (c.d_angle_steps)
      for (int i = 0; i < rows; i++) zero(angle_steps_at(t + i), c.pairs);
    for (int r = 0; r < group; r++) {
      const Rows q = queries(r), dout = query_rows(c.dout, r), dq = gradients(c.dq, query_head(r));
      features(s, q, t, 1, rows, w.x);
      for (int i = 0; i < rows; i++) {
        prefetch(dout, t + i, C, s.e);
        prefetch(dq, t + i, 0, s.f);
        w.dens[i] = c.normalize ? dot(w.x + i * F, z, F) : 1;
        values(s, dout, t + i, w.gb + i * E, NW, inverse_den(w.dens[i]));
        copy_to_panels(w.gb + i * E, E, w.panels + i * s.value_row.panel, NW * C);
        rotate<false>(s, w.x + i * F, query_angles.cos + i * half, query_angles.sin + i * half, 1, w.hat + i * F);
      }
      zero_to_multiple_of_four(w.hat, rows, F);
      transpose(w.hat, rows, F, w.hat_t);
      multiply_chunk({.operands = operands(rows, s.value_row, s.feature_row, nullptr, nullptr, w.factors), .A = w.gb,
                      .S = S, .scale = w.ones, .out = w.d, .stride = F});
      const FinishQuery finish_query{*this, w.raw};
      for (int i = 0; i < rows; i++) {
        const float dden = finish_query(q, dq, t + i, w.x + i * F, w.d + i * F, z, query_angles.cos + i * half,
                                        query_angles.sin + i * half, w.dens[i], inverse_den(w.dens[i]),
                                        angle_steps_at(t + i), {});
        for (int f = 0; f < F; f++) dz[f] += dden * w.x[i * F + f];
      }
      update(operands(rows, s.feature_row, s.value_row, w.hat_t, w.panels, w.factors), dS, false, DecayFactor());
    }
    done += rows;
  }
  void finish() {
    state_out(s, dS, false, ends.kv_out);
    z_out(s, dz, ends.z_out);
  }
};

}  // namespace
}  // namespace linrope
