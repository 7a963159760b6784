// One token: S = e^a S + R psi v^T, out = R phi S / den. The state is in the caller's order, and stays where it is.
#pragma once
#include "task.h"

namespace linrope {
namespace {

void step(const Call& c, int64_t row, int64_t head, float* kv, double* z) {
  const Span span{row, head, 0, 1, true};
  const Task task(c, span, {});
  const Shape& s = task.s;
  const int F = s.F, E = s.E, C = kChunk;
  Arena arena(4 * (2 * F + 2 * E + 4 * (s.f + W) + 4 * C * s.half) + 24 * s.half + 2048);
  float *inside = arena.take<float>(F), *turned = arena.take<float>(F), *psi = arena.take<float>(s.f + W);
  float *hat = arena.take<float>(s.f + W), *phi = arena.take<float>(s.f + W), *query = arena.take<float>(s.f + W);
  float *v = arena.take<float>(E), *result = arena.take<float>(E);
  Angles k_turn(c, s, span, c.key_positions, nullptr, arena.take<float>(2 * C * s.half), arena);
  const bool same = c.key_positions.data == c.positions.data;
  Angles q_turn(c, s, span, c.positions, nullptr, arena.take<float>(2 * C * s.half), arena);
  k_turn.forth(0, 1);
  if (!same) q_turn.forth(0, 1);
  const Angles& turns = same ? k_turn : q_turn;

  task.key_features(0, 1, 1, inside);
  task.key_values(0, v, NW);
  turn<false>(s, inside, k_turn.cos, k_turn.sin, 1, turned);
  write_features(s, inside, psi), write_features(s, turned, hat);
  const Fade fade(Decay(c, span).at(0));
  for (int f = 0; f < s.f; f++) z[f] = z[f] * fade.exact + psi[f];
  const bool whole = s.e % W == 0;
  for (int r = 0; r == 0 || r < task.group; r++) {
    vf acc[kMaxDim / W] = {};
    double den = 0;
    if (task.group) {
      features(s, task.query_rows(c.q, r), 0, 1, 1, inside);
      turn<false>(s, inside, turns.cos, turns.sin, 1, turned);
      write_features(s, inside, phi), write_features(s, turned, query);
      for (int f = 0; f < s.f; f++) den += z[f] * phi[f];
    }
    for (int e0 = 0; e0 < s.e; e0 += 4 * W) {
      const int count = s.e - e0 < 4 * W ? s.e - e0 : 4 * W, vectors = (count + W - 1) / W;
      for (int f = 0; f < s.f; f++) {
        float* at = kv + f * s.e + e0;
        float edge[4 * W] = {};
        if (!whole) memcpy(edge, at, 4 * count);
        float* from = whole ? at : edge;
        const vf key = splat(hat[f]), x = splat(query[f]);
        for (int i = 0; i < vectors; i++) {
          vf y = load(from + i * W);
          if (r == 0) {
            y = fade(y) + key * load(v + e0 + i * W);
            store(from + i * W, y);
          }
          acc[e0 / W + i] += x * y;
        }
        if (!whole && r == 0) memcpy(at, edge, 4 * count);
      }
    }
    if (!task.group) break;
    const double bound = !c.normalize ? 1 : c.add_eps ? den + c.eps : den < c.eps ? c.eps : den;
    for (int i = 0; i < (s.e + W - 1) / W; i++) store(result + i * W, acc[i] * (float)(1 / bound));
    write_values(s, result, task.query_rows(c.out, r), 0);
  }
}

}  // namespace
}  // namespace linrope
