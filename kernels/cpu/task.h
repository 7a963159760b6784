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
  mutable Prefetcher ahead;
  bool amx;  // true if amx.h multiplies. A single chunk and narrow rows are faster without it

  Task(const Call& c, const Span& span, const Ends& ends)
      : c(c), span(span), ends(ends), s(c), batch(batch_row(c, span)), group(c.q.data ? (int)(c.h / c.g) : 0),
        k(c.k, c.type, batch, span.head / c.value_group), v(c.v, c.type, batch, span.head), eps((float)c.eps),
        amx(tiles::kAvailable && c.type != kFloat32 && span.end - span.begin > kChunk && s.feature_row.panel == NW &&
            s.value_row.panel == NW) {}

  void multiply_scores(const Scores& x) const { amx ? tiles::multiply_scores(x, ahead) : linrope::multiply_scores(x, ahead); }
  void multiply(const Product& x) const { amx ? tiles::multiply(x, ahead) : linrope::multiply(x, ahead); }
  // The scores and a product with them, whose A is the same
  void attend(const Scores& x, const Product& y) const {
    if (amx) return tiles::multiply(y, ahead, &x);
    linrope::multiply_scores(x, ahead);
    linrope::multiply(y, ahead);
  }
  void update(const Update& x) const { amx ? tiles::update(x, ahead) : linrope::update(x, ahead); }

  // Fetches the first `width` numbers of the rows of a chunk from `token` on, those that the span has
  void fetch(const Rows& x, int64_t token, int width) const {
    const int64_t left = span.end - token;
    if (token < span.begin || !x.base) return;
    ahead.add(x.at(token), x.stride, width * size_of(x.type), (int)(left < kChunk ? left : kChunk));
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
  // Features of queries and of keys from `token` on, the same rotated, and with c.query_factor the factors that gave the
  // rows their length; null: not wanted. The contents of masked tokens are never used, here and for values
  void query_features(const Rows& q, int64_t token, int count, const Angles& angles, float* phi,
                      float* rotated, float* factors) const {
    read_features(q, token, count, (float)c.query_factor, phi, angles.turn(rotated), factors);
  }
  void key_features(int64_t token, int count, const Angles& angles, float* psi, float* rotated,
                    float* factors) const {
    read_features(k, token, count, 1, psi, angles.turn(rotated), factors);
    for (int i = 0; c.key_mask.data && i < count; i++)
      if (!unmasked(token + i))
        for (float* rows : {psi, rotated}) zero(rows + i * s.F, s.F);
  }
  void read_features(const Rows& x, int64_t token, int count, float length, float* y, const Turn& turn,
                     float* factors) const {
    if (!c.query_factor) return features(s, x, token, count, y, turn);
    features(s, x, token, count, y, {});
    for (int i = 0; i < count; i++) {
      const float factor = set_length(s, y + i * s.F, length);
      if (factors) factors[i] = factor;
      turn.row(s, i, y + i * s.F);
    }
  }
  // The values of keys from `token` on, times what `write` says. True if all of them are finite
  bool key_values(int64_t token, int count, float* to) const {
    float factors[kChunk];
    for (int i = 0; c.write.data && i < count; i++) factors[i] = write(token + i);
    const float* written = c.write.data ? factors : nullptr;
    if (!c.key_mask.data) return values(s, v, token, count, written, to);
    bool finite = true;
    for (int i = 0; i < count; i++)
      if (!unmasked(token + i)) zero(to + i * s.E, s.E);
      else finite &= values(s, v, token + i, 1, written ? written + i : nullptr, to + i * s.E);
    return finite;
  }
  float read_factor(const View& x, int64_t token) const {
    const int64_t at = batch * x.batch + token * x.token + span.head * x.head;
    return (float)read(x.data + at * size_of(x.type), x.type);
  }
  // The factor of the token's value
  float write(int64_t token) const { return c.write.data ? read_factor(c.write, token) : 1; }
  // The factor of what the token's key reads and erases
  float erase(int64_t token) const { return unmasked(token) ? read_factor(c.erase, token) : 0; }
  // The first token of the token's block. The states before a sequence's blocks, but for the first one, are saved
  int64_t block_begin(int64_t token) const { return token - (token - span.start) % kBlock; }
  // Where the state before the block that starts at `token` is saved. Blocks of packed sequences start at least kBlock
  // tokens apart, so that no two have the same place
  int64_t saved_index(int64_t token) const {
    return (batch * ((c.m - 1) / kBlock) + token / kBlock - 1) * c.g + span.head;
  }
  float* saved_kv(int64_t token) const { return c.saved_kv.as<float>() + saved_index(token) * s.f * s.e; }
  double* saved_z(int64_t token) const {
    return c.saved_z.data ? c.saved_z.as<double>() + saved_index(token) * s.f : nullptr;
  }
  // What the token wrote, with erase (e)
  float* saved_u(int64_t token) const { return c.saved_u.as<float>() + key_index(token) * s.e; }
  // 1 / max(den, eps) or 1 / (den + eps), of `count` tokens
  void inverse_dens(const float* dens, int count, float* to) const {
    for (int i = 0; i < count; i += W) store(to + i, 1 / (c.add_eps ? load(dens + i) + eps : largest(load(dens + i), eps)));
  }
};

// Multiplies `count` rows of K numbers by a factor each; null: by 1
inline void scale_rows(float* rows, int count, int K, const float* factors) {
  for (int i = 0; factors && i < count; i++)
    for (int f = 0; f < K; f += W) store(rows + i * K + f, load(rows + i * K + f) * factors[i]);
}

// Sums over tokens of rows (F), decayed to each token. Sums within a chunk are float32, the sum over chunks is float64.
struct RunningSum {
  int F;
  double* total;  // of the chunks before, at the chunk's start
  float* chunk;   // of the current chunk, at its end: scratch

  // z_i = e^(D_i) total + sum_(j <= i) e^(D_i - D_j) x_j. before, if not null: the same without x_i
  void rows(const float* x, int count, const Decay& decay, float* z, float* before) {
    if (!decay.base) {
      return columns([&]<int N>(int f) {
        vf w[N], sum[N] = {};
        for (int v = 0; v < N; v++) w[v] = total_at(f + v * W);
        for (int i = 0; i < count; i++)
          for (int v = 0; v < N; v++) {
            const int at = i * F + f + v * W;
            if (before) store(before + at, w[v] + sum[v]);
            sum[v] += load(x + at);
            store(z + at, w[v] + sum[v]);
          }
        for (int v = 0; v < N; v++) store(chunk + f + v * W, sum[v]);
      });
    }
    const DecayScratch& d = *decay.scratch;
    columns([&]<int N>(int f) {
      vf w[N] = {}, earlier[N];  // w: the sum over the chunk's tokens, times e^(D_0 - D_i) while that is ordinary
      for (int v = 0; v < N; v++) earlier[v] = total_at(f + v * W);
      const auto row = [&](int i, float weight, float keep, float factor) {
        for (int v = 0; v < N; v++) {
          const int at = i * F + f + v * W;
          const vf passed = earlier[v] * d.from_start[i];
          w[v] *= keep;
          if (before) store(before + at, passed + w[v] * factor);
          w[v] += load(x + at) * weight;
          store(z + at, passed + w[v] * factor);
        }
      };
      const int ordinary = decay.ordinary < count ? decay.ordinary : count;
      for (int i = 0; i < ordinary; i++) row(i, d.to_first[i], 1, d.from_first[i]);
      for (int v = 0; v < N; v++) w[v] *= d.from_first[ordinary - 1];
      for (int i = ordinary; i < count; i++) row(i, 1, d.of_token[i], 1);
      for (int v = 0; v < N; v++) store(chunk + f + v * W, w[v]);
    });
  }
  // The sums over later tokens, from the last row to the first, which replace x_i:
  // e^(D_end - D_i) total + sum_(j >= i) e^(D_j - D_i) x_j
  void rows_backward(float* x, int count, const Decay& decay) {
    const DecayScratch& d = *decay.scratch;
    columns([&]<int N>(int f) {
      vf w[N] = {}, later[N];
      for (int v = 0; v < N; v++) later[v] = total_at(f + v * W);
      const auto row = [&](int i, float weight, float factor, float to_end) {
        for (int v = 0; v < N; v++) {
          float* at = x + i * F + f + v * W;
          w[v] += load(at) * weight;
          store(at, later[v] * to_end + w[v] * factor);
        }
      };
      const int ordinary = !decay.base ? 0 : decay.ordinary < count ? decay.ordinary : count;
      for (int i = count - 1; i >= ordinary; i--) {
        row(i, 1, 1, decay.base ? d.to_end[i] : 1);
        for (int v = 0; decay.base && v < N; v++) w[v] *= d.of_token[i];
      }
      for (int v = 0; ordinary && v < N; v++) w[v] *= d.from_first[ordinary - 1];
      for (int i = ordinary - 1; i >= 0; i--) row(i, d.from_first[i], d.to_first[i], d.to_end[i]);
      for (int v = 0; v < N; v++) store(chunk + f + v * W, ordinary ? w[v] * d.of_token[0] : w[v]);
    });
  }
  // factors: of each feature; null: all have `factor`
  void end_chunk(double factor, const double* factors) {
    for (int i = 0; i < F; i++) total[i] = total[i] * (factors ? factors[i] : factor) + chunk[i];
  }
  template <class Function> void columns(Function f) const {
    if (F < NW) return f.template operator()<NV / 2>(0);
    for (int c = 0; c < F; c += NW) f.template operator()<NV>(c);
  }
  vf total_at(int f) const {
    vf x;
    for (int i = 0; i < W; i++) x[i] = (float)total[f + i];
    return x;
  }
};

// Zeros the rows after the last that `transpose` reads
inline void zero_rest(float* rows, int count, int K) { zero(rows + count * K, K * (round_up(count, W) - count)); }

// The pieces of scratch memory that sweeps take
struct Pieces {
  Arena& arena;
  const Shape& s;
  Pieces(Arena& arena, const Shape& s) : arena(arena), s(s) {}
  float* features(int rows = kChunk) const { return arena.take<float>(rows * s.F); }
  float* values(int rows = kChunk) const { return arena.take<float>(rows * s.E); }
  float* per_token() const { return arena.take<float>(kChunk); }
  float* score_matrix() const { return arena.take<float>(kChunk * kChunk); }
  float* state() const { return arena.take<float>(s.F * s.E); }
  double* feature_sums() const { return arena.take<double>(s.F); }
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
  const FlushToZero flush;
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
