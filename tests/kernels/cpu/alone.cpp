// Runs the kernels of one instruction set without PyTorch, on numbers that are the same on every machine; prints results.
#include <cmath>
#include <cstdio>
#include <vector>

#include "call.h"

using namespace linrope;

static std::vector<float> numbers(size_t count, uint64_t seed) {
  std::vector<float> values(count);
  for (float& x : values) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    x = (float)((int64_t)(seed >> 40) - (1 << 23)) / (1 << 22);  // -2 .. 2
  }
  return values;
}

static void print(const char* name, const std::vector<float>& x) {
  for (size_t i = 0; i < x.size(); i += 7) printf("%s %zu %.9g\n", name, i, x[i]);
}

static View view(std::vector<float>& x, int64_t tokens, int64_t heads, int64_t width) {
  return {(char*)x.data(), tokens * heads * width, heads * width, width, 1, kFloat32};
}

// Two heads of keys, four of queries, one sequence
static void run(int f, int e, int pairs, int layout, int map, bool decay) {
  const int64_t n = 75, g = 2, h = 4;
  auto q = numbers(n * h * f, 1), k = numbers(n * g * f, 2), v = numbers(n * g * e, 3), dout = numbers(n * h * e, 4);
  auto gates = numbers(n * g, 5);
  for (float& x : gates) x = -x * x;
  std::vector<float> out(n * h * e), dq(q.size()), dk(k.size()), dv(v.size()), da(n * g);
  std::vector<int64_t> theta(pairs), position{1000};
  for (int p = 0; p < pairs; p++) theta[p] = (int64_t)(std::pow(2.0, 61 - p) / 3);
  Call c{};
  c.q = view(q, n, h, f), c.k = view(k, n, g, f), c.v = view(v, n, g, e), c.dout = view(dout, n, h, e);
  c.out = view(out, n, h, e), c.dq = view(dq, n, h, f), c.dk = view(dk, n, g, f), c.dv = view(dv, n, g, e);
  c.type = kFloat32, c.b = c.sequences = c.rows = 1, c.n = c.m = n, c.h = h, c.g = g, c.f = f, c.e = e;
  c.value_group = c.heads_per_gradient = 1;
  c.pairs = pairs, c.layout = layout, c.map = map, c.causal = c.normalize = true, c.eps = 1e-6, c.axes = 1;
  c.theta = {(char*)theta.data(), 0, 0, 0, 1, kInt64};
  c.positions = c.key_positions = {(char*)position.data(), 0, 0, 0, 0, kInt64};
  if (decay) c.log_decay = {(char*)gates.data(), 0, g, 1, 0, kFloat32}, c.d_log_decay = da.data();
  const Isa& isa = isa_baseline;
  std::vector<float> table(kChunk * 2 * isa.padded_pairs(c));
  isa.fill_rotation_table(c, table.data());
  c.rotation_table = table.data();
  std::vector<float> kv(g * f * e), dkv(g * f * e);
  std::vector<double> z(g * f), dz(g * f), sums(g * pairs);
  Span spans[2];
  Ends forth[2], back[2];
  for (int i = 0; i < g; i++) {
    spans[i] = {0, i, 0, n, 0};
    forth[i] = {.kv_out = &kv[i * f * e], .z_out = &z[i * f]};
    back[i] = {.dkv_out = &dkv[i * f * e], .dz_out = &dz[i * f], .sums = &sums[i * pairs]};
  }
  isa.forward(c, g, spans, forth, true);
  print("out", out), print("kv", kv);
  isa.backward(c, g, spans, back, true);
  print("dq", dq), print("dk", dk), print("dv", dv);
  if (decay) print("da", da);
  c.n = c.m = 1, c.rotation_table = nullptr;
  isa.step(c, 0, 0, g, kv.data(), z.data());
  print("step", {out.begin(), out.begin() + h * e});
}

int main() {
  run(64, 64, 32, kHalf, 1, false);
  run(20, 13, 7, kInterleaved, 3, true);
}
