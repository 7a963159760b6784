// The forward pass, chunk by chunk:  out_i = e^(D_i) (phi^_i S + sum_(j <= i) e^(-D_j) <phi^_i, psi^_j> v_j) / den_i
// With erase b, the same with u in place of v, which a triangular system determines:
// u_i = v_i - b_i e^(D_i) (psi^_i S + sum_(j < i) e^(-D_j) <psi^_i, psi^_j> u_j)
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
    if (!direct) return;
    rows = (float*)to.at(token);
    stride = to.stride / 4;
  }
  void write(const Shape& s, const Rows& to, int64_t token, int count) const {
    if (!direct)
      for (int i = 0; i < count; i++) write_values(s, rows + i * stride, to, token + i);
  }
};

struct Forward : ForwardSweep {
  static constexpr int C = kChunk;
  struct Scratch : ForwardSweep::Scratch {
    using ForwardSweep::Scratch::Scratch;
    float *x = features(), *hat = features();  // of keys, then of queries
    float *hat_t = features(), *z = features(), *v = values(), *result = values();
    float *scores = score_matrix(), *scale = per_token();
    tiles::Factors* factors = split_factors();
    float* reader() const { return z; }  // e^D b psi^: with erase there is no z
  };
  const Scratch& w;
  const int query_heads;

  Forward(const Call& c, const Span& span, const Ends& ends, bool want_output, const Scratch& w, const Kept& kept)
      : ForwardSweep(c, span, ends, false, c.normalize || ends.z_out || ends.anchors, w, kept), w(w),
        query_heads(want_output ? group : 0) {}

  void advance() {
    const int64_t t = span.begin + done;
    const int rows = decay.plan(t, anchor_after(t) - t);
    k_angle.forward(t, rows);
    // Without query heads the sweep runs over keys alone, and c.positions may have fewer entries than there are keys.
    if (!same_angles && query_heads) q_angle.forward(t, rows);
    read_keys(t, rows);
    if (c.erase.data) solve(t, rows);
    const Operands keys = operands(rows, s.feature_row, s.value_row, w.hat_t, w.v, w.factors);
    const bool finite = query_heads ? all_finite(w.v, rows, s.value_row) : true;
    for (int r = 0; r < query_heads; r++) write_outputs(t, keys, r, finite);
    done += rows;
    end_chunk(keys, t + rows);
  }
  // Reads a chunk: psi^ e^-D transposed, z of each token, and v in panels
  void read_keys(int64_t t, int rows) {
    const int F = s.F, half = s.half;
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
  }
  // Replaces v, which read_keys has read, by u
  void solve(int64_t t, int rows) {
    const int F = s.F, half = s.half;
    for (int i = 0; i < rows; i++)
      rotate<false>(s, w.x + i * F, k_angle.cos + i * half, k_angle.sin + i * half, erase(t + i) * decay.exp_D[i],
                    w.reader() + i * F);
    const Operands keys{rows, s.feature_row, s.value_row, w.hat_t, nullptr, nullptr, false};
    solve_chunk({.operands = keys, .A = w.reader(), .S = fresh ? nullptr : S, .scores = w.scores}, w.v);
  }
  // Attends with query head r of the key/value head
  void write_outputs(int64_t t, const Operands& keys, int r, bool finite) {
    const int rows = keys.rows, F = s.F, half = s.half;
    const Angles& query_angles = same_angles ? k_angle : q_angle;
    const Rows q = queries(r), out = query_rows(c.out, r);
    const Output to(s, out, t, w.result);
    features(s, q, t, 1, rows, w.x);
    for (int i = 0; i < rows; i++) {
      prefetch(out, t + i, 0, s.e);
      w.scale[i] = decay.exp_D[i] * inverse_den(c.normalize ? dot(w.x + i * F, w.z + i * F, F) : 1);
      rotate<false>(s, w.x + i * F, query_angles.cos + i * half, query_angles.sin + i * half, 1, w.hat + i * F);
    }
    multiply_chunk({.operands = keys, .A = w.hat, .S = fresh ? nullptr : S, .scale = w.scale, .finite = finite,
                    .scores = w.scores, .out = to.rows, .stride = to.stride});
    to.write(s, out, t, rows);
  }
};

// Bidirectional: every query of the span reads the state of all keys
struct Bidirectional : Task {
  static constexpr int C = kChunk;
  struct Scratch : Pieces {
    using Pieces::Pieces;
    float *x = features(), *hat = features(), *result = values(), *scale = per_token(), *angles = angle_rows();
    tiles::Factors* factors = split_factors();
  };
  struct Kept : Pieces {
    using Pieces::Pieces;
    float *S = state(), *z = features(1);
    double* z_in = feature_sums();
    AngleMemory angle{arena, s};
  };
  const Scratch& w;
  int64_t done = 0;
  float *S, *z;
  Angles query_angles;

  Bidirectional(const Call& c, const Span& span, const Ends& ends, bool, const Scratch& w, const Kept& kept)
      : Task(c, span, ends), w(w), S(kept.S), z(kept.z),
        query_angles(c, s, span, c.positions, ends.angle_in, w.angles, kept.angle) {
    state_in(s, ends.kv_in, S, false, DecayFactor());
    z_in(s, ends.z_in, kept.z_in, 1);
    for (int i = 0; i < s.F; i++) z[i] = (float)kept.z_in[i];
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
      multiply_chunk({.operands = no_keys, .A = w.hat, .S = S, .scale = w.scale, .out = to.rows, .stride = to.stride});
      to.write(s, out, t, rows);
    }
    done += rows;
  }
  void finish() {}
};

}  // namespace
}  // namespace linrope
