// Parallel regions, and the least work that is worth one.
#pragma once
#include <exception>
#include <mutex>

#include "pytorch.h"

namespace linrope {

// Work that takes one thread less than 0.1 to 0.4 ms stays on that thread, because on a busy machine others start about
// 10 ms late. These are the least sizes for several threads
constexpr int64_t kMinParallel = 1 << 15;        // numbers of a call's tokens
constexpr int64_t kMinParallelStep = 1 << 20;    // numbers of the states that a decoding step changes
constexpr int64_t kMinParallelLinear = 1 << 20;  // products in a step's projection

// Calls f(first, last) for ranges that cover 0 .. count - 1, on several threads if `parallel`. The first exception that
// one of them throws reaches the caller as it is, when all have ended.
template <class F> void for_ranges(int64_t count, bool parallel, const F& f) {
  if (!parallel || count <= 1) return f(0, count);
  struct Work {
    const F& f;
    std::mutex mutex;
    std::exception_ptr error;
  } work{f, {}, {}};
  const Range run = [](int64_t first, int64_t last, void* context) {
    Work& work = *(Work*)context;
    try {
      work.f(first, last);
    } catch (...) {
      const std::lock_guard lock(work.mutex);
      if (!work.error) work.error = std::current_exception();
    }
  };
  succeed(pytorch.torch_parallel_for(0, count, 1, run, &work), "run on several threads");
  if (work.error) std::rethrow_exception(work.error);
}

inline int64_t num_threads() {
  uint32_t count;
  succeed(pytorch.torch_get_num_threads(&count), "count its threads");
  return count;
}

}  // namespace linrope
