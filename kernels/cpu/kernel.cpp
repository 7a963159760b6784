// The kernels of one instruction set, compiled with -DISA=name. Only their table is exported.
#include "convolution.h"
#include "forward.h"
#include "keys.h"
#include "linear.h"
#include "norm.h"
#include "queries.h"
#include "step.h"

namespace linrope {
namespace {

int padded_pairs(const Call& c) { return Shape(c).half; }

size_t anchor_bytes(const Call& c) { return Task::anchor_bytes(Shape(c)); }

// A state decayed by tokens whose log decay sums to log_decay
void decay_caller_state(double log_decay, int64_t count, float* kv, int64_t z_count, double* z) {
  const DecayFactor factor(log_decay);
  for (int64_t i = 0; i < count; i++) kv[i] = factor(splat(kv[i]))[0];
  for (int64_t i = 0; i < z_count; i++) z[i] *= factor.exact;
}

}  // namespace

#define LINROPE_JOIN2(a, b) a##b
#define LINROPE_JOIN(a, b) LINROPE_JOIN2(a, b)
#define LINROPE_TEXT2(x) #x
#define LINROPE_TEXT(x) LINROPE_TEXT2(x)
extern const Isa LINROPE_JOIN(isa_, ISA) = {
    LINROPE_TEXT(ISA), W, padded_pairs, anchor_bytes, fill_rotation_table, sum_steps, sum_decay, decay_caller_state,
    run_bundle<Forward>, run_bundle<BackwardQueries>, run_bundle<BackwardKeys>, run_bundle<Bidirectional>,
    run_bundle<BidirectionalBackward>, step, convolve, convolve_backward, norm, norm_backward,
    linear};

}  // namespace linrope
