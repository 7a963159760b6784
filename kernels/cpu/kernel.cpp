// The kernels of one instruction set, compiled with -DISA=name. Only their table is exported.
#include "backward.h"
#include "convolution.h"
#include "gates.h"
#include "linear.h"
#include "norm.h"
#include "step.h"

namespace linrope {
namespace {

int padded_pairs(const Call& c) { return Shape(c).half; }

}  // namespace

#define LINROPE_JOIN2(a, b) a##b
#define LINROPE_JOIN(a, b) LINROPE_JOIN2(a, b)
#define LINROPE_TEXT2(x) #x
#define LINROPE_TEXT(x) LINROPE_TEXT2(x)
extern const Isa LINROPE_JOIN(isa_, ISA) = {
    .name = LINROPE_TEXT(ISA),
    .lanes = W,
    .padded_pairs = padded_pairs,
    .fill_rotation_table = fill_rotation_table,
    .sum_steps = sum_steps,
    .transition = transition,
    .apply = apply,
    .forward = run_bundle<Forward>,
    .backward = run_bundle<Backward>,
    .bidirectional = run_bundle<Bidirectional>,
    .bidirectional_backward = run_bundle<BidirectionalBackward>,
    .step = step,
    .convolve = convolve,
    .convolve_backward = convolve_backward,
    .norm = norm,
    .norm_backward = norm_backward,
    .linear = linear,
    .log_gates = log_gates,
};

}  // namespace linrope
