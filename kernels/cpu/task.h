// What the sweeps over a sequence share: where its rows lie, its keys, its running normalizer.
#pragma once
#include "chunk.h"

namespace linrope {
namespace {

struct Task {
  const Call& c;
  const Span& span;
  Shape s;
  Arena arena;
  int64_t batch;
  int group;  // r: query heads per key/value head
  Rows k, v;

  Task(const Call& c, const Span& span, size_t floats)
      : c(c), span(span), s(c), arena(4 * floats + 2 * Angles::bytes(s) + 24 * s.F + 64 * 32), batch(batch_row(c, span)),
        group(c.q.data ? (int)(c.h / c.g) : 0), k(c.k, c.type, batch, span.head), v(c.v, c.type, batch, span.head) {}

  int64_t query_head(int r) const { return span.head * group + r; }
  Rows query_rows(const View& x, int r) const { return Rows(x, c.type, batch, query_head(r)); }
  Rows key_rows(const View& x) const { return Rows(x, c.type, batch, span.head); }
  int64_t query_index(int64_t token, int r) const { return (batch * c.n + token) * c.h + query_head(r); }
  int64_t key_index(int64_t token) const { return (batch * c.m + token) * c.g + span.head; }
  bool seen(int64_t token) const {
    return !c.key_mask || c.key_mask[batch * c.mask_batch + token * c.mask_token];
  }
  float* floats(size_t n) { return arena.take<float>(n); }

  void key_features(int64_t token, int way, int count, float* psi) {
    features(s, k, token, way, count, psi);
    if (c.key_mask)
      for (int i = 0; i < count; i++)
        if (!seen(token + way * i)) zero(psi + i * s.F, s.F);
  }
  void key_values(int64_t token, float* to, int block, float scale = 1) {
    if (seen(token)) values(s, v, token, to, block, scale);
    else zero_row(to, block, s.E);
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
  float *before, *within;
  RunningSum(int F, Arena& arena)
      : F(F), all(arena.take<double>(F)), before(arena.take<float>(F)), within(arena.take<float>(F)) {}
  void begin() {
    for (int i = 0; i < F; i++) before[i] = (float)all[i];
  }
  // rows of x (count, F) -> rows of y
  void rows(const float* x, int count, const float* grown, const float* kept, float* y) {
    for (int f = 0; f < F; f += NW) {
      vf w[NV] = {}, first[NV];
      for (int v = 0; v < NV; v++) first[v] = load(before + f + v * W);
      for (int i = 0; i < count; i++)
        for (int v = 0; v < NV; v++) {
          const int at = i * F + f + v * W;
          w[v] += load(x + at) * grown[i];
          store(y + at, (first[v] + w[v]) * kept[i]);
        }
      for (int v = 0; v < NV; v++) store(within + f + v * W, w[v]);
    }
  }
  void end(const Fade& fade) {
    for (int i = 0; i < F; i++) all[i] = (all[i] + within[i]) * fade.exact;
  }
};

inline void zero_up_to_four(float* rows, int count, int K) {  // transpose reads whole blocks
  if (count % 4) zero(rows + count * K, K * (4 - count % 4));
}

}  // namespace
}  // namespace linrope
