// Gradients of a causal call, last chunk to first. With gb = dout / den, S the state before the chunk, dS the gradient of
// the state after it, D and D_end as in forward.h, and x the gradient of u:
//   x_j    = e^(D_end - D_j) dS^T psi^_j + sum_(i >= j) e^(D_i - D_j) <phi^_i, psi^_j> gb_i
//   dphi^_i = e^(D_i) S gb_i + sum_(j <= i) e^(D_i - D_j) <gb_i, u_j> psi^_j
//   dpsi^_j = e^(D_end - D_j) dS u_j + sum_(i >= j) e^(D_i - D_j) <gb_i, u_j> phi^_i
//   dS     <- e^(D_end) dS + sum_i e^(D_i) phi^_i gb_i^T
// With erase b, x solves the transposed system of forward.h, x_j -= sum_(i > j) b_i e^(D_i - D_j) <psi^_i, psi^_j> x_i, and
// each token's key has read, too:
//   read_i  = e^(D_i) S x_i + sum_(j < i) e^(D_i - D_j) <x_i, u_j> psi^_j        db_i = -<psi^_i, read_i>
//   dpsi^_j -= b_j read_j + sum_(i > j) b_i e^(D_i - D_j) <x_i, u_j> psi^_i
//   dS      -= sum_i b_i e^(D_i) psi^_i x_i^T
// A value's gradient is w x, and that of its factor <v, x>.
//
// The gradient of a token's log decay is the sum over all pairs of an earlier writer and of a reader that is the token or
// a later one: those of other chunks <S, dS> e^(D_end), those with a reader in the chunk <phi^_i, e^(D_i) S gb_i>, those
// with a writer in it <psi^_j, e^(D_end - D_j) dS u_j>, and those in it score by score. No large terms cancel.
#pragma once
#include <array>

#include "forward.h"

namespace linrope {
namespace {

// d is the gradient of a token's features y, and becomes that of the map's input. length, factor: those of
// Task::read_features, used only with c.query_factor. raw: scratch (F)
void through_map(const Task& task, const Rows& inputs, int64_t token, const float* y, float length, float factor,
                 float* raw, float* d) {
  const Shape& s = task.s;
  const bool has_length = task.c.query_factor;
  if (has_length) set_length_backward(s, y, length, factor, d);
  if (s.map == kIdentity) return;
  if (reads_input(s.map)) features(s, inputs, token, kIdentity, raw);
  const float* x = reads_input(s.map) ? raw : y;
  const vf before_length = splat(has_length && factor ? 1 / factor : 0);
  for (int i = 0; i < s.F; i += W) {
    const vf mapped = has_length ? load(y + i) * before_length : load(y + i);
    store(d + i, load(d + i) * slope(s.map, load(x + i), mapped));
  }
}

// Gradients of `count` rows of features (F): R^T d + factors o added, with R the rotation of each row. A factor of 0 keeps
// infinities of `added` out
struct FeatureGradients {
  const float *cos, *sin;  // (count, half)
  const float* d;          // (count, F): the gradients of the rotated rows
  const float* added;      // rows `stride` apart; null: 0
  int stride;
  const float* factors;  // null: 1
  FeatureGradients(const Angles& angles, const float* d, const float* added, int stride, const float* factors, int first = 0)
      : cos(angles.cos + first * angles.s.half), sin(angles.sin + first * angles.s.half), d(d), added(added),
        stride(stride), factors(factors) {}
  float factor(int i) const { return !added ? 0 : factors ? factors[i] : 1; }
  void row(const Shape& s, int i, float* to) const {
    rotate<true>(s, d + i * s.F, cos + i * s.half, sin + i * s.half, to);
    if (factor(i) != 0) add_multiple(factor(i), added + i * stride, s.F, to);
  }
};

// The same for plain rows, times the slope of the map, written to `to`. y: the features; inputs: those of the map
template <class T, int M>
void write_through_map(const Shape& s, const Rows& inputs, const Rows& to, int64_t token, int count, const float* y,
                       const FeatureGradients x) {
  const int half = s.half, F = s.F;
  const bool interleaved = s.layout == kInterleaved;
  for (int i = 0; i < count; i++, y += F) {
    const T* input = (const T*)inputs.at(token + i);
    T* row = (T*)to.at(token + i);
    const float *d = x.d + i * F, *cos = x.cos + i * half, *sin = x.sin + i * half, factor = x.factor(i);
    const float* added = factor != 0 ? x.added + i * x.stride : nullptr;
    for (int p = 0; p < half; p += W) {
      const vf da = load(d + p), db = load(d + half + p), c = load(cos + p), n = load(sin + p);
      vf a = da * c + db * n, b = db * c - da * n, input_a = {}, input_b = {};
      if (added) {
        a += load(added + p) * factor;
        b += load(added + half + p) * factor;
      }
      if (reads_input(M)) read_pairs(input, p, half, interleaved, input_a, input_b);
      a *= slope(M, input_a, load(y + p));
      b *= slope(M, input_b, load(y + half + p));
      if (interleaved) {
        store_pairs(row + 2 * p, a, b);
      } else {
        store(row + p, a);
        store(row + half + p, b);
      }
    }
    for (int f = 2 * half; f < F; f += W) {
      const vf a = added ? load(d + f) + load(added + f) * factor : load(d + f);
      store(row + f, a * slope(M, reads_input(M) ? load(input + f) : vf{}, load(y + f)));
    }
  }
}
// The same for all rows. raw, row: scratch (F)
void write_gradients(const Task& task, const Rows& inputs, const Rows& to, int64_t token, int count, const float* y,
                     float length, const float* lengths, const FeatureGradients& x, float* raw, float* row) {
  const Shape& s = task.s;
  const Call& c = task.c;
  if (s.plain() && !s.compact && !c.query_factor && inputs.type == to.type && c.heads_per_gradient == 1)
    return with_type(to.type, [&]<class T>() {
      with_map(s.map, [&]<int M>() { write_through_map<T, M>(s, inputs, to, token, count, y, x); });
    });
  for (int i = 0; i < count; i++) {
    x.row(s, i, row);
    through_map(task, inputs, token + i, y + i * s.F, length, lengths[i], raw, row);
    task.write_gradient(row, to, token + i);
  }
}

// What a token's pairs add to the gradients of its angle steps: a rotation keeps these products, so that rotated features and
// their gradients have them, too
inline float of_angle(const Shape& s, const float* rotated, const float* d, int pair) {
  const int first = pair * s.pair_stride, second = first + s.partner;
  return rotated[first] * d[second] - rotated[second] * d[first];
}

// Finishes the gradients of queries, given d (count, F) = dphi^ without the normalizer's share
struct FinishQueries {
  const Task& task;
  const Angles& angles;
  const float *phi, *rotated, *z;  // (count, F); z's rows are z_stride apart
  int z_stride;
  const float *dens, *inverse_dens, *factors;  // per token; factors: those of Task::query_features
  const float* d;
  float *ddens, *raw, *row;  // ddens: per token, is set; raw, row: scratch (F)

  // Adds the terms of the queries to the gradients of angle steps, if these are wanted. dq: null: only ddens are wanted
  void operator()(const Rows& q, const Rows* dq, int64_t token, int count) const {
    const Shape& s = task.s;
    const Call& c = task.c;
    if (c.normalize) find_ddens(count);
    if (!dq) return;
    for (int i = 0; c.d_angle_steps && i < count; i++)
      for (int p = 0; p < s.pairs; p++)
        task.angle_steps_at(token + i)[p] += of_angle(s, rotated + i * s.F, d + i * s.F, p);
    const FeatureGradients gradients(angles, d, c.normalize ? z : nullptr, z_stride, ddens);
    write_gradients(task, q, *dq, token, count, phi, (float)c.query_factor, factors, gradients, raw, row);
  }
  void find_ddens(int count) const {  // <gb, num> = <phi^, dphi^>; 0 where den is constant
    dots(rotated, d, task.s.F, count, task.s.F, ddens);
    for (int i = 0; i < count; i += W) {
      const vf x = -load(ddens + i) * load(inverse_dens + i);
      store(ddens + i, task.c.add_eps ? x : load(dens + i) < task.eps ? vf{} : x);
    }
  }
};

struct Backward : Task {
  static constexpr int C = kChunk, kChunks = kBlock / C;
  struct Scratch : Pieces {
    using Pieces::Pieces;
    // psi, psi^, psi^ transposed, phi, phi^
    float *psi = features(), *keys = features(), *keys_t = features(), *phi = features(), *queries = features();
    // z of each token, z before it, and dden phi summed over the query heads, then over later tokens
    float *z = features(), *z_before = features(), *dden_phi = features();
    // dphi^, dpsi^, what the keys have read (see above), and the chunk's part of a running sum
    float *dq = features(), *dk = features(), *read = features(), *within = features(1);
    float *raw = features(1), *row = features(1);  // the input of a map, and a gradient
    // u, u transposed, gb, the gradient of u, and x times -b e^D or a token's value
    float *u = values(), *u_t = values(), *gb = values(), *x = values(), *scaled = values();
    // With `i` a reader and j a writer. scores: e^(D_i - D_j) <phi^_i, psi^_j>. products: e^(D_i - D_j) <gb_i, u_j>, and
    // with x_i for gb_i. pairs: what i and j add to log decay's gradient. erase_scores: b_i e^(D_i - D_j) <psi^_i, psi^_j>
    float *scores = score_matrix(), *products = score_matrix(), *pairs = score_matrix(), *erase_scores = score_matrix();
    // den, 1 / den, b, -b, and below the gradient of den
    float *dens = per_token(), *inverse_dens = per_token(), *erase = per_token(), *factors = per_token();
    float* ddens = per_token();
    // The factors that gave the features of keys and of queries their length
    float *key_factors = per_token(), *query_factors = per_token();
    // Each token's terms of log decay's gradient, in W parts: of its queries, of its key as a reader, of its key as a writer
    float *of_readers = arena.take<float>(C * W), *of_erasers = arena.take<float>(C * W);
    float *of_writers = arena.take<float>(C * W), *dS_t = state();  // dS_t: dS transposed
    // Of keys in each chunk of the block: the states before its chunks are found first
    mutable std::array<AngleRows, kChunks> k_angles = angle_rows(std::make_index_sequence<kChunks>());
    mutable AngleRows q_angles[1] = {{arena, s}};
    template <size_t... I> std::array<AngleRows, kChunks> angle_rows(std::index_sequence<I...>) const {
      return {((void)I, AngleRows(arena, s))...};
    }
    mutable ChunkDecay::Scratch decay{arena, s};
    // Only with a decay per unit. dk_within: the part of dpsi^ that comes from pairs within leaves. da: log decay's gradient
    float *dk_within = of_units(C), *da = of_units(C);
    // What pairs of a writer and a reader add to log decay's gradient, summed over pairs. across: the writer is before the
    // chunk, the reader after it. reads: before the chunk, in the leaf. writes: in the leaf, after the chunk. passing: in an
    // earlier and in a later leaf of the chunk
    float *across = of_units(1), *reads = of_units(kLeaves), *writes = of_units(kLeaves), *passing = of_units(kLeaves);
    float* of_units(int rows) const { return arena.take<float>(s.per_unit ? rows * s.F : 0); }
  };
  struct Kept : Pieces {
    using Pieces::Pieces;
    float* dS = state();
    double* dz = feature_sums();
    float* states = arena.take<float>(kChunks * s.F * s.E);  // S^T before each chunk of the current block
    double* z_states = arena.take<double>(kChunks * s.F);    // z
    AngleMemory k_angle{arena, s}, q_angle{arena, s};
  };
  const Scratch& w;
  const Kept& kept;
  // want_output: false if only the gradient of the state is wanted. same_angles: queries and keys have the same angles
  const bool want_output, same_angles, want_d_log_decay, want_d_angle_steps, want_dz, erases;
  const int query_heads;
  const bool want_states, want_z;  // S before each chunk is wanted; so is z
  int64_t done = 0;
  float* dS;     // the gradient of the state after the current chunk
  bool fresh;    // it is zero
  RunningSum z_sum, dz_sum;
  ChunkDecay decay;
  Angles k_angle, q_angle;
  Rows dk, dv;

  Backward(const Call& c, const Span& span, const Ends& ends, bool want_output, const Scratch& w, const Kept& kept)
      : Task(c, span, ends), w(w), kept(kept), want_output(want_output), same_angles(same_positions(c)),
        want_d_log_decay(want_output && c.d_log_decay), want_d_angle_steps(want_output && c.d_angle_steps),
        want_dz(c.normalize || (ends.dz_in && !c.erase.data)), erases(c.erase.data),
        query_heads(c.causal && c.dout.data ? group : 0),
        want_states(want_output ? query_heads || c.d_log_decay || erases : query_heads && c.normalize),
        want_z(want_states && (c.normalize || (want_d_log_decay && want_dz))), dS(kept.dS), fresh(!ends.dkv_in),
        z_sum{s.F, nullptr, w.within}, dz_sum{s.F, kept.dz, w.within}, decay(c, span, s, w.decay),
        k_angle(c, s, span, c.key_positions, ends.angle_in, w.k_angles.data(), kept.k_angle),
        q_angle(c, s, span, c.positions, ends.angle_in, w.q_angles, kept.q_angle), dk(gradients(c.dk, span.head)),
        dv(key_rows(c.dv)) {
    add_steps(span.begin, span.end, 1);  // the sweep starts from the total angle
    state_in(s, ends.dkv_in, dS);
    z_in(s, ends.dz_in, dz_sum.total);
  }
  void add_steps(int64_t first, int64_t last, int sign) {
    for (int64_t t = first; k_angle.steps.base && t < last; t++) k_angle.steps.add(t, (uint64_t)sign, k_angle.sum);
    memcpy(q_angle.sum, k_angle.sum, 8 * s.half);
  }

  void advance() {
    const int64_t end = span.end - done, first = block_begin(end - 1), t = end - (end - first - 1) % C - 1;
    if (want_states && (end == span.end || (end - span.start) % kBlock == 0)) find_states(first, end);
    const int chunk = (int)((t - first) / C);
    const bool from_zero = t == span.start && !ends.kv_in;
    sweep(t, (int)(end - t), chunk, from_zero ? nullptr : kept.states + chunk * s.F * s.E);
    done += end - t;
    fresh = false;
  }
  // Computes S and z before each chunk of the block, from those before the block
  void find_states(int64_t first, int64_t end) {
    const bool saved = first > span.start;
    transposed_state_in(s, saved ? saved_kv(first) : ends.kv_in, w.dS_t, kept.states);
    z_in(s, saved ? saved_z(first) : ends.z_in, kept.z_states);
    add_steps(first, end, -1);
    int64_t t = first;
    for (int i = 0; end - t > C; i++, t += C) {
      decay.plan(t, C, false);
      k_angle.forward(t, C, i);
      fetch(k, t + C, s.f);
      fetch(v, t + C, s.e);
      read_keys(t, C);
      const float* S = kept.states + i * s.F * s.E;
      scale_rows(w.u, C, s.E, decay.to_end_of_rows());
      const float* writers = decay.carried_to_end(w.keys, C);
      Update next = decay.update({C, s.value_row, s.feature_row, w.u, writers, nullptr, false}, true, true);
      next.S = kept.states + (i + 1) * s.F * s.E;
      next.from = S;
      update(next);
      memcpy(kept.z_states + (i + 1) * s.F, kept.z_states + i * s.F, 8 * s.F);
      if (!want_z) continue;
      z_sum.total = kept.z_states + (i + 1) * s.F;
      decay.add_rows(z_sum, w.psi, C, w.z, nullptr);
      decay.end_chunk(z_sum);
    }
    add_steps(t, end, 1);
  }
  // psi, psi^ and u
  void read_keys(int64_t t, int rows) {
    key_features(t, rows, k_angle, w.psi, w.keys, w.key_factors);
    if (!erases) {
      key_values(t, rows, w.u);
      return;
    }
    for (int i = 0; i < rows; i++) {
      float* u = w.u + i * s.E;
      copy_in(saved_u(t + i), u, s.e);
      zero(u + s.e, s.E - s.e);
    }
  }

  // The chunk of `rows` tokens from t on, with its number in the block and S^T before it (null: zero)
  void sweep(int64_t t, int rows, int chunk, const float* S_t) {
    decay.plan(t, rows);
    k_angle.backward(t, rows, chunk);
    if (!same_angles && query_heads) q_angle.backward(t, rows);
    if (want_output || c.normalize) read_chunk(t, rows, kept.z_states + chunk * s.F);
    if (want_output) gradients_after(rows, S_t);
    double across = 0;
    if (want_d_log_decay && !s.per_unit && S_t && !fresh) across = decay.scalar.factor.exact * product_of_states(S_t, w.dS_t);
    if (want_dz) zero(w.dden_phi, rows * s.F);
    if (!query_heads && !fresh) update(decay.update({0, s.feature_row, s.value_row, w.keys, w.u, dS, false}, false, true));
    for (int r = 0; r < query_heads; r++) sweep_queries(t, rows, r, S_t);
    if (want_output && erases) sweep_erasers(t, rows, S_t);
    if (want_dz) {
      decay.add_rows_backward(dz_sum, w.dden_phi, rows);
      decay.end_chunk(dz_sum);
    }
    if (want_d_log_decay && s.per_unit) write_d_log_decay_of_units(t, rows);
    else if (want_d_log_decay) write_d_log_decay(t, rows, across);
    for (int i = 0; want_output && s.per_unit && i < rows * s.F; i += W)
      store(w.dk + i, load(w.dk + i) + load(w.dk_within + i));
    if (want_output) write_gradients(t, rows);
  }
  void read_chunk(int64_t t, int rows, double* z) {
    const int64_t first = block_begin(t);
    for (const int64_t next : {t - C, first - kBlock}) {  // the latter is the first chunk that find_states reads
      if (next != t - C && t != first) continue;
      fetch(k, next, s.f);
      fetch(v, next, s.e);
    }
    read_keys(t, rows);
    if (want_output) {
      fetch(dk, t - C, s.f);
      fetch(dv, t - C, s.e);
    }
    if (query_heads || erases) {
      decay.transpose_keys(w.keys, rows, w.keys_t);
      zero_rest(w.u, rows, s.E);
      transpose(w.u, rows, s.E, w.u_t);
    }
    if (!want_z) return;
    z_sum.total = z;
    decay.add_rows(z_sum, w.psi, rows, w.z, want_d_log_decay ? w.z_before : nullptr);
  }
  // The first terms of x and of dpsi^, those of readers after the chunk
  Product x_after(int rows) const {
    return {.rows = rows, .K = s.feature_row, .N = s.value_row, .A = decay.carried_to_end(w.keys, rows),
            .S = fresh ? nullptr : dS, .scale = decay.to_end_of_rows(), .to = w.x, .stride = s.E};
  }
  Product dk_after(int rows) const {
    return {.rows = rows, .K = s.value_row, .N = s.feature_row, .A = w.u, .S = fresh ? nullptr : w.dS_t,
            .scale = decay.to_end_of_rows(), .to = w.dk, .stride = s.F, .with = w.keys,
            .sums = want_d_log_decay && !s.per_unit ? w.of_writers : nullptr};
  }
  // Prepares the sums of the chunk's gradients, and makes those terms that no query adds to at once
  void gradients_after(int rows, const float* S_t) {
    if (!fresh) transpose_state(dS, s.feature_row, s.value_row, w.dS_t);
    if (s.per_unit) {
      for (float* x : {w.dk_within, w.da}) zero(x, rows * s.F);
      for (float* x : {w.reads, w.writes, w.passing}) zero(x, kLeaves * s.F);
    } else if (want_d_log_decay) {
      for (float* sums : {w.of_readers, w.of_erasers, w.of_writers}) zero(sums, C * W);
      zero(w.pairs, C * C);
    }
    if (!query_heads) multiply(x_after(rows));
    if (!query_heads || s.per_unit) multiply(dk_after(rows));
    if (!s.per_unit) return;
    multiply_elements(w.dk, w.decay.units.to_end, rows * s.F, w.dk);
    if (!want_d_log_decay) return;
    add_to_leaves(rows, w.keys, nullptr, w.dk, w.writes);
    find_across(S_t);
  }
  // Adds factor_i A_i o d_i to the sum of each row's leaf
  void add_to_leaves(int rows, const float* A, const float* factor, const float* d, float* sums) {
    for (int i = 0; i < rows; i++)
      for (int f = 0; f < s.F; f += W) {
        float* sum = sums + i / kLeaf * s.F + f;
        const vf x = load(A + i * s.F + f) * load(d + i * s.F + f);
        store(sum, load(sum) + (factor ? x * factor[i] : x));
      }
  }
  // e^(D_end) <S, dS> of each feature
  void find_across(const float* S_t) {
    if (!S_t || fresh) return zero(w.across, s.F);
    const int P = s.feature_row.panel;
    const FeatureFactors& factors = w.decay.units.factors;
    for (int f = 0; f < s.F; f += W) {
      vf x = {};
      const int at = f / P * P * s.E + f % P;
      for (int e = 0; e < s.E; e++) x += load(S_t + at + e * P) * load(w.dS_t + at + e * P);
      store(w.across + f, x * load(factors.whole + f) + x * load(factors.part + f));
    }
  }
  // Query head r of the key/value head
  void sweep_queries(int64_t t, int rows, int r, const float* S_t) {
    const bool finite = read_queries(t, rows, r);
    if (want_output) {
      decay.scores(*this, w.queries, w.keys, w.keys_t, rows, nullptr, w.scores);
      Product x = r ? Product{.rows = rows, .N = s.value_row, .accumulate = true, .to = w.x, .stride = s.E} : x_after(rows);
      x.scores = w.scores;
      x.transposed = true;
      x.V = w.gb;
      x.finite = finite;
      multiply(x);
    }
    if (want_output || c.normalize) {
      multiply_with_u(w.gb, rows, w.scores, w.products);
      read_states(w.gb, rows, S_t, w.queries, nullptr, w.dq, w.of_readers);
    }
    if (want_output) add_to_writers(rows, w.queries, r == 0);
    if (want_dS(t)) {
      scale_rows(w.gb, rows, s.E, decay.from_start_of_rows());
      const float* readers = decay.carried_from_start(w.queries, rows);
      update(decay.update({rows, s.feature_row, s.value_row, readers, w.gb, dS, fresh && r == 0}, false, r == 0));
    }
    finish_queries(t, rows, r);
  }
  // True if the gradient of the state before the chunk from t on is wanted
  bool want_dS(int64_t t) const { return t > span.begin || ends.dkv_out; }
  // d_i = e^(D_i) S G_i + sum_j products_ij psi^_j, the gradient of the rows A that read with factor_i (null: 1); sums: what
  // their reading of S adds to log decay's gradient
  void read_states(const float* G, int rows, const float* S_t, const float* A, const float* factor, float* d, float* sums) {
    const bool of_units = s.per_unit;
    multiply({.rows = rows, .K = s.value_row, .N = s.feature_row, .A = G, .S = S_t,
              .scale = decay.from_start_of_rows(), .scores = of_units ? nullptr : w.products, .V = w.keys,
              .finite = of_units || all_finite(w.keys, rows * s.F), .to = d, .stride = s.F, .with = A,
              .sums = want_d_log_decay && !of_units ? sums : nullptr});
    if (!of_units) return;
    multiply_elements(d, w.decay.units.from_start, rows * s.F, d);
    if (want_d_log_decay) add_to_leaves(rows, A, factor, d, w.reads);
    w.decay.units.add_earlier(w.products, d, A, factor, want_d_log_decay ? w.passing : nullptr);
    if (want_d_log_decay) add_reads(rows, A, factor, d);
    w.decay.units.add_within(w.products, A, d, w.keys, w.dk_within, factor, !factor, want_d_log_decay ? w.da : nullptr);
  }
  // Adds what the tokens of a leaf read from before it to the gradients of its earlier tokens' log decay
  void add_reads(int rows, const float* A, const float* factor, const float* d) {
    for (int f = 0; f < s.F; f += W)
      for (int J = 0; J * kLeaf < rows; J++) {
        vf reads = {};
        for (int i = (J + 1) * kLeaf < rows ? (J + 1) * kLeaf - 1 : rows - 1; i >= J * kLeaf; i--) {
          const int at = i * s.F + f;
          const vf x = load(A + at) * load(d + at);
          reads += factor ? x * factor[i] : x;
          store(w.da + at, load(w.da + at) + reads);
        }
      }
  }
  // Adds sum_(i >= j) products_ij A_i to dpsi^_j; first: to its terms of readers after the chunk
  void add_to_writers(int rows, const float* A, bool first) {
    if (s.per_unit) return w.decay.units.add_later(w.products, w.dk);
    Product d = first ? dk_after(rows)
                      : Product{.rows = rows, .N = s.feature_row, .accumulate = true, .to = w.dk, .stride = s.F};
    d.scores = w.products;
    d.transposed = true;
    d.V = A;
    d.finite = all_finite(A, rows * s.F);
    multiply(d);
  }
  // phi, phi^, den and gb. True if gb is finite
  bool read_queries(int64_t t, int rows, int r) {
    const Angles& angles = same_angles ? k_angle : q_angle;
    const Rows q = queries(r), dout = query_rows(c.dout, r), dq = gradients(c.dq, query_head(r));
    fetch(q, t - C, s.f);
    fetch(dout, t - C, s.e);
    if (want_output) fetch(dq, t - C, s.f);
    query_features(q, t, rows, angles, w.phi, w.queries, w.query_factors);
    if (c.normalize) {
      dots(w.phi, w.z, s.F, rows, s.F, w.dens);
      inverse_dens(w.dens, rows, w.inverse_dens);
    }
    return values(s, dout, t, rows, c.normalize ? w.inverse_dens : nullptr, w.gb);
  }
  // to_ij = e^(D_i - D_j) <A_i, u_j>, or without the decay if it is per unit. Times the scores of the same tokens, this is
  // what a pair adds to log decay's gradient
  void multiply_with_u(const float* A, int rows, const float* scores, float* to) {
    const float* between = decay.scalar.between();
    if (!want_d_log_decay || s.per_unit)
      return multiply_scores({.rows = rows, .K = s.value_row, .A = A, .B_t = w.u_t, .L = between, .to = to});
    multiply_scores({.rows = rows, .K = s.value_row, .A = A, .B_t = w.u_t, .to = to});
    for (int i = 0; i < rows; i++)
      for (int j = 0; j <= i; j += W) {
        const int at = i * C + j;
        const vf x = load(to + at);
        store(w.pairs + at, load(w.pairs + at) + x * load(scores + at));
        store(to + at, iota() + j <= i ? x * load(between + at) : vf{});
      }
  }
  void finish_queries(int64_t t, int rows, int r) {
    if (!want_output && !c.normalize) return;
    const Rows q = queries(r), dq = gradients(c.dq, query_head(r));
    for (int i = 0; want_d_angle_steps && r == 0 && i < rows; i++) zero(angle_steps_at(t + i), (int)c.pairs);
    const FinishQueries finish{*this, same_angles ? k_angle : q_angle, w.phi, w.queries, w.z, s.F, w.dens,
                               w.inverse_dens, w.query_factors, w.dq, w.ddens, w.raw, w.row};
    finish(q, want_output ? &dq : nullptr, t, rows);
    for (int i = 0; c.normalize && i < rows; i++)
      if (w.ddens[i] != 0) add_multiple(w.ddens[i], w.phi + i * s.F, s.F, w.dden_phi + i * s.F);
  }
  // What the chunk's keys have read and erased
  void sweep_erasers(int64_t t, int rows, const float* S_t) {
    for (int i = 0; i < rows; i++) {
      w.erase[i] = erase(t + i);
      w.factors[i] = -w.erase[i];
    }
    decay.scores(*this, w.keys, w.keys, w.keys_t, rows, w.erase, w.erase_scores);
    solve_transposed(rows, s.value_row, w.erase_scores, w.x);
    for (int i = 0; want_d_log_decay && !s.per_unit && i < rows * C; i += W) store(w.scores + i, -load(w.erase_scores + i));
    multiply_with_u(w.x, rows, w.scores, w.products);
    for (int i = 0; i < rows; i++) w.products[i * C + i] = 0;  // a key reads before its token writes
    read_states(w.x, rows, S_t, w.keys, w.factors, w.read, w.of_erasers);
    scale_rows(w.products, rows, C, w.factors);
    add_to_writers(rows, w.keys, false);
    if (want_dS(t)) {
      memcpy(w.scaled, w.x, 4 * rows * s.E);
      scale_rows(w.scaled, rows, s.E, w.factors);
      scale_rows(w.scaled, rows, s.E, decay.from_start_of_rows());
      const float* readers = decay.carried_from_start(w.keys, rows);
      update(decay.update({rows, s.feature_row, s.value_row, readers, w.scaled, dS, false}, false, false));
    }
    for (int i = 0; i < rows; i++) {
      float *read = w.read + i * s.F, *d = (s.per_unit ? w.dk_within : w.dk) + i * s.F;
      if (c.d_erase) c.d_erase[key_index(t + i)] = unmasked(t + i) ? -dot(w.keys + i * s.F, read, s.F) : 0;
      for (int f = 0; f < s.F; f += W) store(d + f, load(d + f) + load(read + f) * w.factors[i]);
      float* readers = w.of_readers + i * W;
      if (want_d_log_decay) store(readers, load(readers) + load(w.of_erasers + i * W) * w.factors[i]);
    }
  }

  // across: the sum over the pairs of an earlier chunk's writer and a later chunk's reader
  void write_d_log_decay(int64_t t, int rows, double across) {
    double written[C], before = 0, read = 0;
    for (int i = 0; i < rows; i++) {
      written[i] = before;
      before += sum(load(w.of_writers + i * W));
    }
    float sums[C] = {};  // of each writer's pairs with the current token and later ones
    for (int i = rows - 1; i >= 0; i--) {
      double pairs = 0;
      read += sum(load(w.of_readers + i * W));
      for (int j = 0; j < i; j++) pairs += sums[j] += w.pairs[i * C + j];
      double total = across + read + written[i] + pairs;
      if (want_z) total += product(w.z_before + i * s.F, w.dden_phi + i * s.F, s.F);
      c.d_log_decay[key_index(t + i)] = (float)total;
    }
  }
  // Per unit. The sum over the pairs of a writer before a leaf and a reader after it is the same for all of its tokens
  void write_d_log_decay_of_units(int64_t t, int rows) {
    const int F = s.F;
    for (int f = 0; f < F; f += W)
      for (int J = 0; J * kLeaf < rows; J++) {
        vf others = load(w.across + f) + load(w.passing + J * F + f);
        for (int K = 0; K < J; K++) others += load(w.writes + K * F + f);
        for (int K = J + 1; K < kLeaves; K++) others += load(w.reads + K * F + f);
        vf written = {};
        for (int i = J * kLeaf; i < rows && i < (J + 1) * kLeaf; i++) {
          float* to = w.da + i * F + f;
          vf x = load(to) + written + others;
          if (want_z) x += load(w.z_before + i * F + f) * load(w.dden_phi + i * F + f);
          store(to, x);
          written += load(w.keys + i * F + f) * load(w.dk + i * F + f);
        }
      }
    for (int i = 0; i < rows; i++) {
      float* to = c.d_log_decay + key_index(t + i) * c.units;
      zero(to, (int)c.units);
      for (int f = 0; f < F; f++)
        if (const int unit = decay.units.unit_of[f]; unit >= 0) to[unit] += w.da[i * F + f];
    }
  }
  // <S, dS>, in parts of float32 whose sum is float64
  double product_of_states(const float* S, const float* dS) const {
    double total = 0;
    const int count = s.F * s.E, part = 16 * W;
    for (int from = 0; from < count; from += part)
      total += dot(S + from, dS + from, count - from < part ? count - from : part);
    return total;
  }

  void write_gradients(int64_t t, int rows) {
    if (want_d_angle_steps) sum_angle_steps(t, rows);
    for (int i = 0; c.write.data && i < rows; i++) split_gradient(t + i, w.x + i * s.E, w.scaled);
    if (!c.key_mask.data) {
      linrope::write_gradients(*this, k, dk, t, rows, w.psi, 1, w.key_factors, of_keys(0), w.raw, w.row);
      return write_values(s, w.x, s.E, dv, t, rows);
    }
    for (int i = 0; i < rows; i++) {
      float* d_value = w.x + i * s.E;
      if (unmasked(t + i)) {
        linrope::write_gradients(*this, k, dk, t + i, 1, w.psi + i * s.F, 1, w.key_factors + i, of_keys(i), w.raw, w.row);
      } else {
        zero(w.row, s.F);
        zero(d_value, s.E);
        write_gradient(w.row, dk, t + i);
      }
      write_values(s, d_value, s.E, dv, t + i, 1);
    }
  }
  // Of the chunk's features from row i on
  FeatureGradients of_keys(int i) const {
    return {k_angle, w.dk + i * s.F, want_dz ? w.dden_phi + i * s.F : nullptr, s.F, nullptr, i};
  }
  // Adds the terms of the keys to the gradients of angle steps, which are sums over later tokens, too. The normalizer's
  // share is not rotated
  void sum_angle_steps(int64_t t, int rows) {
    for (int i = rows - 1; i >= 0; i--) {
      float* steps = angle_steps_at(t + i);
      if (!c.dout.data) zero(steps, s.pairs);  // no query has written its terms
      for (int p = 0; unmasked(t + i) && p < s.pairs; p++)
        ends.sums[p] += of_angle(s, w.keys + i * s.F, w.dk + i * s.F, p);
      for (int p = 0; p < s.pairs; p++) steps[p] = (float)(ends.sums[p] += steps[p]);
    }
  }
  // Turns the gradient of what is written (E) into that of the value, and stores that of its factor. value: scratch (E)
  void split_gradient(int64_t token, float* gradient, float* value) const {
    const float factor = unmasked(token) ? write(token) : 0;
    float product_with_value = 0;
    if (c.d_write && unmasked(token)) {
      values(s, v, token, 1, nullptr, value);
      product_with_value = (float)product(gradient, value, s.E);
    }
    if (c.d_write) c.d_write[key_index(token)] = product_with_value;
    for (int e = 0; e < s.E; e += W) store(gradient + e, load(gradient + e) * factor);
  }
  void finish() {
    if (ends.dkv_out) state_out(s, dS, ends.dkv_out);
    if (ends.dz_out) z_out(s, dz_sum.total, ends.dz_out);
  }
};

// Bidirectional: gradients of queries that read the state of all keys; Ends' dkv_out and dz_out receive the gradient of
// that state.
struct BidirectionalBackward : Task {
  static constexpr int C = kChunk;
  struct Scratch : Pieces {
    using Pieces::Pieces;
    float *x = features(), *hat = features(), *d = features(), *gb = values();
    float *dens = per_token(), *inverse_dens = per_token(), *ddens = per_token(), *factors = per_token();
    float *raw = features(1), *row = features(1);
    mutable AngleRows angles[1] = {{arena, s}};
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
    transposed_state_in(s, ends.kv_in, dS, S);
    z_in(s, ends.z_in, dz);
    for (int i = 0; i < s.F; i++) {
      z[i] = (float)dz[i];
      dz[i] = 0;
    }
    zero(dS, s.F * s.E);
  }
  void advance() {
    const int64_t t = span.begin + done;
    const int rows = span.end - t < C ? (int)(span.end - t) : C, F = s.F;
    query_angles.forward(t, rows);
    if (c.d_angle_steps)
      for (int i = 0; i < rows; i++) zero(angle_steps_at(t + i), (int)c.pairs);
    for (int r = 0; r < group; r++) {
      const Rows q = queries(r), dout = query_rows(c.dout, r), dq = gradients(c.dq, query_head(r));
      fetch(q, t + C, s.f);
      fetch(dout, t + C, s.e);
      fetch(dq, t + C, s.f);
      query_features(q, t, rows, query_angles, w.x, w.hat, w.factors);
      if (c.normalize) {
        dots(w.x, z, 0, rows, F, w.dens);
        inverse_dens(w.dens, rows, w.inverse_dens);
      }
      values(s, dout, t, rows, c.normalize ? w.inverse_dens : nullptr, w.gb);
      multiply({.rows = rows, .K = s.value_row, .N = s.feature_row, .A = w.gb, .S = S, .to = w.d, .stride = F});
      const FinishQueries finish{*this, query_angles, w.x, w.hat, z, 0, w.dens, w.inverse_dens, w.factors, w.d, w.ddens,
                                 w.raw, w.row};
      finish(q, &dq, t, rows);
      for (int i = 0; c.normalize && i < rows; i++)
        for (int f = 0; f < F; f++) dz[f] += w.ddens[i] * w.x[i * F + f];
      update({rows, s.feature_row, s.value_row, w.hat, w.gb, dS, false, DecayFactor()});
    }
    done += rows;
  }
  void finish() {
    state_out(s, dS, ends.dkv_out);
    z_out(s, dz, ends.dz_out);
  }
};

}  // namespace
}  // namespace linrope
