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

// 4 x 4 blocks of four rows, each within 128 bits: y[i] gets column i of the blocks
LINROPE_INLINE void transpose_blocks(const vf (&x)[4], vf (&y)[4]) {
#if defined(__AVX512F__)
#define LINROPE_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define LINROPE_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LINROPE_LOW2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define LINROPE_HIGH2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif defined(__AVX2__)
#define LINROPE_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define LINROPE_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define LINROPE_LOW2 0, 1, 8, 9, 4, 5, 12, 13
#define LINROPE_HIGH2 2, 3, 10, 11, 6, 7, 14, 15
#else
#define LINROPE_LOW 0, 4, 1, 5
#define LINROPE_HIGH 2, 6, 3, 7
#define LINROPE_LOW2 0, 1, 4, 5
#define LINROPE_HIGH2 2, 3, 6, 7
#endif
  const vf a = __builtin_shufflevector(x[0], x[1], LINROPE_LOW), b = __builtin_shufflevector(x[2], x[3], LINROPE_LOW);
  const vf c = __builtin_shufflevector(x[0], x[1], LINROPE_HIGH), d = __builtin_shufflevector(x[2], x[3], LINROPE_HIGH);
  y[0] = __builtin_shufflevector(a, b, LINROPE_LOW2), y[1] = __builtin_shufflevector(a, b, LINROPE_HIGH2);
  y[2] = __builtin_shufflevector(c, d, LINROPE_LOW2), y[3] = __builtin_shufflevector(c, d, LINROPE_HIGH2);
}

// count rows of K numbers -> panels of the transpose, (count/NW, K, NW), that lie panel_size apart; up to three rows past
// the last are read
void transpose(const float* rows, int stride, int count, int K, float* panels, int panel_size) {
  for (int j = 0; j < count; j += 4) {
    float* to = panels + j / NW * panel_size + j % NW;
    for (int f = 0; f < K; f += W) {
      vf x[4], y[4];
      for (int i = 0; i < 4; i++) x[i] = load(rows + (j + i) * stride + f);
      transpose_blocks(x, y);
      for (int block = 0; block < W / 4; block++)
        for (int i = 0; i < 4; i++) {
          v4 part;
          for (int t = 0; t < 4; t++) part[t] = y[i][4 * block + t];
          *(v4*)(to + (f + 4 * block + i) * NW) = part;
        }
    }
  }
}

void transpose(const float* rows, int count, int K, float* panels) { transpose(rows, K, count, K, panels, NW * K); }

// The panels of S (F rows, E columns) -> those of its transpose
void transpose_state(const float* S, int F, int E, float* S_t) {
  for (int e0 = 0; e0 < E; e0 += NW) transpose(S + e0 * F, NW, F, NW, S_t + e0 * NW, NW * E);
}

}  // namespace
}  // namespace linrope
