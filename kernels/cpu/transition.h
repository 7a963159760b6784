// What tokens without erase do to a state that they find: they multiply it by e^D, with D their summed log decay. Then
// they add their own sums, which core.h computes. The gradient of a state passes back through the same factor.
#pragma once
#include "vector.h"

namespace linrope {
namespace {

// Multiplies a state by e^D. Near 1 as S + S expm1(D): a rounded factor e^D would add the same error in every chunk.
// Further from 1 as S e^D: the other form would cancel.
struct DecayFactor {
  enum { kOne, kNearOne, kBelow } kind = kOne;
  float factor = 0;  // e^D - 1 if kNearOne, e^D if kBelow
  double exact = 1;
  DecayFactor() = default;
  explicit DecayFactor(double log_decay) {
    if (log_decay == 0) return;
    exact = std::exp(log_decay);
    kind = log_decay > -0.5 ? kNearOne : kBelow;
    factor = (float)(kind == kNearOne ? std::expm1(log_decay) : exact);
  }
  // s e^D + added; near 1 the large s is rounded only once
  vf operator()(vf s, vf added) const {
    return kind == kOne ? s + added : kind == kNearOne ? s + (s * factor + added) : s * factor + added;
  }
  vf operator()(vf s) const {
    return kind == kOne ? times<kOne>(s) : kind == kNearOne ? times<kNearOne>(s) : times<kBelow>(s);
  }
  // s e^D in a loop that is compiled for one kind
  template <int known> vf times(vf s) const {
    if constexpr (known == kOne) return s;
    if constexpr (known == kNearOne) return s + s * factor;
    return s * factor;
  }
};

// A state in the caller's layout
void apply(const Transition& transition, int64_t kv_count, float* kv, int64_t z_count, double* z) {
  const DecayFactor factor(transition.log_decay);
  for (int64_t i = 0; i < kv_count; i++) kv[i] = factor(splat(kv[i]))[0];
  for (int64_t i = 0; i < z_count; i++) z[i] *= factor.exact;
}

}  // namespace
}  // namespace linrope
