// The forward pass, chunk by chunk. With S the state before the chunk, D_i the log decay from the chunk's start
// to token i, and D_end that to its end:
//   num_i = e^(D_i) S^T phi^_i + sum_(j <= i) e^(D_i - D_j) <phi^_i, psi^_j> u_j        out_i = num_i / den_i
//   S <- e^(D_end) S + sum_j psi^_j e^(D_end - D_j) u_j^T
// u is what the tokens write: w v or, with erase b, what a triangular system determines:
//   u_i = w_i v_i - b_i (e^(D_i) S^T psi^_i + sum_(j < i) e^(D_i - D_j) <psi^_i, psi^_j> u_j)
#pragma once
#include "unit_decay.h"

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
    if (!direct) write_values(s, rows, stride, to, token, count);
  }
};

struct Forward : Task {
  static constexpr int C = kChunk;
  struct Scratch : Pieces {
    using Pieces::Pieces;
    float *x = features(), *hat = features();  // of keys, then of queries
    float *keys = features(), *keys_t = features(), *z = features(), *u = values(), *result = values();
    float *scores = score_matrix(), *scale = per_token(), *erase = per_token(), *within = features(1);  // erase: b_i
    mutable AngleRows k_angles[1] = {{arena, s}}, q_angles[1] = {{arena, s}};
    mutable ChunkDecay::Scratch decay{arena, s};
  };
  struct Kept : Pieces {
    using Pieces::Pieces;
    float* S = state();
    double* z = feature_sums();
    AngleMemory k_angle{arena, s}, q_angle{arena, s};
  };
  const Scratch& w;
  const int query_heads;
  const bool same_angles, want_z;  // same_angles: queries and keys have the same angles
  int64_t done = 0;
  float* S;    // the state before the current chunk
  bool fresh;  // it is zero
  RunningSum z_sum;
  ChunkDecay decay;
  Angles k_angle, q_angle;

  Forward(const Call& c, const Span& span, const Ends& ends, bool want_output, const Scratch& w, const Kept& kept)
      : Task(c, span, ends), w(w), query_heads(want_output ? group : 0), same_angles(same_positions(c)),
        want_z(c.normalize || ends.z_out || c.saved_z.data), S(kept.S), fresh(!ends.kv_in), z_sum{s.F, kept.z, w.within},
        decay(c, span, s, w.decay), k_angle(c, s, span, c.key_positions, ends.angle_in, w.k_angles, kept.k_angle),
        q_angle(c, s, span, c.positions, ends.angle_in, w.q_angles, kept.q_angle) {
    state_in(s, ends.kv_in, S);
    z_in(s, ends.z_in, z_sum.total);
  }

  void advance() {
    const int64_t t = span.begin + done;
    const int rows = span.end - t < C ? (int)(span.end - t) : C;
    if (ends.save && t > span.start && t == block_begin(t)) save_state(t);
    decay.plan(t, rows, query_heads || c.erase.data);
    k_angle.forward(t, rows);
    // Without query heads the sweep runs over keys alone, and c.positions may have fewer entries than there are keys.
    if (!same_angles && query_heads) q_angle.forward(t, rows);
    bool finite = read_keys(t, rows);
    if (c.erase.data) finite = erase_keys(t, rows);
    for (int r = 0; r < query_heads; r++) write_outputs(t, rows, r, finite);
    done += rows;
    if (t + rows < span.end || ends.kv_out || ends.z_out) end_chunk(rows);
  }
  void save_state(int64_t t) const {
    state_out(s, S, saved_kv(t));
    if (c.saved_z.data) z_out(s, z_sum.total, saved_z(t));
  }
  // Reads a chunk: psi^, its transpose if scores are wanted, z of each token, and the values. True if these are finite
  bool read_keys(int64_t t, int rows) {
    fetch(k, t + C, s.f);
    fetch(v, t + C, s.e);
    key_features(t, rows, k_angle, w.x, w.keys, nullptr);
    if (want_z) decay.add_rows(z_sum, w.x, rows, w.z, nullptr);
    if (query_heads || c.erase.data) decay.transpose_keys(w.keys, rows, w.keys_t);
    return key_values(t, rows, w.u);
  }
  // Replaces the values by what the tokens write. True if that is finite
  bool erase_keys(int64_t t, int rows) {
    for (int i = 0; i < rows; i++) w.erase[i] = erase(t + i);
    decay.scores(*this, w.keys, w.keys, w.keys_t, rows, w.erase, w.scores);
    const float* from_start = decay.from_start_of_rows();
    for (int i = 0; i < rows; i++) w.scale[i] = from_start ? w.erase[i] * from_start[i] : w.erase[i];
    const float* readers = decay.carried_from_start(w.keys, rows);
    solve({rows, s.feature_row, s.value_row, readers, fresh ? nullptr : S, w.scale, w.scores, w.u});
    for (int i = 0; ends.save && i < rows; i++) copy_out(w.u + i * s.E, saved_u(t + i), s.e);
    return all_finite(w.u, rows * s.E);
  }
  // Attends with query head r of the key/value head
  void write_outputs(int64_t t, int rows, int r, bool finite) {
    const Rows out = query_rows(c.out, r);
    const Output to(s, out, t, w.result);
    fetch(queries(r), t + C, s.f);
    fetch(out, t + C, s.e);
    query_features(queries(r), t, rows, same_angles ? k_angle : q_angle, w.x, w.hat, nullptr);
    if (c.normalize) {
      dots(w.x, w.z, s.F, rows, s.F, w.scale);
      inverse_dens(w.scale, rows, w.scale);
    }
    decay.attend(*this, w.hat, w.keys, w.keys_t,
                 {.rows = rows, .K = s.feature_row, .N = s.value_row, .S = fresh ? nullptr : S, .V = w.u, .finite = finite,
                  .last_scale = c.normalize ? w.scale : nullptr, .to = to.rows, .stride = to.stride}, w.scores);
    to.write(s, out, t, rows);
  }
  // Makes S and z those before the next chunk
  void end_chunk(int rows) {
    scale_rows(w.u, rows, s.E, decay.to_end_of_rows());
    const float* writers = decay.carried_to_end(w.keys, rows);
    Update next = decay.update({rows, s.feature_row, s.value_row, writers, w.u, S, fresh}, false, true);
    if (query_heads || c.erase.data) next.B_t = w.keys_t;
    update(next);
    if (want_z) decay.end_chunk(z_sum);
    fresh = false;
  }
  void finish() {
    if (ends.kv_out) state_out(s, S, ends.kv_out);
    if (ends.z_out) z_out(s, z_sum.total, ends.z_out);
  }
};

// Bidirectional: every query of the span reads the state of all keys
struct Bidirectional : Task {
  static constexpr int C = kChunk;
  struct Scratch : Pieces {
    using Pieces::Pieces;
    float *x = features(), *hat = features(), *result = values(), *scale = per_token();
    mutable AngleRows angles[1] = {{arena, s}};
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
    state_in(s, ends.kv_in, S);
    z_in(s, ends.z_in, kept.z_in);
    for (int i = 0; i < s.F; i++) z[i] = (float)kept.z_in[i];
  }
  void advance() {
    const int64_t t = span.begin + done;
    const int rows = span.end - t < C ? (int)(span.end - t) : C;
    query_angles.forward(t, rows);
    for (int r = 0; r < group; r++) {
      const Rows out = query_rows(c.out, r);
      const Output to(s, out, t, w.result);
      fetch(queries(r), t + C, s.f);
      fetch(out, t + C, s.e);
      query_features(queries(r), t, rows, query_angles, w.x, w.hat, nullptr);
      if (c.normalize) {
        dots(w.x, z, 0, rows, s.F, w.scale);
        inverse_dens(w.scale, rows, w.scale);
      }
      multiply({.rows = rows, .K = s.feature_row, .N = s.value_row, .A = w.hat, .S = S,
                .last_scale = c.normalize ? w.scale : nullptr, .to = to.rows, .stride = to.stride});
      to.write(s, out, t, rows);
    }
    done += rows;
  }
  void finish() {}
};

}  // namespace
}  // namespace linrope
