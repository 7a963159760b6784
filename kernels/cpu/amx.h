// The matrix products of core.h for bfloat16 and float16 calls, in AMX's tile registers, which multiply bfloat16
// numbers and add up in float32.
//
// Each float32 number x is split into two bfloat16 numbers: high is x rounded, low is the rest, rounded to nearly 8
// bits. The parts of two numbers are multiplied in full, (high + low) (high + low), so that a product is off by
// about 2^-16 of its size. bfloat16 and float16 numbers are split without an error.
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
struct Factors {};
struct Configuration {
  explicit Configuration(bool) {}
};
inline void split(const Operands&) {}
inline void multiply_chunk(const ChunkProduct&) {}
inline void update(const Operands&, float*, bool, const DecayFactor&) {}
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
struct Factors {
  Split<C * kMaxRow> B, B_t, V;
  alignas(64) uint32_t V_third[C * kMaxRow / 2];  // what V's two parts leave, if that is wanted
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
LINROPE_INLINE vu pairs(vf x, vf y) { return (vu)upper(y) | (vu)x >> 16; }

// Splits the pairs (x, y); returns low. third: where to store what the two parts leave; null: nowhere
LINROPE_INLINE vu split(vf x, vf y, uint32_t* high, uint32_t* low, uint32_t* third = nullptr) {
  const vf high_x = (vf)((vu)x + 0x8000), high_y = (vf)((vu)y + 0x8000);
  const vf rest_x = x - upper(high_x), rest_y = y - upper(high_y);
  const vf low_x = rest_x * kRounding, low_y = rest_y * kRounding;
  *(vu*)high = pairs(high_x, high_y);
  *(vu*)low = pairs(low_x, low_y);
  if (third) *(vu*)third = pairs(rest_x - upper(low_x), rest_y - upper(low_y));
  return pairs(low_x, low_y);
}
inline bool all_zero(vu x) { return !_mm512_test_epi32_mask((__m512i)x, (__m512i)x); }

// 32 numbers; those outside `mask` become 0
LINROPE_INLINE vu split_row(const float* x, uint32_t mask, uint32_t* high, uint32_t* low) {
  return split((vf)_mm512_maskz_loadu_ps(mask, x), (vf)_mm512_maskz_loadu_ps(mask >> 16, x + W), high, low);
}
// Rows of 32 numbers each
template <int n> void split_rows(const float* x, int rows, uint32_t mask, Split<n>& to) {
  vu any = {};
  for (int i = 0; i < rows; i++) any |= split_row(x + i * 32, mask, to.high + i * 16, to.low + i * 16);
  to.exact = all_zero(any);
}

// A panel (rows, 32), whose rows i and i + 16 of every 32 form pairs, to pair `first` of `to` and on. Rows from
// `valid` on become 0.
template <int n>
void split_panel(const float* x, int rows, int valid, Split<n>& to, int first = 0, uint32_t* third = nullptr) {
  vu any = {};
  for (int i = 0; i < rows; i += 32)
    for (int r = i; r < i + 16; r++)
      for (int half = 0; half < 32; half += W) {
        const int at = first + (i + 2 * (r - i)) * 16 + half;
        const float* from = x + r * 32 + half;
        any |= split(r < valid ? load(from) : vf{}, r + 16 < valid ? load(from + 16 * 32) : vf{}, to.high + at,
                     to.low + at, third ? third + at : nullptr);
      }
  to.exact = all_zero(any) && (first == 0 || to.exact);
}

// The same for one part of rows that split_rows has split
inline void pair_rows(const uint32_t* rows, int count, uint32_t* to) {
  for (int i = 0; i < count; i += 32)
    for (int r = i; r < i + 16; r++, to += 32) {
      const vu x = *(const vu*)(rows + r * 16), y = *(const vu*)(rows + (r + 16) * 16);
      *(vu*)to = y << 16 | (x & 0xffff);
      *(vu*)(to + 16) = (y & kUpper) | x >> 16;
    }
}

// Rows of V from `valid` on become 0.
void split_values(const Operands& x, int valid) {
  uint32_t* third = x.precise ? x.factors->V_third : nullptr;
  for (int e0 = 0; e0 < x.N.size; e0 += NW) split_panel(x.V + e0 * C, C, valid, x.factors->V, e0 * C / 2, third);
}
void split(const Operands& x) {
  auto& [B, B_t, V, _] = *x.factors;
  split_rows(x.B_t, x.K.size, (2u << (x.rows - 1)) - 1, B_t);
  pair_rows(B_t.high, x.K.size, B.high);
  pair_rows(B_t.low, x.K.size, B.low);
  B.exact = B_t.exact;
  split_values(x, x.rows);
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
// The block += A B, for 32 rows of A from pair a on, `stride` pairs apart, and K rows of a panel from pair b on. Small
// products come first: a product with its factors exchanged then agrees in all but a few bits.
template <int m, int n>
void multiply_block(const Split<m>& A, int a, int64_t stride, const Split<n>& B, int b, int K,
                    const uint32_t* third = nullptr) {
  asm volatile("" ::: "memory");  // the compiler does not know that tiles are loaded from memory
  for (int k = 0; k < K; k += 32, a += 16, b += 16 * C)
    for (int part = A.exact; part < 2; part++) {
      load_rows((part ? A.high : A.low) + a, stride);
      if (part && third) {
        load_panel(third + b);
        multiply_tiles();
      }
      if (!B.exact) {
        load_panel(B.low + b);
        multiply_tiles();
      }
      load_panel(B.high + b);
      multiply_tiles();
    }
}

// Computes the whole result and writes its rows first .. last - 1.
void multiply_rows(const ChunkProduct& x, int first, int last) {
  const auto& [rows, K_row, N_row, B_t, V, factors, precise] = x.operands;
  const int K = K_row.size, N = N_row.size;
  Split<C * kMaxRow> A, S;
  Split<C * C> scores;
  alignas(64) float block[C * C];
  split_rows(x.A, rows * K / 32, ~0u, A);
  if (B_t) {
    zero_block();
    multiply_block(A, 0, K / 2, factors->B, 0, K);
    store_block(block);
    move_diagonal(x, block);
    vu any = {};
    for (int i = 0; i < rows; i++)  // keys up to the query
      any |= split_row(block + i * C, (2u << i) - 1, scores.high + i * kTile, scores.low + i * kTile);
    scores.exact = all_zero(any);
  }
  for (int e0 = 0; e0 < N; e0 += NW) {
    zero_block();
    if (x.S) {
      split_panel(x.S + e0 * K, K, K, S);
      multiply_block(A, 0, K / 2, S, 0, K);
    }
    if (B_t) multiply_block(scores, 0, kTile, factors->V, e0 * C / 2, C, precise ? factors->V_third : nullptr);
    store_block(block);
    for (int i = first; i < last; i++)
      for (int v = 0; v < NW; v += W) {
        float* out = x.out + i * x.stride + e0 + v;
        const vf y = load(block + i * C + v) * x.scale[i];
        store(out, x.accumulate ? load(out) + y : y);
      }
  }
}

void multiply_chunk(const ChunkProduct& x) {
  const int rows = x.operands.rows;
  if (x.finite || !x.operands.B_t) return multiply_rows(x, 0, rows);
  for (int i = 0; i < rows; i++) {
    split_values(x.operands, i + !x.diagonal);
    multiply_rows(x, i, i + 1);
  }
}

void update(const Operands& x, float* S, bool fresh, const DecayFactor& factor) {
  alignas(64) float block[C * C];
  for (int e0 = 0; e0 < x.N.size; e0 += NW)
    for (int f0 = 0; f0 < x.K.size; f0 += NW) {
      zero_block();
      multiply_block(x.factors->B_t, f0 * kTile, kTile, x.factors->V, e0 * C / 2, C);
      store_block(block);
      float* s = S + e0 * x.K.size + f0 * NW;
      for (int i = 0; i < NW * NW; i += W) {
        const vf added = load(block + i);
        store(s + i, fresh ? factor(added) : factor(load(s + i), added));
      }
    }
}
#endif

}  // namespace tiles
}  // namespace
}  // namespace linrope
