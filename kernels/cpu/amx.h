// The matrix products of core.h for bfloat16 and float16 calls, in AMX's tile registers, which multiply bfloat16
// numbers and add up in float32.
//
// Each float32 number x is split into two bfloat16 numbers: high is x rounded, low is the rest, rounded to nearly 8
// bits. The parts of two numbers are multiplied in full, (high + low) (high + low), so that a product is off by
// about 2^-16 of its size. bfloat16 and float16 numbers are split without an error.
//
// What bounds these products is the first cache and the splitting, not the tiles. So operands are split 32 rows at a time
// where they are used once, in memory that is used again at once.
//
// AMX multiplies pairs of numbers along the dimension that is summed. Here numbers i and i + 16 of every 32 form a pair,
// in both operands: two vectors become one vector of pairs without a shuffle.
#pragma once
#include "core.h"

namespace linrope {
namespace {
namespace tiles {

#if !defined(__AMX_BF16__)
constexpr bool kAvailable = false;
struct Configuration {
  explicit Configuration(bool) {}
};
inline void multiply_scores(const Scores&, Prefetcher&) {}
inline void multiply(const Product&, Prefetcher&, const Scores* = nullptr) {}
inline void update(const Update&, Prefetcher&) {}
#else
constexpr bool kAvailable = true;
constexpr int C = kChunk, kTile = 16;  // a tile has 16 rows of 16 float32 numbers or pairs
constexpr int kMaxRow = kMaxDim + NW;  // features with padding
static_assert(C == 2 * kTile && NW == 2 * kTile && W == kTile);

// A matrix of pairs of bfloat16 numbers
template <int numbers> struct Split {
  alignas(64) uint32_t high[numbers / 2], low[numbers / 2];
  bool exact;  // true if all of low is zero
};

// Gives the current thread eight tile registers of 16 rows of 64 bytes while the object lives, if they are wanted
struct Configuration {
  const bool wanted;
  explicit Configuration(bool wanted) : wanted(wanted) {
    if (!wanted) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
    } shape;
    asm volatile("" ::"r"(&shape) : "memory");  // to GCC, _tile_loadconfig reads eight bytes only
    _tile_loadconfig(&shape);
  }
  ~Configuration() {
    if (wanted) _tile_release();
  }
};

constexpr uint32_t kUpper = 0xffff0000;  // the bits of a bfloat16 number
// low is cut off after 8 bits. This factor adds half of a last bit, on average; adding to the bits could turn NaN into 0.
constexpr float kRounding = 1.0026f;

LINROPE_INLINE vf upper(vf x) { return (vf)((vu)x & kUpper); }
// The upper halves of x and, above them, of y: (y & kUpper) | x >> 16
LINROPE_INLINE vu pairs(vf x, vf y) {
  return (vu)_mm512_ternarylogic_epi32((__m512i)y, (__m512i)(vu{} + kUpper), (__m512i)((vu)x >> 16), 0xea);
}

// Splits the pairs (x, y); returns low
LINROPE_INLINE vu split(vf x, vf y, uint32_t* high, uint32_t* low) {
  const vf high_x = (vf)((vu)x + 0x8000), high_y = (vf)((vu)y + 0x8000);
  const vf low_x = (x - upper(high_x)) * kRounding, low_y = (y - upper(high_y)) * kRounding;
  *(vu*)high = pairs(high_x, high_y);
  *(vu*)low = pairs(low_x, low_y);
  return pairs(low_x, low_y);
}
inline bool all_zero(vu x) { return !_mm512_test_epi32_mask((__m512i)x, (__m512i)x); }

// The mask of the first `count` numbers of a row of 32; count > 0
inline uint32_t first_of_row(int count) { return (2u << (count - 1)) - 1; }

// Rows of 32 numbers each; numbers outside `mask` become 0
template <int n> void split_rows(const float* x, int rows, uint32_t mask, Split<n>& to) {
  vu any = {};
  for (int i = 0; i < rows; i++, x += 32)
    any |= split((vf)_mm512_maskz_loadu_ps(mask, x), (vf)_mm512_maskz_loadu_ps(mask >> 16, x + W), to.high + i * 16,
                 to.low + i * 16);
  to.exact = all_zero(any);
}

// 32 columns of rows that are `stride` apart. Rows i and i + 16 of every 32 form pairs; rows outside [first, last) are 0
template <int n> void split_columns(const float* x, int64_t stride, int rows, int first, int last, Split<n>& to) {
  vu any = {};
  const auto row = [&](int r, int half) { return r >= first && r < last ? load(x + r * stride + half) : vf{}; };
  for (int i = 0; i < rows; i += 32)
    for (int r = i; r < i + 16; r++)
      for (int half = 0; half < 32; half += W) {
        const int at = (i + 2 * (r - i)) * 16 + half;
        any |= split(row(r, half), row(r + 16, half), to.high + at, to.low + at);
      }
  to.exact = all_zero(any);
}

// Tiles 0 to 3 hold a block of 32 x 32 results, 4 and 5 two tiles of rows, 6 and 7 two tiles of columns.
LINROPE_INLINE void zero_block() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
LINROPE_INLINE void store_block(float* to) {
  _tile_stored(0, to, 4 * C);
  _tile_stored(1, to + kTile, 4 * C);
  _tile_stored(2, to + kTile * C, 4 * C);
  _tile_stored(3, to + kTile * C + kTile, 4 * C);
}
LINROPE_INLINE void load_rows(const uint32_t* a, int64_t stride) {
  _tile_loadd(4, a, 4 * stride);
  _tile_loadd(5, a + kTile * stride, 4 * stride);
}
LINROPE_INLINE void load_panel(const uint32_t* b) {
  _tile_loadd(6, b, 4 * C);
  _tile_loadd(7, b + kTile, 4 * C);
}
LINROPE_INLINE void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}
// The block += A B, for 32 rows of A from pair a on, `stride` pairs apart, and K rows of B
template <int m, int n> void multiply_block(const Split<m>& A, int a, int64_t stride, const Split<n>& B, int K) {
  asm volatile("" ::: "memory");  // the compiler does not know that tiles are loaded from memory
  for (int k = 0; k < K; k += 32, a += 16)
    for (int part = A.exact; part < 2; part++) {
      load_rows((part ? A.high : A.low) + a, stride);
      if (!B.exact) {
        load_panel(B.low + k * 16);
        multiply_tiles();
      }
      load_panel(B.high + k * 16);
      multiply_tiles();
    }
}

// The block += A B, for 32 rows of A, with K rows of B in a panel
template <int n> void multiply_panel(const Split<n>& A, const float* B, int K) {
  Split<C * C> part[2];
  split_columns(B, NW, 32, 0, 32, part[0]);
  for (int k = 0; k < K; k += 32) {  // the next part is split first: a tile is slow to load from what was just stored
    if (k + 32 < K) split_columns(B + (k + 32) * NW, NW, 32, 0, 32, part[(k / 32 + 1) % 2]);
    multiply_block(A, k / 2, K / 2, part[k / 32 % 2], 32);
  }
}

// A: that of x, split
template <int n> void multiply_scores(const Scores x, const Split<n>& A) {
  alignas(64) float block[C * C];
  zero_block();
  multiply_panel(A, x.B_t, x.K.size);
  store_block(block);
  for (int i = 0; i < x.rows; i++)
    for (int j = 0; j < C; j += W) {
      vf y = load(block + i * C + j);
      if (x.scale) y *= x.scale[i];
      if (x.L && j <= i) y *= load(x.L + i * C + j);
      store(x.to + i * C + j, iota() + j <= i ? y : vf{});
    }
}
void multiply_scores(const Scores& x, Prefetcher& ahead) {
  Split<C * kMaxRow> A;
  split_rows(x.A, x.rows * x.K.size / 32, ~0u, A);
  ahead.fetch_some();
  multiply_scores(x, A);
}

// Rows first .. last - 1 of 32 columns of a product. A_S: the block A S; null: it is zero, or `block` contains it
void finish_panel(const Product x, int e0, int first, int last, const float* A_S, const float* block) {
  const float one = 1, *scale = x.scale ? x.scale : &one, *last_scale = x.last_scale ? x.last_scale : &one;
  const int scale_step = x.scale ? 1 : 0, last_step = x.last_scale ? 1 : 0;
  for (int i = first; i < last; i++) {
    float* to = x.to + i * x.stride + e0;
    vf y[NV], of_state[NV];
    for (int v = 0; v < NV; v++) y[v] = load(block + i * C + v * W);
    for (int v = 0; A_S && v < NV; v++) y[v] += of_state[v] = load(A_S + i * C + v * W) * scale[i * scale_step];
    if (A_S && x.sums) {
      const float* with = x.with + i * x.N.size + e0;
      vf sum = load(x.sums + i * W);
      for (int v = 0; v < NV; v++) sum += of_state[v] * load(with + v * W);
      store(x.sums + i * W, sum);
    }
    for (int v = 0; v < NV; v++) y[v] *= last_scale[i * last_step];
    for (int v = 0; x.accumulate && v < NV; v++) y[v] += load(to + v * W);
    for (int v = 0; v < NV; v++) store(to + v * W, y[v]);
  }
}

// Rows first .. last - 1 of the result; valid_first .. valid_last - 1: the rows of V that they use. missing: the scores, if
// they are still to be computed, with the A of x
void multiply_rows(const Product& x, const Scores* missing, int first, int last, int valid_first, int valid_last,
                   Prefetcher& ahead) {
  const int K = x.K.size;
  Split<C * kMaxRow> A;
  Split<C * C> scores, V;
  alignas(64) float block[C * C], A_S[C * C];
  const bool apart = x.S && (x.scale || x.sums);
  if (x.S || missing) split_rows(x.A, x.rows * K / 32, ~0u, A);
  if (missing) multiply_scores(*missing, A);
  if (x.scores && x.transposed) transpose(x.scores, x.rows, C, block);
  if (x.scores) split_rows(x.transposed ? block : x.scores, x.rows, first_of_row(x.rows), scores);
  for (int e0 = 0; e0 < x.N.size; e0 += NW) {
    if (x.scores) split_columns(x.V + e0, x.N.size, C, valid_first, valid_last, V);
    ahead.fetch_some();
    zero_block();
    if (x.S) multiply_panel(A, x.S + e0 * K, K);
    if (apart) {
      store_block(A_S);
      zero_block();
    }
    ahead.fetch_some();
    if (x.scores) multiply_block(scores, 0, kTile, V, C);
    store_block(block);
    finish_panel(x, e0, first, last, apart ? A_S : nullptr, block);
  }
}
void multiply(const Product& x, Prefetcher& ahead, const Scores* missing = nullptr) {
  if (x.finite || !x.scores) return multiply_rows(x, missing, 0, x.rows, 0, x.rows, ahead);
  if (missing) tiles::multiply_scores(*missing, ahead);
  for (int i = 0; i < x.rows; i++)
    multiply_rows(x, nullptr, i, i + 1, x.transposed ? i : 0, x.transposed ? x.rows : i + 1, ahead);
}

// One block of 32 x 32 numbers of the new state, from number `at` on. added: the block B^T V
void finish_update(const Update x, int at, const float* added) {
  const float* from = (x.from ? x.from : x.S) + at;
  float* to = x.S + at;
  for (int i = 0; i < NW * NW; i += W)
    store(to + i, x.fresh ? load(added + i) : x.factor(load(from + i), load(added + i)));
}
void update(const Update& x, Prefetcher& ahead) {
  if (x.whole || !x.rows) return linrope::update(x, ahead);
  const int K = x.K.size;
  alignas(64) float transposed[kMaxRow * C], block[C * C];
  Split<kMaxRow * C> B;
  Split<C * C> V;
  if (!x.B_t) transpose(x.B, x.rows, K, transposed);
  split_rows(x.B_t ? x.B_t : transposed, K, first_of_row(x.rows), B);
  for (int e0 = 0; e0 < x.N.size; e0 += NW) {
    split_columns(x.V + e0, x.N.size, C, 0, x.rows, V);
    for (int f0 = 0; f0 < K; f0 += NW) {
      ahead.fetch_some();
      zero_block();
      multiply_block(B, f0 * kTile, kTile, V, C);
      store_block(block);
      finish_update(x, e0 * K + f0 * NW, block);
    }
  }
}
#endif

}  // namespace tiles
}  // namespace
}  // namespace linrope
