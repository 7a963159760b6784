// The matrix products of all sweeps, on a chunk of at most kChunk tokens:
//
//   scores     tril(A B^T), or its product with factors
//   product    A S + scores V, or with the scores transposed
//   update     S + B^T V
//   solve      (I + scores below the diagonal) U = V - A S
//
// Rows of tokens are row-major, and B^T is stored in panels (kChunk/NW, K, NW). A state S is stored in panels (N/P, K, P),
// where P is NW, or NW / 2 if N is no larger than that: otherwise small heads would be padded to NW, and most of the
// products would be by zeros.
#pragma once
#include "transition.h"

namespace linrope {
namespace {

// Before a loop over the rows of acc that has branches: a compiler that does not unroll it keeps acc in memory, and Clang
// 22 then stores each sum after each product, which takes twice the time. GCC ignores it in a lambda. Blocks get their
// products by value, because a store through `vfu` may change what a reference refers to
#define LINROPE_UNROLL _Pragma("GCC unroll 8")

// acc (M, N vectors) += a (M, K) times the first N vectors of the rows of b (K, columns), or -= . Numbers of a are at
// a[r * stride + k], or if transposed at a[k * stride + r]
template <bool transposed = false, bool negative = false, int M, int N>
LINROPE_INLINE void multiply(vf (&acc)[M][N], int K, const float* a, int64_t stride, const float* b, int64_t columns) {
  for (int k = 0; k < K; k++) {
    vf y[N];
    for (int v = 0; v < N; v++) y[v] = load(b + k * columns + v * W);
    for (int r = 0; r < M; r++) {
      const vf x = splat(transposed ? a[k * stride + r] : a[r * stride + k]);
      for (int v = 0; v < N; v++)
        if constexpr (negative) acc[r][v] -= x * y[v];
        else acc[r][v] += x * y[v];
    }
  }
}

// Rows that the next chunk reads or writes. They are fetched into the second cache a few at a time, between the blocks of
// products: fetched together they would hold up the loads of this chunk. A head's rows are too far apart for the hardware
class Prefetcher {
  static constexpr int kMost = 16, kLines = 24;  // rows of as many tensors; lines of 64 bytes between two blocks
  struct {
    const char* row;
    int64_t step, bytes;
    int count;
  } wanted[kMost];
  unsigned first = 0, end = 0;  // numbers modulo kMost

 public:
  // `count` rows of `bytes` each, `step` bytes apart. Of too many the oldest are forgotten
  void add(const char* row, int64_t step, int64_t bytes, int count) {
    if (count <= 0) return;
    if (end - first == kMost) first++;
    wanted[end++ % kMost] = {row, step, bytes, count};
  }
  void fetch_some() {
    for (int64_t lines = 0; first != end && lines < kLines;) {
      auto& x = wanted[first % kMost];
      for (int64_t i = 0; i < x.bytes; i += 64, lines++) __builtin_prefetch(x.row + i, 0, 2);
      x.row += x.step;
      if (--x.count == 0) first++;
    }
  }
};

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

// A row of features or of values, padded with zeros
struct RowLayout {
  int size, used;  // with padding, and up to the last number that may differ from 0
  int panel;       // columns of a panel; divides `size`
};
inline RowLayout row_layout(int used) {
  const int panel = used <= NW / 2 ? NW / 2 : NW;
  return {round_up(used, panel), used, panel};
}

// Calls f.operator()<N>(e0) for the panels of a row: N vectors from column e0 on
template <class F> inline void panels(const RowLayout& row, F f) {
  if (row.panel < NW) return f.template operator()<NV / 2>(0);
  for (int e0 = 0; e0 < row.size; e0 += NW) f.template operator()<NV>(e0);
}

// to_ij = scale_i L_ij <A_i, B_j> for j <= i, and 0 for later j
struct Scores {
  int rows;
  RowLayout K;
  const float *A, *B_t;
  const float* L = nullptr;      // (kChunk, kChunk); null: 1
  const float* scale = nullptr;  // null: 1
  float* to;                     // (kChunk, kChunk)
};

template <int M, int N> LINROPE_INLINE void multiply_scores(const Scores x, int i0, int j0) {
  vf acc[M][N] = {};
  multiply(acc, x.K.used, x.A + i0 * x.K.size, x.K.size, x.B_t + j0 * x.K.size, NW);
  LINROPE_UNROLL
  for (int r = 0; r < M; r++)
    for (int v = 0; v < N; v++) {
      const int at = (i0 + r) * kChunk + j0 + v * W;
      vf y = acc[r][v];
      if (x.scale) y *= x.scale[i0 + r];
      if (x.L) y *= load(x.L + at);
      store(x.to + at, iota() + (j0 + v * W) <= i0 + r ? y : vf{});
    }
}
void multiply_scores(const Scores& x, Prefetcher& ahead) {
  row_blocks(x.rows, MR, [&]<int M>(int i0) {
    ahead.fetch_some();
    for (int j0 = 0; j0 < i0 + M; j0 += NW) {  // keys up to the block's last query
      if (i0 + M - j0 > NW / 2) multiply_scores<M, NV>(x, i0, j0);
      else multiply_scores<M, NV / 2>(x, i0, j0);
    }
  });
}

// to = scale o (A S) + scores V, or scores^T V if transposed; the scores of later tokens are 0
struct Product {
  int rows;
  RowLayout K, N;
  const float *A = nullptr, *S = nullptr;  // null S: the state is zero
  const float* scale = nullptr;            // of the rows of A S; null: 1
  const float* scores = nullptr;           // null: there are none
  bool transposed = false;
  const float* V = nullptr;                // (rows, N)
  bool finite = true;                      // true if all of V is finite; else rows go one by one: 0 times infinity is NaN
  const float* last_scale = nullptr;       // of the rows of the result; null: 1
  bool accumulate = false;                 // add the result to `to`
  float* to;
  int64_t stride;                          // of `to`
  const float* with = nullptr;             // (rows, N): sums_i (kChunk, W) += lanes of with_i times scale o (A S)
  float* sums = nullptr;
};

// One block of rows and one panel
template <int M, int N> LINROPE_INLINE void multiply_block(const Product x, int i0, int e0) {
  constexpr int P = N * W;
  vf acc[M][N] = {};
  if (x.S) multiply(acc, x.K.used, x.A + i0 * x.K.size, x.K.size, x.S + e0 * x.K.size, P);
  if (x.scale)
    LINROPE_UNROLL
    for (int r = 0; r < M; r++)
      for (int v = 0; v < N; v++) acc[r][v] *= x.scale[i0 + r];
  if (x.sums)
    LINROPE_UNROLL
    for (int r = 0; r < M; r++) {
      const float* with = x.with + (i0 + r) * x.N.size + e0;
      float* sums = x.sums + (i0 + r) * W;
      vf y = load(sums);
      for (int v = 0; v < N; v++) y += acc[r][v] * load(with + v * W);
      store(sums, y);
    }
  if (x.scores && x.transposed)
    multiply<true>(acc, x.rows - i0, x.scores + i0 * kChunk + i0, kChunk, x.V + i0 * x.N.size + e0, x.N.size);
  else if (x.scores) multiply(acc, i0 + M, x.scores + i0 * kChunk, kChunk, x.V + e0, x.N.size);
  LINROPE_UNROLL
  for (int r = 0; r < M; r++)
    for (int v = 0; v < N; v++) {
      float* to = x.to + (i0 + r) * x.stride + e0 + v * W;
      const vf y = x.last_scale ? acc[r][v] * x.last_scale[i0 + r] : acc[r][v];
      store(to, x.accumulate ? load(to) + y : y);
    }
}
void multiply(const Product& x, Prefetcher& ahead) {
  const int limit = x.finite || !x.scores ? MR : 1;
  panels(x.N, [&]<int N>(int e0) {
    row_blocks(x.rows, limit, [&]<int M>(int i0) {
      ahead.fetch_some();
      multiply_block<M, N>(x, i0, e0);
    });
  });
}

// Rows U of (I + L) U = V - scale o (A S), with L the scores below the diagonal; U replaces V. What earlier rows
// contribute is subtracted in their order, so that the bits of a row do not depend on how rows are grouped, and no
// infinity or NaN reaches earlier rows.
struct System {
  int rows;
  RowLayout K, N;
  const float *A, *S;   // null S: the state is zero
  const float* scale;   // of the rows of A S
  const float* scores;  // (kChunk, kChunk)
  float* U;             // (rows, N)
};

template <int M, int N> LINROPE_INLINE void solve_block(const System x, int i0, int e0) {
  vf acc[M][N] = {};
  if (x.S) multiply(acc, x.K.used, x.A + i0 * x.K.size, x.K.size, x.S + e0 * x.K.size, N * W);
  const float* L = x.scores + i0 * kChunk;
  float* U = x.U + i0 * x.N.size + e0;
  LINROPE_UNROLL
  for (int r = 0; r < M; r++)
    for (int v = 0; v < N; v++) acc[r][v] = load(U + r * x.N.size + v * W) - acc[r][v] * x.scale[i0 + r];
  multiply<false, true>(acc, i0, L, kChunk, x.U + e0, x.N.size);
  LINROPE_UNROLL
  for (int r = 0; r < M; r++) {
    LINROPE_UNROLL
    for (int j = 0; j < r; j++) {
      const vf l = splat(L[r * kChunk + i0 + j]);
      for (int v = 0; v < N; v++) acc[r][v] -= l * acc[j][v];
    }
    for (int v = 0; v < N; v++) store(U + r * x.N.size + v * W, acc[r][v]);
  }
}
void solve(const System& x) {
  panels(x.N, [&]<int N>(int e0) { row_blocks(x.rows, MR, [&]<int M>(int i0) { solve_block<M, N>(x, i0, e0); }); });
}

// Solves (I + L)^T Y = X, with L the scores below the diagonal. Y replaces X, the last row first
template <int M, int N>
LINROPE_INLINE void solve_transposed_block(int rows, const RowLayout row, const float* scores, float* X, int i0, int e0) {
  vf acc[M][N];
  float* to = X + i0 * row.size + e0;
  LINROPE_UNROLL
  for (int r = 0; r < M; r++)
    for (int v = 0; v < N; v++) acc[r][v] = load(to + r * row.size + v * W);
  const int after = i0 + M;
  multiply<true, true>(acc, rows - after, scores + after * kChunk + i0, kChunk, X + after * row.size + e0, row.size);
  LINROPE_UNROLL
  for (int r = M - 1; r >= 0; r--) {
    LINROPE_UNROLL
    for (int i = M - 1; i > r; i--) {
      const vf l = splat(scores[(i0 + i) * kChunk + i0 + r]);
      for (int v = 0; v < N; v++) acc[r][v] -= l * acc[i][v];
    }
    for (int v = 0; v < N; v++) store(to + r * row.size + v * W, acc[r][v]);
  }
}
void solve_transposed(int rows, const RowLayout& row, const float* scores, float* X) {
  panels(row, [&]<int N>(int e0) {
    row_blocks(rows, MR, [&]<int M>(int first) {
      solve_transposed_block<M, N>(rows, row, scores, X, rows - first - M, e0);
    });
  });
}

// S = e^D S + B^T V; `fresh`: S was zero. The chunk is summed alone first: adding key by key to a large S would round it
// each time, with the same error for similar keys.
struct Update {
  int rows;
  RowLayout K, N;
  const float *B, *V;  // (rows, K), (rows, N)
  float* S;
  bool fresh;
  DecayFactor factor;
  // A factor of its own for each feature, S whole + S part, instead of `factor`; null: none. Features are the rows of S, or
  // its columns
  const float *whole = nullptr, *part = nullptr;
  bool in_columns = false;
  const float* from = nullptr;  // the state before, if it is not S
  const float* B_t = nullptr;   // (K, NW): B transposed, if it is known. Only amx.h reads it
};

template <int M, int N> LINROPE_INLINE void update_block(const Update x, int f0, int e0) {
  vf acc[M][N] = {};
  multiply<true>(acc, x.rows, x.B + f0, x.K.size, x.V + e0, x.N.size);
  const int at = e0 * x.K.size + f0 * N * W;
  const float* from = (x.from ? x.from : x.S) + at;
  float* to = x.S + at;
  LINROPE_UNROLL
  for (int r = 0; r < M; r++)
    for (int v = 0; v < N; v++, from += W, to += W) {
      const vf added = acc[r][v];
      if (x.whole) {
        const vf whole = x.in_columns ? load(x.whole + e0 + v * W) : splat(x.whole[f0 + r]);
        const vf part = x.in_columns ? load(x.part + e0 + v * W) : splat(x.part[f0 + r]);
        store(to, load(from) * whole + (load(from) * part + added));
      } else {
        store(to, x.fresh ? added : x.factor(load(from), added));
      }
    }
}
void update(const Update& x, Prefetcher& ahead) {
  const int features = x.from ? x.K.size : x.K.used;  // a new state gets its padding, too
  panels(x.N, [&]<int N>(int e0) {
    row_blocks(features, MR, [&]<int M>(int f0) {
      ahead.fetch_some();
      update_block<M, N>(x, f0, e0);
    });
  });
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

// W / 4 pieces of four numbers each, `stride` numbers apart
LINROPE_INLINE vf load_pieces(const float* p, int64_t stride) {
  const auto piece = [&](int i) { return *(const v4*)(p + i * stride); };
#if defined(__AVX2__)
  const auto two = [&](int i) { return __builtin_shufflevector(piece(i), piece(i + 1), 0, 1, 2, 3, 4, 5, 6, 7); };
#endif
#if defined(__AVX512F__)
  return __builtin_shufflevector(two(0), two(2), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  return two(0);
#else
  return piece(0);
#endif
}

// The transpose of `count` rows of K numbers in panels (count/columns, K, columns), which start panel_size apart. Reads
// the rows up to a multiple of W
template <int columns>
void transpose(const float* rows, int stride, int count, int K, float* panels, int panel_size) {
  for (int j = 0; j < count; j += W) {
    float* to = panels + j / columns * panel_size + j % columns;
    for (int f = 0; f < K; f += 4) {
      vf x[4], y[4];
      for (int i = 0; i < 4; i++) x[i] = load_pieces(rows + (j + i) * stride + f, 4 * stride);
      transpose_blocks(x, y);
      for (int i = 0; i < 4; i++) store(to + (f + i) * columns, y[i]);
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
