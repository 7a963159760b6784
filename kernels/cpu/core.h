// The one product core: out = A S + tril(A B^T) V, then S += B^T V, on a chunk of at most kChunk tokens.
//
// Rows of A lie in order, (kChunk, K). The others lie in panels of NW columns: B^T (kChunk/NW, K, NW),
// V (N/NW, kChunk, NW), S (N/NW, K, NW). K and N are multiples of NW.
#pragma once
#include "vector.h"

namespace linrope {
namespace {

// acc (M, NW) += a (M, K; row stride rs) * panel (K, NW)
template <int M> inline void multiply(vf (&acc)[M][NV], int K, const float* a, int64_t rs, const float* panel) {
  for (int k = 0; k < K; k++) {
    vf b[NV];
    for (int v = 0; v < NV; v++) b[v] = *(const vf*)(panel + k * NW + v * W);
    for (int r = 0; r < M; r++) {
      const vf x = splat(a[r * rs + k]);
      for (int v = 0; v < NV; v++) acc[r][v] += x * b[v];
    }
  }
}

// f.operator()<M>(first) on rows 0 .. n - 1 in blocks of at most `limit`, as even as they can be
template <class F> inline void row_blocks(int n, int limit, F f) {
  const int blocks = (n + limit - 1) / limit, small = n / (blocks ? blocks : 1), large = n - small * blocks;
  for (int i = 0, first = 0; i < blocks; i++) {
    const int m = small + (i < large);
    switch (m) {
      case 1: f.template operator()<1>(first); break;
      case 2: f.template operator()<2>(first); break;
      case 3: f.template operator()<3>(first); break;
      case 4: f.template operator()<4>(first); break;
      case 5: f.template operator()<5>(first); break;
      case 6: f.template operator()<6>(first); break;
      case 7: if constexpr (MR >= 7) f.template operator()<7>(first); break;
      case 8: if constexpr (MR >= 8) f.template operator()<8>(first); break;
    }
    first += m;
  }
}

inline vi iota() {
  vi x;
  for (int i = 0; i < W; i++) x[i] = i;
  return x;
}

struct Emit {
  int rows, K, N;
  const float *A, *B_t, *V;  // B_t null: no scores, the state alone
  const float* S;            // null: the state is zero
  const float* scale;        // of each row of the result
  bool finite;               // whether all of V is: a masked score, 0, must not meet infinity or NaN
  bool accumulate;           // add to out
  float* scores;             // (kChunk, kChunk) scratch
  float* out;
  int64_t stride;
};

void emit(const Emit& x) {
  constexpr int C = kChunk;
  const int limit = x.finite ? MR : 1;
  if (x.B_t)
    row_blocks(x.rows, limit, [&]<int M>(int i0) {
      for (int j0 = 0; j0 < i0 + M; j0 += NW) {
        vf acc[M][NV] = {};
        multiply<M>(acc, x.K, x.A + i0 * x.K, x.K, x.B_t + j0 * x.K);
        for (int r = 0; r < M; r++)
          for (int v = 0; v < NV; v++) {
            const vi j = iota() + (j0 + v * W);
            *(vf*)(x.scores + (i0 + r) * C + j0 + v * W) = j <= i0 + r ? acc[r][v] : vf{};
          }
      }
    });
  for (int e0 = 0; e0 < x.N; e0 += NW)
    row_blocks(x.rows, limit, [&]<int M>(int i0) {
      vf acc[M][NV] = {};
      if (x.S) multiply<M>(acc, x.K, x.A + i0 * x.K, x.K, x.S + e0 * x.K);
      if (x.B_t) multiply<M>(acc, i0 + M, x.scores + i0 * C, C, x.V + e0 * C);
      for (int r = 0; r < M; r++)
        for (int v = 0; v < NV; v++) {
          float* out = x.out + (i0 + r) * x.stride + e0 + v * W;
          const vf y = acc[r][v] * x.scale[i0 + r];
          store(out, x.accumulate ? load(out) + y : y);
        }
    });
}

// S times e^D. Near 1 by expm1: rounding e^D would add the same error in every chunk; else e^D itself, since
// S + S (e^D - 1) cancels.
struct Fade {
  enum { kNothing, kNear, kFar } kind = kNothing;
  float factor = 0;
  double exact = 1;
  Fade() = default;
  explicit Fade(double log_decay) {
    if (log_decay == 0) return;
    exact = std::exp(log_decay);
    kind = log_decay > -0.5 ? kNear : kFar;
    factor = kind == kNear ? (float)std::expm1(log_decay) : (float)exact;
  }
  vf operator()(vf s) const { return kind == kNothing ? s : kind == kNear ? s + s * factor : s * factor; }
};

// S = fade(S + B^T V); `fresh`: S was zero
void update(int rows, int K, int N, const float* B_t, const float* V, float* S, bool fresh, const Fade& fade) {
  for (int e0 = 0; e0 < N; e0 += NW)
    row_blocks(K, MR, [&]<int M>(int f0) {
      vf acc[M][NV] = {};
      float* s = S + e0 * K + f0 * NW;
      if (!fresh)
        for (int r = 0; r < M; r++)
          for (int v = 0; v < NV; v++) acc[r][v] = *(vf*)(s + r * NW + v * W);
      for (int j0 = 0; j0 < rows; j0 += NW)
        multiply<M>(acc, rows - j0 < NW ? rows - j0 : NW, B_t + j0 * K + f0 * NW, NW, V + e0 * kChunk + j0 * NW);
      for (int r = 0; r < M; r++)
        for (int v = 0; v < NV; v++) *(vf*)(s + r * NW + v * W) = fade(acc[r][v]);
    });
}

// rows (rows, K) -> panels of its transpose, (kChunk/NW, K, NW); up to three rows past the last are read
void transpose(const float* rows, int count, int K, float* panels) {
  for (int j = 0; j < count; j += 4) {
    const float* x = rows + j * K;
    float* y = panels + j / NW * NW * K + j % NW;
    for (int f = 0; f < K; f += 4) {
      const v4 a = *(v4*)(x + f), b = *(v4*)(x + K + f), c = *(v4*)(x + 2 * K + f), d = *(v4*)(x + 3 * K + f);
      const v4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const v4 AB = __builtin_shufflevector(a, b, 2, 6, 3, 7), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      *(v4*)(y + (f + 0) * NW) = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
      *(v4*)(y + (f + 1) * NW) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
      *(v4*)(y + (f + 2) * NW) = __builtin_shufflevector(AB, CD, 0, 1, 4, 5);
      *(v4*)(y + (f + 3) * NW) = __builtin_shufflevector(AB, CD, 2, 3, 6, 7);
    }
  }
}

}  // namespace
}  // namespace linrope
