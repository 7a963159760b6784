// Forget gates per feature: from the numbers of a projection to their log decay.
#pragma once
#include "partial.h"

namespace linrope {
namespace {

// log(1 + u) of u from 0 to 1, by the series of 2 artanh(s); relative error below 2e-7
LINROPE_INLINE vf log_1_plus(vf u) {
  const vf s = u / (2.0f + u), z = s * s;
  vf p = splat(1.0f / 13);
  p = p * z + 1.0f / 11;
  p = p * z + 1.0f / 9;
  p = p * z + 1.0f / 7;
  p = p * z + 1.0f / 5;
  p = p * z + 1.0f / 3;
  p = p * z + 1.0f;
  return 2.0f * s * p;
}

// x = log sigmoid(x), or with a bound above 0  x = -bound sigmoid(-x), for `count` numbers
void log_gates(float* x, int count, float bound) {
  vectors(count, [&]<bool PART>(int i, int lanes) {
    const vf y = load_lanes<PART>(x + i, lanes);
    const vf log_gate = bound > 0 ? -bound / (1.0f + exponential(y))
                                  : smallest(y, 0.0f) - log_1_plus(exponential(y < 0.0f ? y : -y));
    store_lanes<PART>(x + i, log_gate, lanes);
  });
}

}  // namespace
}  // namespace linrope
