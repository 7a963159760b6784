// y = x W^T + bias for a few rows of x, as in a decoding step. It reads W once, in the order of memory, which takes most
// of the time. Libraries for matrix products are made for many rows, and may take several times as long for a few.
#pragma once
#include "partial.h"

namespace linrope {
namespace {

// The products of M rows of x and N rows of W. The bits of each do not depend on M and N.
template <int M, int N> void linear_tile(const Linear& c, float* y, int64_t row, int64_t column) {
  const float *x = c.x + row * c.stride, *weight = c.weight + column * c.k;
  vf sums[M][N] = {};
  vectors((int)c.k, [&]<bool PART>(int i, int count) {
    vf w[N];
    for (int n = 0; n < N; n++) {
      w[n] = load_lanes<PART>(weight + n * c.k + i, count);
      __builtin_prefetch(weight + (n + 2 * N) * c.k + i);  // of the tile after the next
    }
    for (int m = 0; m < M; m++) {
      const vf a = load_lanes<PART>(x + m * c.stride + i, count);
      for (int n = 0; n < N; n++) sums[m][n] += a * w[n];
    }
  });
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      y[(row + m) * c.y_stride + column + n] = sum(sums[m][n]) + (c.bias ? c.bias[column + n] : 0);
}
// The columns [column, end) of M rows
template <int M, int N> void linear_rows(const Linear& c, float* y, int64_t row, int64_t column, int64_t end) {
  for (; column + N <= end; column += N) linear_tile<M, N>(c, y, row, column);
  for (; column < end; column++) linear_tile<M, 1>(c, y, row, column);
}

void linear(const Linear& c, float* y, int64_t begin, int64_t end) {
  constexpr int64_t kColumnsAtOnce = 24;  // columns whose weights stay in the first-level cache while all rows pass
  for (int64_t column = begin; column < end; column += kColumnsAtOnce) {
    const int64_t last = column + kColumnsAtOnce < end ? column + kColumnsAtOnce : end;
    int64_t row = 0;
    for (; row + 4 <= c.rows; row += 4) linear_rows<4, 3>(c, y, row, column, last);
    for (; row + 2 <= c.rows; row += 2) linear_rows<2, 4>(c, y, row, column, last);
    for (; row < c.rows; row++) linear_rows<1, 4>(c, y, row, column, last);
  }
}

}  // namespace
}  // namespace linrope
