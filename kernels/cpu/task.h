// What the sweeps over a sequence share: where its rows lie, its keys, its running normalizer, and how the heads of a
// bundle take turns.
#pragma once
#include <new>

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

  Task(const Call& c, const Span& span, const Ends& ends)
      : c(c), span(span), ends(ends), s(c), batch(batch_row(c, span)), group(c.q.data ? (int)(c.h / c.g) : 0),
        k(c.k, c.type, batch, span.head), v(c.v, c.type, batch, span.head) {}

  int64_t query_head(int r) const { return span.head * group + r; }
  Rows query_rows(const View& x, int r) const { return Rows(x, c.type, batch, query_head(r)); }
  Rows key_rows(const View& x) const { return Rows(x, c.type, batch, span.head); }
  int64_t query_index(int64_t token, int r) const { return (batch * c.n + token) * c.h + query_head(r); }
  int64_t key_index(int64_t token) const { return (batch * c.m + token) * c.g + span.head; }
  float* angle_steps_at(int64_t token) const {
    return c.d_angle_steps ? c.d_angle_steps + key_index(token) * c.pairs : nullptr;
  }
  bool seen(int64_t token) const {
    return !c.key_mask || c.key_mask[batch * c.mask_batch + token * c.mask_token];
  }
  // Rows of keys and values from that token on; what masked tokens hold is never used
  void key_features(int64_t token, int way, int count, float* psi) const {
    features(s, k, token, way, count, psi);
    if (c.key_mask)
      for (int i = 0; i < count; i++)
        if (!seen(token + way * i)) zero(psi + i * s.F, s.F);
  }
  void key_values(int64_t token, float* to, int block, float scale = 1) const {
    if (seen(token)) values(s, v, token, to, block, scale);
    else zero_row(to, block, s.E);
  }
  // The token's block of the span
  int64_t block_begin(int64_t token) const { return token - (token - span.begin) % kBlock; }
  int64_t block_end(int64_t token) const {
    const int64_t next = block_begin(token) + kBlock;
    return next < span.end ? next : span.end;
  }
  bool is_anchor(int64_t token) const {
    return ends.anchors && token > span.begin && token < span.end && token == block_begin(token);
  }
  static size_t anchor_bytes(const Shape& s) { return 4 * (size_t)s.F * s.E + 8 * (size_t)s.F; }
  char* anchor(int64_t token) const {
    return ends.anchors + ((token - span.begin) / kBlock - 1) * anchor_bytes(s);
  }
  void leave_anchor(int64_t token, const float* S, const double* z) const {
    char* to = anchor(token);
    memcpy(to, z, 8 * s.F), memcpy(to + 8 * s.F, S, 4 * s.F * s.E);
  }
  // <S, dS> + <z, dz> of the state there
  double product_at_anchor(int64_t token, const float* dS, const double* dz) const {
    const char* from = anchor(token);
    double x = product((const float*)(from + 8 * s.F), dS, s.F * s.E);
    for (int i = 0; i < s.F; i++) x += ((const double*)from)[i] * dz[i];
    return x;
  }
  // 1 / max(den, eps) and the like
  float inverse(float den) const {
    if (!c.normalize) return 1;
    return 1 / (c.add_eps ? den + c.eps : largest(splat(den), c.eps)[0]);
  }
};

// Rows of z, the sum of keys as each token sees it: kept[i] (z0 + sum_j grown[j] x[j]). Sums of a chunk are float32,
// those of chunks float64.
struct RunningSum {
  int F;
  double* all;
  float* within;
  RunningSum(int F, float* scratch, Arena& arena) : F(F), all(arena.take<double>(F)), within(scratch) {}
  // rows of x (count, F) -> rows of y
  void rows(const float* x, int count, const float* grown, const float* kept, float* y) {
    for (int f = 0; f < F; f += NW) {
      vf w[NV] = {}, before[NV];
      for (int v = 0; v < NV; v++)
        for (int i = 0; i < W; i++) before[v][i] = (float)all[f + v * W + i];
      for (int i = 0; i < count; i++)
        for (int v = 0; v < NV; v++) {
          const int at = i * F + f + v * W;
          w[v] += load(x + at) * grown[i];
          store(y + at, (before[v] + w[v]) * kept[i]);
        }
      for (int v = 0; v < NV; v++) store(within + f + v * W, w[v]);
    }
  }
  void end(const Fade& by) {
    for (int i = 0; i < F; i++) all[i] = (all[i] + within[i]) * by.exact;
  }
  void fade(const Fade& by) {
    for (int i = 0; i < F; i++) all[i] *= by.exact;
  }
};

inline void zero_up_to_four(float* rows, int count, int K) {  // transpose reads whole blocks
  if (count % 4) zero(rows + count * K, K * (4 - count % 4));
}

// Heads of one sequence take turns, a chunk each, so that memory is read and written about in order: a token's rows of
// all heads lie side by side. They share the scratch. A Sweep has: Scratch(Shape, Arena); bytes(Shape, count); done, how
// many tokens; advance(), one chunk; finish().
template <class Sweep> void run_bundle(const Call& c, int count, const Span* spans, const Ends* ends, bool emit) {
  const Shape s(c);
  Arena arena(Sweep::bytes(s, count) + count * (sizeof(Sweep) + 64) + 4096);
  typename Sweep::Scratch scratch(s, arena);
  Sweep* sweeps = arena.take<Sweep>(count);
  for (int i = 0; i < count; i++) new (sweeps + i) Sweep(c, spans[i], ends[i], emit, scratch, arena);
  const int64_t tokens = spans[0].end - spans[0].begin;
  for (int64_t goal = kChunk; goal < tokens + kChunk; goal += kChunk)
    for (int i = 0; i < count; i++)
      while (sweeps[i].done < (goal < tokens ? goal : tokens)) sweeps[i].advance();
  for (int i = 0; i < count; i++) sweeps[i].finish();
}

}  // namespace
}  // namespace linrope
