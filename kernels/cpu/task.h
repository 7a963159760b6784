// Shared by all sweeps over a sequence: the addresses of its rows, its keys, the running sum z, and the loop
// over the heads of a bundle.
#pragma once
#include <optional>

#include "amx.h"
#include "chunk.h"

namespace linrope {
namespace {

struct Task {
  const Call& c;
  Span span;
  Ends ends;
  Shape s;
  int64_t batch;
  int group;  // r: query heads per key/value head
  Rows k, v;
  float eps;
  bool amx;  // true if amx.h multiplies. A single chunk and narrow rows are faster without it

  Task(const Call& c, const Span& span, const Ends& ends)
      : c(c), span(span), ends(ends), s(c), batch(batch_row(c, span)), group(c.q.data ? (int)(c.h / c.g) : 0),
        k(c.k, c.type, batch, span.head / c.value_group), v(c.v, c.type, batch, span.head), eps((float)c.eps),
        amx(tiles::kAvailable && c.type != kFloat32 && span.end - span.begin > kChunk && s.feature_row.panel == NW &&
            s.value_row.panel == NW) {}

  // The operands of a chunk's products, split if amx.h multiplies them. factors: memory for that
  Operands operands(int rows, const RowLayout& K, const RowLayout& N, const float* B_t, const float* V,
                    tiles::Factors* factors, bool precise = false) const {
    const Operands x{rows, K, N, B_t, V, amx ? factors : nullptr, precise};
    if (amx && B_t) tiles::split(x);
    return x;
  }
  void multiply_chunk(const ChunkProduct& x) const {
    (x.operands.factors ? tiles::multiply_chunk : linrope::multiply_chunk)(x);
  }
  void update(const Operands& x, float* S, bool fresh, const DecayFactor& factor) const {
    (x.factors ? tiles::update : linrope::update)(x, S, fresh, factor);
  }

  int64_t query_head(int r) const { return span.head * group + r; }
  Rows query_rows(const View& x, int r) const { return Rows(x, c.type, batch, query_head(r)); }
  Rows key_rows(const View& x) const { return Rows(x, c.type, batch, span.head); }
  Rows queries(int r) const { return Rows(c.q, c.type, batch, query_head(r) / c.value_group); }
  // Rows of dq or dk, and a row's gradient
  Rows gradients(const View& x, int64_t head) const {
    return Rows(x, c.value_group > 1 ? kFloat32 : c.type, batch, head / c.heads_per_gradient);
  }
  void write_gradient(const float* y, const Rows& rows, int64_t token) const {
    if (c.heads_per_gradient > 1) add_features(s, y, rows, token);
    else write_features(s, y, rows, token);
  }
  int64_t query_index(int64_t token, int r) const { return (batch * c.n + token) * c.h + query_head(r); }
  int64_t key_index(int64_t token) const { return (batch * c.m + token) * c.g + span.head; }
  float* angle_steps_at(int64_t token) const {
    return c.d_angle_steps ? c.d_angle_steps + key_index(token) * c.pairs : nullptr;
  }
  bool unmasked(int64_t token) const {
    const View& mask = c.key_mask;
    return !mask.data || mask.as<bool>()[batch * mask.batch + token * mask.token];
  }
  // Features and values of keys from `token` on; the contents of masked tokens are never used
  void key_features(int64_t token, int direction, int count, float* psi) const {
    features(s, k, token, direction, count, psi);
    if (c.key_mask.data)
      for (int i = 0; i < count; i++)
        if (!unmasked(token + direction * i)) zero(psi + i * s.F, s.F);
  }
  void key_values(int64_t token, float* to, int block) const {
    if (unmasked(token)) values(s, v, token, to, block, write(token));
    else zero_row(to, block, s.E);
  }
  float read_factor(const View& x, int64_t token) const {
    const int64_t at = batch * x.batch + token * x.token + span.head * x.head;
    return (float)read(x.data + at * size_of(x.type), x.type);
  }
  // The factor of the token's value
  float write(int64_t token) const { return c.write.data ? read_factor(c.write, token) : 1; }
  // The factor of what the token's key reads and erases
  float erase(int64_t token) const { return unmasked(token) ? read_factor(c.erase, token) : 0; }
  // The nearest place for an anchor at or before the token, and the next one after it or the span's end
  int64_t anchor_before(int64_t token) const { return token - (token - span.begin) % kAnchorDistance; }
  int64_t anchor_after(int64_t token) const {
    const int64_t next = anchor_before(token) + kAnchorDistance;
    return next < span.end ? next : span.end;
  }
  bool is_anchor(int64_t token) const {
    return ends.anchors && token > span.begin && token < span.end && token == anchor_before(token);
  }
  static size_t anchor_bytes(const Shape& s) { return 4 * (size_t)s.F * s.E + 8 * (size_t)s.F; }
  char* anchor(int64_t token) const {
    return ends.anchors + ((token - span.begin) / kAnchorDistance - 1) * anchor_bytes(s);
  }
  void save_anchor(int64_t token, const float* S, const double* z) const {
    char* to = anchor(token);
    memcpy(to, z, 8 * s.F);
    memcpy(to + 8 * s.F, S, 4 * s.F * s.E);
  }
  // <S, dS> + <z, dz> with the state of the anchor before `token`
  double product_at_anchor(int64_t token, const float* dS, const double* dz) const {
    const char* from = anchor(token);
    double x = product((const float*)(from + 8 * s.F), dS, s.F * s.E);
    for (int i = 0; i < s.F; i++) x += ((const double*)from)[i] * dz[i];
    return x;
  }
  // 1 / max(den, eps), 1 / (den + eps), or 1 without a normalizer
  float inverse_den(float den) const {
    if (!c.normalize) return 1;
    return 1 / (c.add_eps ? den + eps : largest(splat(den), eps)[0]);
  }
};

// z_i of each token of a chunk: factor[i] (z + sum_(j <= i) weight[j] x[j]), with e^D and e^-D as factor and weight.
// Sums within a chunk are float32, the sum over chunks is float64.
struct RunningSum {
  int F;
  double* total;  // of the chunks before
  float* chunk;   // of the current chunk: scratch
  // x (count, F) -> y (count, F), which may be x
  void rows(const float* x, int count, const float* weight, const float* factor, float* y) {
    if (F < NW) return columns<NV / 2>(0, x, count, weight, factor, y);
    for (int f = 0; f < F; f += NW) columns<NV>(f, x, count, weight, factor, y);
  }
  template <int N>
  void columns(int f, const float* x, int count, const float* weight, const float* factor, float* y) {
    vf w[N] = {}, before[N];
    for (int v = 0; v < N; v++)
      for (int i = 0; i < W; i++) before[v][i] = (float)total[f + v * W + i];
    for (int i = 0; i < count; i++)
      for (int v = 0; v < N; v++) {
        const int at = i * F + f + v * W;
        w[v] += load(x + at) * weight[i];
        store(y + at, (before[v] + w[v]) * factor[i]);
      }
    for (int v = 0; v < N; v++) store(chunk + f + v * W, w[v]);
  }
  void end_chunk(const DecayFactor& factor) {
    for (int i = 0; i < F; i++) total[i] = (total[i] + chunk[i]) * factor.exact;
  }
  void decay(const DecayFactor& factor) {
    for (int i = 0; i < F; i++) total[i] *= factor.exact;
  }
};

// Zeros the rows after the last up to a multiple of four: transpose reads blocks of four
inline void zero_to_multiple_of_four(float* rows, int count, int K) {
  if (count % 4) zero(rows + count * K, K * (4 - count % 4));
}

// The pieces of scratch memory that sweeps take
struct Pieces {
  Arena& arena;
  const Shape& s;
  Pieces(Arena& arena, const Shape& s) : arena(arena), s(s) {}
  float* features(int rows = kChunk) const { return arena.take<float>(rows * s.F); }
  float* values(int rows = kChunk) const { return arena.take<float>(rows * s.E); }
  float* per_token() const { return arena.take<float>(kChunk); }
  float* score_matrix() const { return arena.take<float>(kChunk * kChunk); }
  float* angle_rows() const { return arena.take<float>(2 * kChunk * s.half); }
  float* state() const { return arena.take<float>(s.F * s.E); }
  double* feature_sums() const { return arena.take<double>(s.F); }
  tiles::Factors* split_factors() const { return arena.take<tiles::Factors>(1); }
};

// A sweep from the first token to the last. It keeps the state before the current chunk, S or S^T, and z.
struct ForwardSweep : Task {
  struct Scratch : Pieces {
    using Pieces::Pieces;
    float *within = features(1), *k_angles = angle_rows(), *q_angles = angle_rows();
  };
  struct Kept : Pieces {
    using Pieces::Pieces;
    float* S = state();
    double* z = feature_sums();
    AngleMemory k_angle{arena, s}, q_angle{arena, s};
  };
  const bool transposed;    // S^T, (E, F)
  const bool same_angles;   // queries and keys have the same angles
  const bool want_z;
  int64_t done = 0;
  float* S;
  bool fresh;  // S is zero
  RunningSum z_sum;
  Decay decay;
  Angles k_angle, q_angle;

  ForwardSweep(const Call& c, const Span& span, const Ends& ends, bool transposed, bool want_z, const Scratch& w,
               const Kept& kept)
      : Task(c, span, ends), transposed(transposed), same_angles(same_positions(c)), want_z(want_z), S(kept.S),
        fresh(!ends.kv_in), z_sum{s.F, kept.z, w.within}, decay(c, span),
        k_angle(c, s, span, c.key_positions, ends.angle_in, w.k_angles, kept.k_angle),
        q_angle(c, s, span, c.positions, ends.angle_in, w.q_angles, kept.q_angle) {
    const DecayFactor first_factor(span.begin < span.end ? decay.at(span.begin) : 0);
    state_in(s, ends.kv_in, S, transposed, first_factor);
    z_in(s, ends.z_in, z_sum.total, first_factor.exact);
  }
  // Makes S and z, those before a chunk with these keys, those before the chunk that starts at token `next`
  void end_chunk(const Operands& keys, int64_t next) {
    const bool more = next < span.end, anchor = is_anchor(next);
    if (!more && !ends.kv_out && !ends.z_out) return;
    const double next_decay = more ? decay.at(next) : 0;
    // An anchor is the state before the next token's own decay.
    const DecayFactor factor(anchor ? decay.sum : decay.sum + next_decay);
    update(keys, S, fresh, factor);
    if (want_z) z_sum.end_chunk(factor);
    fresh = false;
    if (!anchor) return;
    save_anchor(next, S, z_sum.total);
    const DecayFactor next_factor(next_decay);
    decay_state(S, s.F * s.E, next_factor);
    z_sum.decay(next_factor);
  }
  void finish() {
    if (ends.kv_out) state_out(s, S, transposed, ends.kv_out);
    if (ends.z_out) z_out(s, z_sum.total, ends.z_out);
  }
};

// What the sweeps over the heads of a bundle share, and what each of them keeps from chunk to chunk
template <class Sweep> struct BundleMemory {
  typename Sweep::Scratch scratch;
  Sweep* sweeps;
  std::optional<typename Sweep::Kept> kept[kBundle];
  BundleMemory(Arena& arena, const Shape& s, int count) : scratch(arena, s), sweeps(arena.take<Sweep>(count)) {
    for (int i = 0; i < count; i++) kept[i].emplace(arena, s);
  }
};

// Sweeps over the heads of a sequence together, a chunk of each in turn: the rows of a token's heads are
// adjacent, so that memory is read and written nearly in order. A Sweep has Scratch and Kept, both Pieces, done (the
// number of tokens so far), advance() (by one chunk) and finish().
template <class Sweep>
void run_bundle(const Call& c, int count, const Span* spans, const Ends* ends, bool want_output) {
  const Shape s(c);
  const tiles::Configuration configuration(c.type != kFloat32);
  const auto memory = lay_out<BundleMemory<Sweep>>(s, count);
  Sweep* sweeps = memory.sweeps;
  for (int i = 0; i < count; i++)
    new (sweeps + i) Sweep(c, spans[i], ends[i], want_output, memory.scratch, *memory.kept[i]);
  const int64_t tokens = spans[0].end - spans[0].begin;
  for (int64_t goal = kChunk; goal < tokens + kChunk; goal += kChunk)
    for (int i = 0; i < count; i++)
      while (sweeps[i].done < (goal < tokens ? goal : tokens)) sweeps[i].advance();
  for (int i = 0; i < count; i++) sweeps[i].finish();
}

}  // namespace
}  // namespace linrope
