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
    float x = own.d_log_decay ? (float)without_own : dot(phi, d, s.F);  // <gb, num>, where d_log_decay leaves out the token's own key
    if (own.d_log_decay) {
      x += own.product * own.score;
      for (int i = 0; i < s.F; i += W) store(d + i, load(d + i) + load(own.key + i) * own.score);
    }
    const bool constant_den = !c.normalize || (!c.add_eps && den < c.eps);
    const float dden = constant_den ? 0 : -x * inverse_den;
    if (d_angle_steps)
      for (int p = 0; p < s.pairs; p++) {
        const int x = p * s.pair_stride, y = x + s.partner;
        d_angle_steps[p] += phi[x] * d[y] - phi[y] * d[x];
      }
    if (own.d_log_decay) *own.d_log_decay += (float)(without_own + (dden == 0 ? 0 : dden * own.den));
    const float* from = phi;
    if (s.map == kSilu || s.map == kRelu2) features(s, q, token, kIdentity, raw), from = raw;
    for (int i = 0; i < s.F; i += W) {
      const vf y = dden == 0 ? load(d + i) : load(d + i) + load(z + i) * dden;
      store(d + i, y * slope(s.map, load(from + i), load(phi + i)));
    }
    task.write_gradient(d, dq, token);
    return dden;
  }
};

struct BackwardQueries : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *psi, *phi, *hat, *z_before, *z, *d, *v, *v_t, *gb, *scores, *raw, *within, *dens, *dens_before, *products,
        *diagonal, *key, *k_angles, *q_angles;
    tiles::Factors* factors;
    Scratch(const Shape& s, Arena& a)
        : psi(a.take<float>(C * s.F)), phi(a.take<float>(C * s.F)), hat(a.take<float>(C * s.F)),
          z_before(a.take<float>((C + 1) * s.F)), z(z_before + s.F), d(a.take<float>(C * s.F)),
          v(a.take<float>(C * s.E)), v_t(a.take<float>(C * s.E)), gb(a.take<float>(C * s.E)),
          scores(a.take<float>(C * C)), raw(a.take<float>(s.F)), within(a.take<float>(s.F)), dens(a.take<float>(C)),
          dens_before(a.take<float>(C)), products(a.take<float>(C)), diagonal(a.take<float>(C)),
          key(a.take<float>(s.F)), k_angles(a.take<float>(2 * C * s.half)), q_angles(a.take<float>(2 * C * s.half)),
          factors(a.take<tiles::Factors>(1)) {}
  };
  static size_t bytes(const Shape& s, int count) {
    return sizeof(tiles::Factors) + 4 * (5 * C * s.F + 3 * C * s.E + C * C + 5 * C + 4 * s.F + 4 * C * s.half) + 1536 +
           count * (size_t)(4 * s.F * s.E + 8 * s.F + 2 * s.angle_bytes() + 512);
  }
  const Scratch& w;
  const bool same_angles, want_z;
  int64_t done = 0;
  float* S;  // S^T, (E, F)
  bool fresh;
  RunningSum z_sum;
  Decay decay;
  Angles k_angle, q_angle;

  BackwardQueries(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), same_angles(same_positions(c)), want_z(z_has_gradient(c.g_z)),
        S(arena.take<float>(s.F * s.E)), fresh(!ends.kv_in), z_sum(s.F, w.within, arena), decay(c, span),
        k_angle(c, s, span, c.key_positions, ends.angle_in, w.k_angles, arena),
        q_angle(c, s, span, c.positions, ends.angle_in, w.q_angles, arena) {
    const DecayFactor first_factor(span.begin < span.end ? decay.at(span.begin) : 0);
    state_in(s, ends.kv_in, S, true, first_factor);
    z_in(s, ends.z_in, z_sum.total, first_factor.exact);
  }

  void advance() {
    const int64_t t = span.begin + done;
    const int rows = decay.plan(t, anchor_after(t) - t), F = s.F, E = s.E, half = s.half;
    const Angles& query_angles = same_angles ? k_angle : q_angle;
    k_angle.forward(t, rows);
    if (!same_angles) q_angle.forward(t, rows);
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
    const bool finite = all_finite(w.hat, rows, s.feature_row);
    const Operands keys = operands(rows, s.value_row, s.feature_row, w.v_t, w.hat, w.factors, c.d_log_decay);
    for (int r = 0; r < group; r++) add_queries(t, keys, r, query_angles, finite);
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
  void add_queries(int64_t t, const Operands& keys, int r, const Angles& query_angles, bool finite) {
    const Rows q = queries(r), dout = query_rows(c.dout, r), dq = gradients(c.dq, query_head(r));
    const int rows = keys.rows, F = s.F, E = s.E, half = s.half;
    features(s, q, t, 1, rows, w.phi);
    for (int i = 0; i < rows; i++) {
      prefetch(dout, t + i, C, s.e), prefetch(dq, t + i, 0, s.f);
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
    multiply_chunk({keys, w.gb, fresh ? nullptr : S, decay.exp_D, finite, false, w.scores, w.d, F,
                    c.d_log_decay ? w.diagonal : nullptr});
    const FinishQuery finish_query{*this, w.raw};
    FinishQuery::OwnKey own{};
    for (int i = 0; i < rows; i++) {
      const int64_t at = query_index(t + i, r);
      if (c.d_log_decay) {
        own = {c.d_log_decay + key_index(t + i), w.psi + i * F, w.diagonal[i], w.products[i], w.dens_before[i]};
        if (!same_angles) {
          rotate<false>(s, own.key, k_angle.cos + i * half, k_angle.sin + i * half, 1, w.key);
          rotate<true>(s, w.key, q_angle.cos + i * half, q_angle.sin + i * half, 1, w.key);
          own.key = w.key, own.product = dot(w.phi + i * F, w.key, F);
        }
      }
      c.dden[at] = finish_query(q, dq, t + i, w.phi + i * F, w.d + i * F, w.z + i * F, query_angles.cos + i * half,
                               query_angles.sin + i * half, w.dens[i], c.inverse_den[at], angle_steps_at(t + i),
                               own);
    }
  }
  void finish() {
    if (ends.kv_out) state_out(s, S, true, ends.kv_out);
    if (ends.z_out) z_out(s, z_sum.total, ends.z_out);
  }
};

// Bidirectional: gradients of queries that read the state of all keys; Ends' out receives the gradient of that state.
struct BidirectionalBackward : Task {
  static constexpr int C = kChunk;
  struct Scratch {
    float *x, *hat, *hat_t, *d, *gb, *panels, *dens, *ones, *raw, *angles;
    tiles::Factors* factors;
    Scratch(const Shape& s, Arena& a)
        : x(a.take<float>(C * s.F)), hat(a.take<float>(C * s.F)), hat_t(a.take<float>(C * s.F)),
          d(a.take<float>(C * s.F)), gb(a.take<float>(C * s.E)), panels(a.take<float>(C * s.E)),
          dens(a.take<float>(C)), ones(a.take<float>(C)), raw(a.take<float>(s.F)),
          angles(a.take<float>(2 * C * s.half)), factors(a.take<tiles::Factors>(1)) {
      for (int i = 0; i < C; i++) ones[i] = 1;
    }
  };
  static size_t bytes(const Shape& s, int count) {
    return sizeof(tiles::Factors) + 4 * (4 * C * s.F + 2 * C * s.E + 2 * C + s.F + 2 * C * s.half) + 1024 +
           count * (size_t)(8 * s.F * s.E + 20 * s.F + s.angle_bytes() + 512);
  }
  const Scratch& w;
  int64_t done = 0;
  float *S, *dS, *z;
  double* dz;
  Angles query_angles;

  BidirectionalBackward(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, Arena& arena)
      : Task(c, span, ends), w(w), S(arena.take<float>(s.F * s.E)), dS(arena.take<float>(s.F * s.E)),
        z(arena.take<float>(s.F)), dz(arena.take<double>(s.F)),
        query_angles(c, s, span, c.positions, ends.angle_in, w.angles, arena) {
    state_in(s, ends.kv_in, S, true, DecayFactor());
    z_in(s, ends.z_in, dz, 1);
    for (int i = 0; i < s.F; i++) z[i] = (float)dz[i], dz[i] = 0;
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
        prefetch(dout, t + i, C, s.e), prefetch(dq, t + i, 0, s.f);
        w.dens[i] = c.normalize ? dot(w.x + i * F, z, F) : 1;
        values(s, dout, t + i, w.gb + i * E, NW, inverse_den(w.dens[i]));
        copy_to_panels(w.gb + i * E, E, w.panels + i * s.value_row.panel, NW * C);
        rotate<false>(s, w.x + i * F, query_angles.cos + i * half, query_angles.sin + i * half, 1, w.hat + i * F);
      }
      zero_to_multiple_of_four(w.hat, rows, F);
      transpose(w.hat, rows, F, w.hat_t);
      multiply_chunk({operands(rows, s.value_row, s.feature_row, nullptr, nullptr, w.factors), w.gb, S, w.ones, true, false, nullptr, w.d, F});
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
