// The matrix products of all sweeps: out = A S + tril(A B^T) V, then S += B^T V, on a chunk of at most kChunk tokens.
//
// A is row-major, (kChunk, K). The others are stored in panels: B^T (kChunk/NW, K, NW), V (N/P, kChunk, P) and
// S (N/P, K, P), where P is NW, or NW / 2 if N is no larger than that: otherwise small heads would be
// padded to NW, and most of the products would be by zeros.
#pragma once
#include "transition.h"

namespace linrope {
namespace {

// acc (M, N vectors) += a (M, K; row stride rs) * the first N vectors of a panel (K, columns)
template <int M, int N>
LINROPE_INLINE void multiply(vf (&acc)[M][N], int K, const float* a, int64_t rs, const float* panel, int columns) {
  for (int k = 0; k < K; k++) {
    vf b[N];
    for (int v = 0; v < N; v++) b[v] = *(const vf*)(panel + k * columns + v * W);
    for (int r = 0; r < M; r++) {
      const vf x = splat(a[r * rs + k]);
      for (int v = 0; v < N; v++) acc[r][v] += x * b[v];
    }
  }
}

// Calls f.operator()<M>(first) for blocks of M <= limit rows that cover rows 0 .. n - 1 as evenly as possible
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

namespace tiles {
struct Factors;
}

// A row of features or of values, padded with zeros
struct RowLayout {
  int size, used;  // with padding, and up to the last number that may differ from 0
  int panel;       // columns of a panel; divides `size`
};
inline RowLayout row_layout(int used) {
  const int panel = used <= NW / 2 ? NW / 2 : NW;
  return {round_up(used, panel), used, panel};
}

struct Operands {
  int rows;
  RowLayout K, N;
  const float *B_t, *V;    // null B_t: there are no scores, only A S
  tiles::Factors* factors;  // B and V as amx.h multiplies them; null: core.h multiplies
  bool precise;             // true: amx.h multiplies the scores with all 24 bits of V
};

struct ChunkProduct {
  Operands operands;
  const float *A, *S;         // null S: the state is zero
  const float* scale;         // a factor for each row of the result
  bool finite = true;         // true if all of V is finite; else rows go one by one: 0 times infinity is NaN
  bool accumulate = false;    // add the result to out
  float* scores = nullptr;    // (kChunk, kChunk) scratch, if there are scores
  float* out;
  int64_t stride;
  float* diagonal = nullptr;  // not null: tril's diagonal goes here, and out lacks its products
};

// Moves the diagonal of the scores to x.diagonal, if it is wanted. Inside the loops that compute the scores, this would
// make GCC's code run 4% slower, even in calls that do not want the diagonal.
inline void move_diagonal(const ChunkProduct& x, float* scores) {
  for (int i = 0; x.diagonal && i < x.operands.rows; i++) {
    float& score = scores[i * kChunk + i];
    x.diagonal[i] = score;
    score = 0;
  }
}

void multiply_scores(const ChunkProduct& x, int limit) {
  const RowLayout K = x.operands.K;
  row_blocks(x.operands.rows, limit, [&]<int M>(int i0) {
    const auto tile = [&]<int N>(int j0, vf(&&acc)[M][N]) {
      multiply(acc, K.used, x.A + i0 * K.size, K.size, x.operands.B_t + j0 * K.size, NW);
      for (int r = 0; r < M; r++)
        for (int v = 0; v < N; v++) {
          const vi j = iota() + (j0 + v * W);
          *(vf*)(x.scores + (i0 + r) * kChunk + j0 + v * W) = j <= i0 + r ? acc[r][v] : vf{};
        }
    };
    for (int j0 = 0; j0 < i0 + M; j0 += NW) {  // keys up to the block's last query
      if (i0 + M - j0 > NW / 2) tile(j0, (vf[M][NV]){});
      else tile(j0, (vf[M][NV / 2]){});
    }
  });
}

// The columns of one panel, of N vectors
template <int N> void multiply_panel(const ChunkProduct& x, int limit, int e0) {
  constexpr int P = N * W;
  const RowLayout K = x.operands.K;
  row_blocks(x.operands.rows, limit, [&]<int M>(int i0) {
    vf acc[M][N] = {};
    if (x.S) multiply(acc, K.used, x.A + i0 * K.size, K.size, x.S + e0 * K.size, P);
    const int keys = x.diagonal && !x.finite ? i0 : i0 + M;
    if (x.operands.B_t) multiply(acc, keys, x.scores + i0 * kChunk, kChunk, x.operands.V + e0 * kChunk, P);
    for (int r = 0; r < M; r++)
      for (int v = 0; v < N; v++) {
        float* out = x.out + (i0 + r) * x.stride + e0 + v * W;
        const vf y = acc[r][v] * x.scale[i0 + r];
        store(out, x.accumulate ? load(out) + y : y);
      }
  });
}

void multiply_chunk(const ChunkProduct& x) {
  const int limit = x.finite ? MR : 1;
  if (x.operands.B_t) {
    multiply_scores(x, limit);
    move_diagonal(x, x.scores);
  }
  if (x.operands.N.panel < NW) return multiply_panel<NV / 2>(x, limit, 0);
  for (int e0 = 0; e0 < x.operands.N.size; e0 += NW) multiply_panel<NV>(x, limit, e0);
}

// The unit lower triangular system (I + L) U = V - A S, with L the scores A B^T below the diagonal; U replaces V. Rows
// are solved in blocks, and what earlier blocks contribute is a product. A row reads U of earlier rows only, so that
// no infinity or NaN reaches the rows before it.
template <int N> void solve_panel(const ChunkProduct& x, float* U, int e0) {
  constexpr int P = N * W;
  const RowLayout K = x.operands.K;
  row_blocks(x.operands.rows, MR, [&]<int M>(int i0) {
    vf acc[M][N] = {};
    if (x.S) multiply(acc, K.used, x.A + i0 * K.size, K.size, x.S + e0 * K.size, P);
    const float* L = x.scores + i0 * kChunk;
    multiply(acc, i0, L, kChunk, U + e0 * kChunk, P);
    float* rows = U + e0 * kChunk + i0 * P;
    for (int r = 0; r < M; r++)
      for (int v = 0; v < N; v++) acc[r][v] = *(vf*)(rows + r * P + v * W) - acc[r][v];
    for (int r = 0; r < M; r++) {
      for (int j = 0; j < r; j++) {
        const vf l = splat(L[r * kChunk + i0 + j]);
        for (int v = 0; v < N; v++) acc[r][v] -= l * acc[j][v];
      }
      for (int v = 0; v < N; v++) *(vf*)(rows + r * P + v * W) = acc[r][v];
    }
  });
}
// Uses x's operands but V, A, S and scores. Always float32's products: rounded ones would be multiplied by later rows
void solve_chunk(const ChunkProduct& x, float* U) {
  multiply_scores(x, MR);
  if (x.operands.N.panel < NW) return solve_panel<NV / 2>(x, U, 0);
  for (int e0 = 0; e0 < x.operands.N.size; e0 += NW) solve_panel<NV>(x, U, e0);
}

// S = e^D (S + B^T V); `fresh`: S was zero. The chunk is summed alone first: adding key by key to a large S would round
// it each time, with the same error for similar keys.
template <int N> void update_panel(const Operands& x, float* S, bool fresh, const DecayFactor& factor, int e0) {
  constexpr int P = N * W;
  const int K = x.K.size;
  row_blocks(x.K.used, MR, [&]<int M>(int f0) {
    vf acc[M][N] = {};
    float* s = S + e0 * K + f0 * P;
    for (int j0 = 0; j0 < x.rows; j0 += NW)
      multiply(acc, x.rows - j0 < NW ? x.rows - j0 : NW, x.B_t + j0 * K + f0 * NW, NW, x.V + e0 * kChunk + j0 * P, P);
    for (int r = 0; r < M; r++)
      for (int v = 0; v < N; v++) {
        vf* old = (vf*)(s + r * P + v * W);
        *old = fresh ? factor(acc[r][v]) : factor(*old, acc[r][v]);
      }
  });
}
void update(const Operands& x, float* S, bool fresh, const DecayFactor& factor) {
  if (x.N.panel < NW) return update_panel<NV / 2>(x, S, fresh, factor, 0);
  for (int e0 = 0; e0 < x.N.size; e0 += NW) update_panel<NV>(x, S, fresh, factor, e0);
}

// Transposes the 4 x 4 blocks, of 128 bits per row, in four rows: y[i] gets column i of each block
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
  y[0] = __builtin_shufflevector(a, b, LINROPE_LOW2);
  y[1] = __builtin_shufflevector(a, b, LINROPE_HIGH2);
  y[2] = __builtin_shufflevector(c, d, LINROPE_LOW2);
  y[3] = __builtin_shufflevector(c, d, LINROPE_HIGH2);
}

// The transpose of `count` rows of K numbers in panels (count/columns, K, columns), which start panel_size apart. Reads
// up to three rows beyond the last.
template <int columns>
void transpose(const float* rows, int stride, int count, int K, float* panels, int panel_size) {
  for (int j = 0; j < count; j += 4) {
    float* to = panels + j / columns * panel_size + j % columns;
    for (int f = 0; f < K; f += W) {
      vf x[4], y[4];
      for (int i = 0; i < 4; i++) x[i] = load(rows + (j + i) * stride + f);
      transpose_blocks(x, y);
      const auto store_block = [&]<int block>() {
        if constexpr (block < W / 4)
          for (int i = 0; i < 4; i++) *(v4*)(to + (f + 4 * block + i) * columns) = quarter<block>(y[i]);
      };
      store_block.template operator()<0>();
      store_block.template operator()<1>();
      store_block.template operator()<2>();
      store_block.template operator()<3>();
    }
  }
}

void transpose(const float* rows, int count, int K, float* panels) {
  transpose<NW>(rows, K, count, K, panels, NW * K);
}

// The transpose of S (rows of F, columns of E), both in panels
void transpose_state(const float* S, const RowLayout& F, const RowLayout& E, float* S_t) {
  for (int e0 = 0; e0 < E.size; e0 += E.panel)
    (F.panel == NW ? transpose<NW> : transpose<NW / 2>)(S + e0 * F.size, E.panel, F.size, E.panel, S_t + e0 * F.panel,
                                                        F.panel * E.size);
}

}  // namespace
}  // namespace linrope
