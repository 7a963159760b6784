// Loads and stores at the end of a row, where fewer numbers are left than a vector holds; and the choice of a kernel's
// type by the dtype of its tensors.
#pragma once
#include "vector.h"

namespace linrope {
namespace {

#if defined(__AVX512BW__)
inline uint16_t first_lanes(int count) { return (uint16_t)((1u << count) - 1); }
#elif defined(__AVX2__)
inline __m256i first_lanes(int count) {
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  return (__m256i)(lanes < count);
}
#endif

// The first `count` lanes; the others are zero. With PART = false, count is W.
template <bool PART, class T> LINROPE_INLINE vf load_lanes(const T* p, int count) {
  if constexpr (!PART) return load(p);
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 4) return (vf)_mm512_maskz_loadu_ps(first_lanes(count), p);
  const __m256i x = _mm256_maskz_loadu_epi16(first_lanes(count), p);
  return load((const T*)&x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return (vf)_mm256_maskload_ps(p, first_lanes(count));
#endif
  T lanes[W] = {};
  memcpy(lanes, p, count * sizeof(T));
  return load(lanes);
}
template <bool PART, class T> LINROPE_INLINE void store_lanes(T* p, vf x, int count) {
  if constexpr (!PART) return store(p, x);
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)x);
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_maskstore_ps(p, first_lanes(count), (__m256)x);
#endif
  T lanes[W];
  store(lanes, x);
  memcpy(p, lanes, count * sizeof(T));
}

// Calls f<PART>(i, count) for the vectors of a row of n numbers
template <class F> LINROPE_INLINE void vectors(int n, F f) {
  int i = 0;
  for (; i + W <= n; i += W) f.template operator()<false>(i, W);
  if (i < n) f.template operator()<true>(i, n - i);
}

template <class F> LINROPE_INLINE void with_type(int type, F f) {
  if (type == kFloat32) f.template operator()<float>();
  else if (type == kBFloat16) f.template operator()<bf16>();
  else f.template operator()<fp16>();
}

}  // namespace
}  // namespace linrope
