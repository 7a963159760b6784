// The kernels of one instruction set, compiled with -DISA=name. One table is exported, and nothing else.
#include "forward.h"
#include "keys.h"
#include "queries.h"
#include "step.h"

namespace linrope {
namespace {

int padded_pairs(int pairs) { return round_up(pairs, W); }

size_t anchor_bytes(const Call& c) { return Task::anchor_bytes(Shape(c)); }

// A state seen across tokens whose logs of decay add up to log_decay
void fade(double log_decay, int64_t count, float* kv, int64_t z_count, double* z) {
  const Fade by(log_decay);
  for (int64_t i = 0; i < count; i++) kv[i] = by(splat(kv[i]))[0];
  for (int64_t i = 0; i < z_count; i++) z[i] *= by.exact;
}

}  // namespace

#define LINROPE_JOIN2(a, b) a##b
#define LINROPE_JOIN(a, b) LINROPE_JOIN2(a, b)
#define LINROPE_TEXT2(x) #x
#define LINROPE_TEXT(x) LINROPE_TEXT2(x)
extern const Isa LINROPE_JOIN(isa_, ISA) = {
    LINROPE_TEXT(ISA), padded_pairs, anchor_bytes, offsets, sum_steps, sum_decay, fade, run_bundle<Forward>,
    run_bundle<BackwardQueries>, run_bundle<BackwardKeys>, run_bundle<Answer>, run_bundle<AnswerBackward>, step};

}  // namespace linrope
