// Divides a call into tasks and runs them in parallel regions. A task is one segment of a sequence's key/value head. A
// thread gets a bundle: the same segment of several heads.
// With fewer than kMinTasks tasks, long sequences are cut into segments: first the state of each segment alone is
// computed, then the states before the segments, and then every segment runs from the state before it. The cut depends
// only on the call's shape, so that the bits of a result do not depend on the number of threads.
#pragma once
#include <cstring>

#include "checks.h"
#include "parallel.h"

namespace linrope {

constexpr int64_t kMinTasks = 8;
constexpr int64_t kMinSegment = 1024;  // n tokens (packed: the average) are cut into at most n / kMinSegment segments

struct Schedule {
  const Call& c;
  int64_t segments = 1, state_size, z_size;
  std::vector<int64_t> bounds;  // of packed sequences; else empty

  explicit Schedule(const Call& c) : c(c), state_size(c.f * c.e), z_size(c.f) {
    const View& cu = c.cu_seqlens;
    if (cu.data) bounds = rising_bounds(cu.data, cu.type, c.sequences + 1, c.m);
    const int64_t heads = c.sequences * c.g, longest = c.m > c.n ? c.m : c.n;
    if (heads > 0 && heads < kMinTasks) segments = (kMinTasks + heads - 1) / heads;
    const int64_t most = longest / kMinSegment / (cu.data && c.sequences ? c.sequences : 1);
    if (segments > most) segments = most > 1 ? most : 1;
    // A segment's effect on the state before it must be a Transition, one factor for all features. With erase it is an
    // f x f matrix, and with a decay per unit a factor per feature
    if (c.erase.data || c.units > 1) segments = 1;
  }
  int64_t heads() const { return c.sequences * c.g; }
  int64_t tasks() const { return heads() * segments; }

  // The tokens of task i, for n tokens (queries or keys) per batch row
  Span span(int64_t i, int64_t n) const {
    const int64_t segment = i % segments, head = i / segments, sequence = head / c.g;
    const int64_t begin = bounds.empty() ? 0 : bounds[sequence], end = bounds.empty() ? n : bounds[sequence + 1];
    const int64_t length = ((end - begin + segments - 1) / segments + kBlock - 1) / kBlock * kBlock;
    const auto start = [&](int64_t s) { return begin + s * length < end ? begin + s * length : end; };
    return {sequence, head % c.g, start(segment), segment == segments - 1 ? end : start(segment + 1), begin};
  }
  template <class F> void run(int64_t count, F task) const {
    const int64_t tokens = c.cu_seqlens.data ? c.m : c.sequences * (c.m > c.n ? c.m : c.n);
    for_ranges(count, tokens * c.h * (c.f + c.e) >= kMinParallel, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) task(i);
    });
  }
  // Runs a sweep over segments first .. first + count - 1 of all heads; ends(head, segment) returns the Ends of each.
  // Bundles as many heads as it can, up to kBundle, while every thread still gets a task. A head's results are the same
  // in any bundle. Heads that add to the same rows of dq and dk are swept by one thread, in the same order for any
  // number of threads.
  template <class F>
  void sweep(Sweep* sweep, int64_t first, int64_t count, int64_t n, bool want_output, F ends) const {
    const int64_t threads = num_threads(), tasks_each = tasks() / (threads > 0 ? threads : 1);
    int64_t bundle = tasks_each < 1 ? 1 : tasks_each < kBundle ? tasks_each : kBundle;
    if (bundle > c.g) bundle = c.g;
    if (bundle < 1 || c.sequences < 1) return;
    const int64_t shared = c.heads_per_gradient;
    const int64_t each = bundle < shared ? shared : bundle / shared * shared;  // heads of a bundle
    const int64_t parts = (c.g + each - 1) / each;
    run(c.sequences * parts * count, [&](int64_t i) {
      const int64_t segment = first + i % count, sequence = i / count / parts, begin = i / count % parts * each;
      const int64_t end = begin + each < c.g ? begin + each : c.g;
      for (int64_t from = begin; from < end; from += kBundle) {
        const int64_t to = from + kBundle < end ? from + kBundle : end;
        Span spans[kBundle];
        Ends span_ends[kBundle];
        for (int64_t g = from; g < to; g++) {
          const int64_t head = sequence * c.g + g;
          spans[g - from] = span(head * segments + segment, n);
          span_ends[g - from] = ends(head, segment);
        }
        sweep(c, (int)(to - from), spans, span_ends, want_output);
      }
    });
  }
  // The head's index in the states that the caller passed
  int64_t row(int64_t head) const { return c.state_row(head / c.g) * c.g + head % c.g; }
  // The head's part of a state in the caller's memory; null if there is none
  const float* kv(int64_t head) const { return kv_of(c.kv, row(head)); }
  const double* z(int64_t head) const { return z_of(c.z, row(head)); }
  const float* g_kv(int64_t head) const { return kv_of(c.g_kv, head); }
  const double* g_z(int64_t head) const { return z_of(c.g_z, head); }

 private:
  const float* kv_of(const View& x, int64_t i) const { return x.data ? x.as<float>() + i * state_size : nullptr; }
  const double* z_of(const View& x, int64_t i) const { return x.data ? x.as<double>() + i * z_size : nullptr; }
};

// Where the states after the sequences, or the gradients of those before them, go; null: not wanted
struct StateOut {
  float* kv;
  double* z;
  // The part of head i
  StateOut at(const Schedule& x, int64_t i) const {
    return {kv ? kv + i * x.state_size : nullptr, z ? z + i * x.z_size : nullptr};
  }
};

// The states of each head at the ends of its segments; number s is the one before segment s
struct SegmentStates {
  const Schedule& x;
  std::vector<float> kv;
  std::vector<double> z;
  std::vector<Transition> transitions;  // of each segment
  std::vector<int64_t> angle;

  explicit SegmentStates(const Schedule& x) : x(x) {
    const int64_t count = x.heads() * (x.segments + 1);
    kv.resize(count * x.state_size);
    z.resize(count * x.z_size);
    transitions.resize(x.tasks());
  }
  int64_t index(int64_t head, int64_t s) const { return head * (x.segments + 1) + s; }
  float* kv_at(int64_t head, int64_t s) { return &kv[index(head, s) * x.state_size]; }
  double* z_at(int64_t head, int64_t s) { return &z[index(head, s) * x.z_size]; }
  const int64_t* angle_at(int64_t head, int64_t s) {
    return angle.empty() ? nullptr : &angle[index(head, s) * x.c.pairs];
  }
  void set(int64_t head, int64_t s, const float* from_kv, const double* from_z) {
    if (from_kv) memcpy(kv_at(head, s), from_kv, 4 * x.state_size);
    if (from_z) memcpy(z_at(head, s), from_z, 8 * x.z_size);
  }
  // Computes the sum of the angle steps before each segment.
  void sum_angles() {
    if (!x.c.angle_steps.data) return;
    angle.assign(x.heads() * (x.segments + 1) * x.c.pairs, 0);
    if (x.segments == 1) return;
    x.run(x.tasks(), [&](int64_t i) {
      isa().sum_steps(x.c, x.span(i, x.c.m), &angle[index(i / x.segments, i % x.segments + 1) * x.c.pairs]);
    });
    for (int64_t head = 0; head < x.heads(); head++)
      for (int64_t s = 1; s < x.segments; s++)
        for (int64_t p = 0; p < x.c.pairs; p++) {
          int64_t& sum = angle[index(head, s + 1) * x.c.pairs + p];
          sum = (int64_t)((uint64_t)sum + (uint64_t)angle[index(head, s) * x.c.pairs + p]);
        }
  }
  void copy(int64_t head, int64_t s, const StateOut& to) {
    if (to.kv) memcpy(to.kv, kv_at(head, s), 4 * x.state_size);
    if (to.z) memcpy(to.z, z_at(head, s), 8 * x.z_size);
  }
  void find_transition(int64_t head, int64_t segment) {
    const int64_t task = head * x.segments + segment;
    transitions[task] = isa().transition(x.c, x.span(task, x.c.m));
  }
  // state[to] += state[from] after the tokens of `segment`
  void add(int64_t head, int64_t from, int64_t to, int64_t segment) {
    float *a = kv_at(head, from), *b = kv_at(head, to);
    double *p = z_at(head, from), *q = z_at(head, to);
    std::vector<float> kv_after(a, a + x.state_size);
    std::vector<double> z_after(p, p + x.z_size);
    const Transition& transition = transitions[head * x.segments + segment];
    isa().apply(transition, x.state_size, kv_after.data(), x.z_size, z_after.data());
    for (int64_t i = 0; i < x.state_size; i++) b[i] += kv_after[i];
    for (int64_t i = 0; i < x.z_size; i++) q[i] += z_after[i];
  }
  // Computes the states before segments 1, 2, .. and, if `last`, the one after the last segment.
  void scan_forward(bool last) {
    const int64_t count = last ? x.segments : x.segments - 1;
    if (count == 0) return;
    x.sweep(isa().forward, 0, count, x.c.m, false, [&](int64_t head, int64_t s) -> Ends {
      find_transition(head, s);
      return {.kv_out = kv_at(head, s + 1), .z_out = z_at(head, s + 1), .angle_in = angle_at(head, s)};
    });
    for (int64_t head = 0; head < x.heads(); head++)
      for (int64_t s = 0; s < count; s++) add(head, s, s + 1, s);
  }
  // Computes the gradients of the states before segments 1, 2, .. from that of the last one.
  void scan_backward() {
    x.sweep(isa().backward, 1, x.segments - 1, x.c.m, false, [&](int64_t head, int64_t s) -> Ends {
      find_transition(head, s);
      return {.angle_in = angle_at(head, s), .dkv_out = kv_at(head, s), .dz_out = z_at(head, s)};
    });
    for (int64_t head = 0; head < x.heads(); head++)
      for (int64_t s = x.segments - 1; s > 0; s--) add(head, s + 1, s, s);
  }
};

// Zeros the rows of tokens outside all packed sequences
inline void zero_outside(const Schedule& x, const Tensor& out) {
  if (x.bounds.empty()) return;
  const int64_t row = out.size(1) ? out.numel() / out.size(1) * (int64_t)out.element_size() : 0;
  const auto zero = [&](int64_t first, int64_t last) {
    if (last > first) memset((char*)out.data_ptr() + first * row, 0, (last - first) * row);
  };
  zero(0, x.bounds.front());
  zero(x.bounds.back(), x.c.m);
}

inline void run_forward(const Schedule& x, const StateOut& to) {
  const Call& c = x.c;
  const bool saves = c.save && c.causal;
  const auto last_state = [&](int64_t head) { return to.at(x, x.row(head)); };
  if (c.causal && x.segments == 1)
    return x.sweep(isa().forward, 0, 1, c.m, c.q.data, [&](int64_t i, int64_t) -> Ends {
      return {.kv_in = x.kv(i), .z_in = x.z(i), .kv_out = last_state(i).kv, .z_out = last_state(i).z, .save = saves};
    });
  SegmentStates states(x);
  states.sum_angles();
  for (int64_t head = 0; head < x.heads(); head++) states.set(head, 0, x.kv(head), x.z(head));
  const bool all_keys = !c.causal || !c.q.data;
  states.scan_forward(all_keys);
  for (int64_t head = 0; all_keys && head < x.heads(); head++) states.copy(head, x.segments, last_state(head));
  if (!c.q.data && !saves) return;
  const auto sweep = c.causal ? isa().forward : isa().bidirectional;
  x.sweep(sweep, 0, x.segments, c.n, c.q.data, [&](int64_t head, int64_t s) -> Ends {
    const int64_t from = c.causal ? s : x.segments;
    const StateOut last = c.causal && s == x.segments - 1 ? last_state(head) : StateOut{};
    return {.kv_in = states.kv_at(head, from), .z_in = states.z_at(head, from), .kv_out = last.kv, .z_out = last.z,
            .save = saves, .angle_in = states.angle_at(head, s)};
  });
}

// The number of heads that add to the same rows of dq and dk: all that share them, or fewer to keep kMinTasks tasks
inline int64_t heads_per_gradient(const Call& c) {
  int64_t parts = 1;
  const int64_t rows = c.sequences * (c.g / c.value_group);
  while (parts < c.value_group && (c.value_group % parts || rows * parts < kMinTasks)) parts++;
  return c.value_group / parts;
}

// Causal, sequences not cut: no states of segments are required
inline void run_backward_whole(const Schedule& x, const StateOut& to) {
  std::vector<double> sums(x.heads() * x.c.pairs);
  x.sweep(isa().backward, 0, 1, x.c.m, true, [&](int64_t i, int64_t) -> Ends {
    return {.kv_in = x.kv(i), .z_in = x.z(i), .dkv_in = x.g_kv(i), .dz_in = x.g_z(i), .dkv_out = to.at(x, i).kv,
            .dz_out = to.at(x, i).z, .sums = sums.data() + i * x.c.pairs};
  });
}

// The gradients of angle steps are running sums within segments: adds the totals of all later segments.
// sums (tasks, pairs)
inline void add_later_steps(const Schedule& x, std::vector<double>& sums) {
  const Call& c = x.c;
  for (int64_t head = 0; head < x.heads(); head++)
    for (int64_t s = x.segments - 2; s >= 0; s--) {
      double *task_sums = &sums[(head * x.segments + s) * c.pairs], *later_sums = task_sums + c.pairs;
      const Span span = x.span(head * x.segments + s, c.m);
      const int64_t batch = c.cu_seqlens.data ? 0 : span.sequence;
      for (int64_t t = span.begin; t < span.end; t++) {
        const int64_t key = (batch * c.m + t) * c.g + span.head;
        for (int64_t p = 0; p < c.pairs; p++) c.d_angle_steps[key * c.pairs + p] += (float)later_sums[p];
      }
      for (int64_t p = 0; p < c.pairs; p++) task_sums[p] += later_sums[p];
    }
}

// Bidirectional: dq, from the state of all keys, and the gradient of that state
inline void sweep_bidirectional_queries(SegmentStates& states, SegmentStates& gradients) {
  const Schedule& x = states.x;
  const int64_t S = x.segments;
  states.scan_forward(true);
  x.sweep(isa().bidirectional_backward, 0, S, x.c.n, true, [&](int64_t head, int64_t s) -> Ends {
    return {.kv_in = states.kv_at(head, S), .z_in = states.z_at(head, S), .angle_in = states.angle_at(head, s),
            .dkv_out = gradients.kv_at(head, s), .dz_out = gradients.z_at(head, s)};
  });
  for (int64_t head = 0; head < x.heads(); head++)
    for (int64_t s = 0; s < S; s++) gradients.add(head, s, S, s);
}

inline void run_backward(const Schedule& x, const StateOut& to) {
  const Call& c = x.c;
  if (c.causal && x.segments == 1) return run_backward_whole(x, to);
  const int64_t S = x.segments;
  SegmentStates states(x), gradients(x);
  std::vector<double> sums(x.tasks() * c.pairs);
  states.sum_angles();
  gradients.angle = states.angle;
  for (int64_t head = 0; head < x.heads(); head++) {
    states.set(head, 0, x.kv(head), x.z(head));
    gradients.set(head, S, x.g_kv(head), x.g_z(head));
  }
  if (c.causal) gradients.scan_backward();
  else if (c.dout.data) sweep_bidirectional_queries(states, gradients);
  for (int64_t head = 0; !c.causal && head < x.heads(); head++) gradients.copy(head, S, to.at(x, head));
  x.sweep(isa().backward, 0, S, c.m, true, [&](int64_t head, int64_t s) -> Ends {
    const int64_t after = c.causal ? s + 1 : S;
    const StateOut first = c.causal && s == 0 ? to.at(x, head) : StateOut{};
    return {.kv_in = x.kv(head), .z_in = x.z(head), .angle_in = states.angle_at(head, s),
            .dkv_in = gradients.kv_at(head, after), .dz_in = gradients.z_at(head, after), .dkv_out = first.kv,
            .dz_out = first.z, .sums = sums.data() + (head * S + s) * c.pairs};
  });
  if (S > 1 && c.d_angle_steps) add_later_steps(x, sums);
}

}  // namespace linrope
