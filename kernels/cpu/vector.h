// Vectors of the instruction set that this file is compiled for (GNU vector extensions), and elementwise functions.
// Everything is in an anonymous namespace: otherwise the linker could merge an inline function with another instruction
// set's copy.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "call.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace linrope {
namespace {

// A vector has W lanes. A micro-kernel holds MR rows of NV vectors in registers; a panel has NW columns.
#if defined(__AVX512F__)
constexpr int W = 16, NV = 2, MR = 8;
#elif defined(__AVX2__)
constexpr int W = 8, NV = 2, MR = 6;
#elif defined(__aarch64__)
constexpr int W = 4, NV = 4, MR = 6;
#else
constexpr int W = 4, NV = 2, MR = 6;
#endif
constexpr int NW = NV * W;
static_assert(kChunk % NW == 0);

typedef float vf __attribute__((vector_size(4 * W)));
typedef float vfu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef int32_t viu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint32_t vuu __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef uint64_t vl __attribute__((vector_size(8 * W)));
typedef double vd __attribute__((vector_size(4 * W)));  // half as many lanes
typedef double vdu __attribute__((vector_size(4 * W), aligned(8), may_alias));
typedef float vhalf __attribute__((vector_size(2 * W), aligned(4), may_alias));
typedef uint64_t vlu __attribute__((vector_size(8 * W), aligned(8), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline vf splat(float x) { return x - vf{}; }
inline vf load(const float* p) { return *(const vfu*)p; }
inline void store(float* p, vf x) { *(vfu*)p = x; }

// 16-bit numbers to 32-bit lanes, and the lower 16 bits of each lane. On AVX-512 GCC 12 would convert each half by itself
#if defined(__AVX512F__)
inline vu widen(const vh* p) { return (vu)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)p)); }
inline void narrow(vu x, vh* p) { _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x)); }
#else
inline vu widen(const vh* p) { return __builtin_convertvector(*p, vu); }
inline void narrow(vu x, vh* p) { *p = __builtin_convertvector(x, vh); }
#endif

inline vf load(const bf16* p) { return (vf)(widen((const vh*)p) << 16); }
// The upper 16 bits of each lane are x rounded to nearest even; NaN stays NaN
LINROPE_INLINE vu round_to_bf16(vf x) {
  const vu u = (vu)x;
  return x == x ? u + 0x7fff + ((u >> 16) & 1) : u | 0x400000;
}
inline void store(bf16* p, vf x) { narrow(round_to_bf16(x) >> 16, (vh*)p); }

#if defined(__AVX512F__)
inline vf load(const fp16* p) { return (vf)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p)); }
inline void store(fp16* p, vf x) { _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, (__m512)x, 0)); }
#elif defined(__F16C__)
inline vf load(const fp16* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store(fp16* p, vf x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, 0)); }
#else
inline vf load(const fp16* p) {
  const vu u = widen((const vh*)p), magnitude = u & 0x7fff;
  // The exponent's bias changes from 15 to 127. Subnormal numbers are integers times 2^-24; infinity and NaN keep an
  // exponent of all ones.
  const vu normal = (magnitude << 13) + (112u << 23);
  const vf small = __builtin_convertvector((vi)magnitude, vf) * 0x1p-24f;
  vu y = magnitude < 0x400 ? (vu)small : normal;
  y = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000u : y;
  return (vf)(y | (u & 0x8000) << 16);
}
inline void store(fp16* p, vf x) {  // to nearest even
  const vu u = (vu)x, sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  const vu normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // Adding 0.5 moves a float's last bit to 2^-24, the unit of subnormal halves.
  const vu small = (vu)((vf)magnitude + 0.5f) - 0x3f000000u;
  vu y = magnitude < 0x38800000u ? small : normal;
  y = magnitude >= 0x477ff000u ? vu{} + 0x7c00 : y;
  y = magnitude > 0x7f800000u ? vu{} + 0x7e00 : y;
  narrow(y | sign, (vh*)p);
}
#endif

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t u = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &u, 4);
  return y;
}
inline float to_float(fp16 x) {
  fp16 lanes[W] = {x};
  return load(lanes)[0];
}
template <class T> inline void put(T* p, float x) {
  T lanes[W];
  store(lanes, splat(x));
  *p = lanes[0];
}
template <> inline void put(float* p, float x) { *p = x; }

// Elements 4 block .. 4 block + 3. GCC would put them together one by one in a loop.
template <int block> LINROPE_INLINE v4 quarter(vf x) {
  return __builtin_shufflevector(x, x, 4 * block, 4 * block + 1, 4 * block + 2, 4 * block + 3);
}

inline v4 sum_of_quarters(vf x) {
#if defined(__AVX512F__)
  return (quarter<0>(x) + quarter<1>(x)) + (quarter<2>(x) + quarter<3>(x));
#elif defined(__AVX2__)
  return quarter<0>(x) + quarter<1>(x);
#else
  return x;
#endif
}
inline float sum(vf x) {
  const v4 t = sum_of_quarters(x);
  const v4 pairs = t + __builtin_shufflevector(t, t, 2, 3, 0, 1);
  return pairs[0] + pairs[1];
}
inline vd widen(const float* p) { return __builtin_convertvector(*(const vhalf*)p, vd); }
inline double sum(vd x) {
  for (int n = W / 4; n > 0; n /= 2)
    for (int i = 0; i < n; i++) x[i] += x[i + n];
  return x[0];
}
// max(x, y) and min(x, y); a NaN in x stays (x86 returns the second operand)
#if defined(__AVX512F__)
LINROPE_INLINE vf largest(vf x, float y) { return (vf)_mm512_maskz_max_ps(0xffff, (__m512)splat(y), (__m512)x); }
LINROPE_INLINE vf smallest(vf x, float y) { return (vf)_mm512_maskz_min_ps(0xffff, (__m512)splat(y), (__m512)x); }
#elif defined(__AVX2__)
LINROPE_INLINE vf largest(vf x, float y) { return (vf)_mm256_max_ps((__m256)splat(y), (__m256)x); }
LINROPE_INLINE vf smallest(vf x, float y) { return (vf)_mm256_min_ps((__m256)splat(y), (__m256)x); }
#else
LINROPE_INLINE vf largest(vf x, float y) { return x < y ? splat(y) : x; }
LINROPE_INLINE vf smallest(vf x, float y) { return x > y ? splat(y) : x; }
#endif

// e^r 2^n for |r| <= ln 2 / 2 and an integer n from -252 to 254, or with `normal` from -126 to 127; relative error below
// 1e-7
template <bool normal = false> LINROPE_INLINE vf exp_parts(vf r, vf n) {
  vf p = splat(1.3814320555e-3f);  // the best polynomial of degree 6 whose first terms are 1 + r: relative error 4e-9
  p = p * r + 8.3688506857e-3f;
  p = p * r + 4.1668400168e-2f;
  p = p * r + 1.6666519642e-1f;
  p = p * r + 4.9999994040e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  const vi k = __builtin_convertvector(n, vi), half = k >> 1;
  if (normal) return p * (vf)((k + 127) << 23);
  return p * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);  // two factors, since 2^n may be subnormal
#endif
}
template <bool normal = false> LINROPE_INLINE vf exponential_within(vf x) {  // x from -104 to 89, or -87 to 87
  const vf t = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const vf n = t - 12582912.0f;
  const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
  return exp_parts<normal>(r, n);
}
LINROPE_INLINE vf exponential(vf x) { return exponential_within(smallest(largest(x, -104.0f), 89.0f)); }

// 1 / x for normal x
#if defined(__AVX512F__)
LINROPE_INLINE vf reciprocal(vf x) {  // a division takes as long as all the rest of Silu
  const vf y = (vf)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);
  return y + y * (1.0f - x * y);
}
#else
LINROPE_INLINE vf reciprocal(vf x) { return 1.0f / x; }
#endif

struct Silu {  // y = x s with s = sigmoid(x), and dy/dx; minus infinity gives -1.4e-36, NaN stays
  vf y, s;
  LINROPE_INLINE explicit Silu(vf x) {
    x = largest(x, -87.0f);  // 1 + e^87 has a normal reciprocal
    s = reciprocal(1.0f + exponential_within<true>(-smallest(x, 87.0f)));  // 1 + e^-87 is 1
    y = x * s;
  }
  LINROPE_INLINE vf slope() const { return s + y * (1.0f - s); }
};

LINROPE_INLINE vf apply(int map, vf x) {
  switch (map) {
    case kElu1: return largest(x, 0.0f) + exponential_within(largest(smallest(x, 0.0f), -104.0f));
    case kRelu: return largest(x, 0.0f);
    case kRelu2: x = largest(x, 0.0f); return x * x;
    case kExp: return exponential(x);
    case kSilu: return x / (1.0f + exponential(-x));
    default: return x;
  }
}
// Calls f<map>()
template <class F> LINROPE_INLINE void with_map(int map, F f) {
  switch (map) {
    case kElu1: return f.template operator()<kElu1>();
    case kRelu: return f.template operator()<kRelu>();
    case kRelu2: return f.template operator()<kRelu2>();
    case kExp: return f.template operator()<kExp>();
    case kSilu: return f.template operator()<kSilu>();
    default: return f.template operator()<kIdentity>();
  }
}
// True if the slope of a map depends on x, and not only on y
constexpr bool reads_input(int map) { return map == kSilu || map == kRelu2; }
// dy/dx of y = apply(map, x)
LINROPE_INLINE vf slope(int map, vf x, vf y) {
  switch (map) {
    case kElu1: return smallest(y, 1.0f);
    case kRelu: return y > 0.0f ? splat(1.0f) : y;
    case kRelu2: return 2.0f * largest(x, 0.0f);
    case kExp: return y;
    case kSilu: {
      const vf s = 1.0f / (1.0f + exponential(-x));
      return s + y * (1.0f - s);
    }
    default: return splat(1.0f);
  }
}

// Cosine and sine of angles in units of 2^-32 turns; absolute error below 1e-7
inline void cos_sin(vi angle, vf& c, vf& s) {
  const vi quadrant = (vi)((vu)angle + (1u << 29)) >> 30;
  const vf x = __builtin_convertvector((vi)((vu)angle - ((vu)quadrant << 30)), vf) * 1.46291807926715968e-9f;
  const vf y = x * x;
  vf a = splat(-1.9515295891e-4f);
  a = a * y + 8.3321608736e-3f;
  a = a * y - 1.6666654611e-1f;
  a = a * y * x + x;
  vf b = splat(2.443315711809948e-5f);
  b = b * y - 1.388731625493765e-3f;
  b = b * y + 4.166664568298827e-2f;
  b = b * y * y - 0.5f * y + 1.0f;
  const vi odd = (quadrant & 1) != 0;
  const vi minus_s = (quadrant & 2) << 30, minus_c = ((quadrant + 1) & 2) << 30;
  s = (vf)((vi)(odd ? b : a) ^ minus_s);
  c = (vf)((vi)(odd ? a : b) ^ minus_c);
}

// The elements of x and y with even and with odd indices
inline void deinterleave(vf x, vf y, vf& even, vf& odd) {
#if defined(__AVX512F__)
  even = __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  odd = __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  even = __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14);
  odd = __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  even = __builtin_shufflevector(x, y, 0, 2, 4, 6);
  odd = __builtin_shufflevector(x, y, 1, 3, 5, 7);
#endif
}
inline void interleave(vf even, vf odd, vf& x, vf& y) {
#if defined(__AVX512F__)
  x = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  y = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  x = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
  y = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  x = __builtin_shufflevector(even, odd, 0, 4, 1, 5);
  y = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
#endif
}

// Lane i is lane lanes[i] of x, modulo W
LINROPE_INLINE vf permute(vf x, vi lanes) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)lanes, (__m512)x);
#elif defined(__AVX2__)
  return (vf)_mm256_permutevar8x32_ps((__m256)x, (__m256i)lanes);
#else
  vf y;
  for (int i = 0; i < W; i++) y[i] = x[lanes[i] & (W - 1)];
  return y;
#endif
}

// W pairs: the first members and the second ones
template <class T> LINROPE_INLINE void load_pairs(const T* p, vf& first, vf& second) {
  deinterleave(load(p), load(p + W), first, second);
}
template <class T> LINROPE_INLINE void store_pairs(T* p, vf first, vf second) {
  vf x, y;
  interleave(first, second, x, y);
  store(p, x);
  store(p + W, y);
}
// The two members of a bfloat16 pair are the halves of a 32-bit word
LINROPE_INLINE void load_pairs(const bf16* p, vf& first, vf& second) {
  const vu words = *(const vuu*)p;
  first = (vf)(words << 16);
  second = (vf)(words & 0xffff0000u);
}
LINROPE_INLINE void store_pairs(bf16* p, vf first, vf second) {
  *(vuu*)p = round_to_bf16(first) >> 16 | (round_to_bf16(second) & 0xffff0000u);
}

// While it exists, results of this thread below the smallest normal number are 0. Many processors take a hundred times as
// long for subnormal numbers, which strong gates would make in every chunk. run_bundle (all sweeps) and step have one. The
// convolution, the norm and the linear products have none: nothing decays there, and their subnormal results are kept.
class FlushToZero {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  static void set(unsigned x) { _mm_setcsr(x); }
  static constexpr unsigned kBit = 1u << 15;
#elif defined(__aarch64__)
  uint64_t before = get();
  static uint64_t get() {
    uint64_t x;
    asm volatile("mrs %0, fpcr" : "=r"(x));
    return x;
  }
  static void set(uint64_t x) { asm volatile("msr fpcr, %0" ::"r"(x)); }
  static constexpr uint64_t kBit = 1u << 24;
#else
  unsigned before = 0;
  static void set(unsigned) {}
  static constexpr unsigned kBit = 0;
#endif

 public:
  FlushToZero() { set(before | kBit); }
  ~FlushToZero() { set(before); }
  FlushToZero(const FlushToZero&) = delete;
};

inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace
}  // namespace linrope
