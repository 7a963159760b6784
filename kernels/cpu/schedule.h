// Which tasks there are, and in which parallel regions they run. A task is a sequence and a key/value head; where
// there are few of them, long sequences are cut into segments: first the states of the segments alone, then their
// sums, then every segment from the sum before it. The cut depends on the call's shape only, so that the bits of a
// result do not depend on the number of threads.
#pragma once
#include <cstring>
#include <memory>

#include "arguments.h"

namespace linrope {

constexpr int64_t kTasks = 8, kSegment = 1024;  // cut if there are fewer tasks, into no shorter segments
constexpr int64_t kSmall = 16384;               // numbers below which a call stays on its thread

struct Schedule {
  const Call& c;
  int64_t segments = 1, state, sums;
  std::vector<int64_t> bounds;  // of packed sequences

  explicit Schedule(const Call& c) : c(c), state((int64_t)c.f * c.e), sums(c.f) {
    if (c.cu_seqlens) {
      int64_t last = 0;
      for (int64_t i = 0; i <= c.sequences; i++) {
        const int64_t x = c.cu_wide ? ((const int64_t*)c.cu_seqlens)[i] : ((const int32_t*)c.cu_seqlens)[i];
        bounds.push_back(last = x < last ? last : x > c.m ? c.m : x);
      }
    }
    const int64_t heads = c.sequences * c.g, longest = c.m > c.n ? c.m : c.n;
    if (heads > 0 && heads < kTasks) segments = (kTasks + heads - 1) / heads;
    const int64_t most = longest / kSegment / (c.cu_seqlens && c.sequences ? c.sequences : 1);
    if (segments > most) segments = most > 1 ? most : 1;
  }
  int64_t heads() const { return c.sequences * c.g; }
  int64_t tasks() const { return heads() * segments; }

  // Task i of a side (queries or keys) of n tokens per batch row
  Span span(int64_t i, int64_t n) const {
    const int64_t segment = i % segments, head = i / segments, sequence = head / c.g;
    const int64_t begin = bounds.empty() ? 0 : bounds[sequence], end = bounds.empty() ? n : bounds[sequence + 1];
    const int64_t length = ((end - begin + segments - 1) / segments + kChunk - 1) / kChunk * kChunk;
    const auto cut = [&](int64_t s) { return begin + s * length < end ? begin + s * length : end; };
    return {sequence, head % c.g, cut(segment), segment == segments - 1 ? end : cut(segment + 1),
            segment == segments - 1};
  }
  template <class F> void run(int64_t count, F task) const {
    const int64_t tokens = c.sequences * (c.m > c.n ? c.m : c.n);
    if (count <= 1 || (c.cu_seqlens ? c.m : tokens) * c.h * (c.f + c.e) < kSmall)
      for (int64_t i = 0; i < count; i++) task(i);
    else
      torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) task(i);
      });
  }
  // A sweep over segments [0, count) + first of all heads: ends(head, segment) for each. Heads are bundled as far as
  // that leaves every thread a task; each head's numbers are the same in any bundle.
  template <class F> void sweep(Sweep* sweep, int64_t first, int64_t count, int64_t n, bool emit, F ends) const {
    const int64_t threads = torch::stable::get_num_threads(), fair = tasks() / (threads > 0 ? threads : 1);
    int64_t bundle = fair < 1 ? 1 : fair < kBundle ? fair : kBundle;
    if (bundle > c.g) bundle = c.g;
    if (bundle < 1 || c.sequences < 1) return;
    const int64_t bundles = (c.g + bundle - 1) / bundle;
    run(c.sequences * bundles * count, [&](int64_t i) {
      const int64_t segment = first + i % count, sequence = i / count / bundles, begin = i / count % bundles * bundle;
      const int64_t end = begin + bundle < c.g ? begin + bundle : c.g;
      Span spans[kBundle];
      Ends each[kBundle];
      for (int64_t g = begin; g < end; g++) {
        const int64_t head = sequence * c.g + g;
        spans[g - begin] = span(head * segments + segment, n), each[g - begin] = ends(head, segment);
      }
      sweep(c, (int)(end - begin), spans, each, emit);
    });
  }
  // The row of the state that the caller gave, or null
  int64_t row(int64_t head) const {
    const int64_t sequence = head / c.g;
    return (c.slots ? c.slots[sequence] : sequence) * c.g + head % c.g;
  }
  const float* kv(int64_t head) const { return c.kv ? c.kv + row(head) * state : nullptr; }
  const double* z(int64_t head) const { return c.z ? c.z + row(head) * sums : nullptr; }
};

// States at the cuts of each sequence and head: number s is the one before segment s
struct Cuts {
  const Schedule& x;
  std::vector<float> kv;
  std::vector<double> z, decay;
  std::vector<int64_t> angle;

  explicit Cuts(const Schedule& x) : x(x) {
    const int64_t count = x.heads() * (x.segments + 1);
    kv.resize(count * x.state), z.resize(count * x.sums), decay.resize(x.tasks());
  }
  int64_t at(int64_t head, int64_t s) const { return head * (x.segments + 1) + s; }
  float* kv_at(int64_t head, int64_t s) { return &kv[at(head, s) * x.state]; }
  double* z_at(int64_t head, int64_t s) { return &z[at(head, s) * x.sums]; }
  const int64_t* angle_at(int64_t head, int64_t s) {
    return angle.empty() ? nullptr : &angle[at(head, s) * x.c.pairs];
  }
  void put(int64_t head, int64_t s, const float* from_kv, const double* from_z) {
    if (from_kv) memcpy(kv_at(head, s), from_kv, 4 * x.state);
    if (from_z) memcpy(z_at(head, s), from_z, 8 * x.sums);
  }
  // Sums of the angle steps before each segment
  void sum_angles() {
    if (!x.c.angle_steps.data) return;
    angle.assign(x.heads() * (x.segments + 1) * x.c.pairs, 0);
    if (x.segments == 1) return;
    x.run(x.tasks(), [&](int64_t i) {
      isa().sum_steps(x.c, x.span(i, x.c.m), &angle[at(i / x.segments, i % x.segments + 1) * x.c.pairs]);
    });
    for (int64_t head = 0; head < x.heads(); head++)
      for (int64_t s = 1; s < x.segments; s++)
        for (int64_t p = 0; p < x.c.pairs; p++) {
          int64_t& sum = angle[at(head, s + 1) * x.c.pairs + p];
          sum = (int64_t)((uint64_t)sum + (uint64_t)angle[at(head, s) * x.c.pairs + p]);
        }
  }
  // to += from as seen across segment s
  void add(int64_t head, int64_t from, int64_t to, int64_t segment) {
    float *a = kv_at(head, from), *b = kv_at(head, to);
    double *p = z_at(head, from), *q = z_at(head, to);
    std::vector<float> faded(a, a + x.state);
    std::vector<double> faded_z(p, p + x.sums);
    isa().fade(decay[head * x.segments + segment], x.state, faded.data(), x.sums, faded_z.data());
    for (int64_t i = 0; i < x.state; i++) b[i] += faded[i];
    for (int64_t i = 0; i < x.sums; i++) q[i] += faded_z[i];
  }
  // Fills in the states before segments 1, 2, ..; with `all`, the one after the last too
  void scan_forward(bool all) {
    const int64_t count = all ? x.segments : x.segments - 1;
    if (count == 0) return;
    x.sweep(isa().forward, 0, count, x.c.m, false, [&](int64_t head, int64_t s) -> Ends {
      decay[head * x.segments + s] = isa().sum_decay(x.c, x.span(head * x.segments + s, x.c.m));
      return {nullptr, nullptr, kv_at(head, s + 1), z_at(head, s + 1), angle_at(head, s), nullptr};
    });
    for (int64_t head = 0; head < x.heads(); head++)
      for (int64_t s = 0; s < count; s++) add(head, s, s + 1, s);
  }
};

inline void zero_rows(const Schedule& x, const Tensor& out, int64_t first, int64_t last) {
  const int64_t row = out.size(1) ? out.numel() / out.size(1) * (int64_t)out.element_size() : 0;
  if (last > first) memset((char*)out.data_ptr() + first * row, 0, (last - first) * row);
}
// Tokens that lie in no packed sequence
inline void zero_outside(const Schedule& x, const Tensor& out) {
  if (x.bounds.empty()) return;
  zero_rows(x, out, 0, x.bounds.front()), zero_rows(x, out, x.bounds.back(), x.c.m);
}

inline void run_forward(const Schedule& x, float* kv_out, double* z_out) {
  const Call& c = x.c;
  const auto last_kv = [&](int64_t head) { return kv_out ? kv_out + (c.slots ? x.row(head) : head) * x.state : nullptr; };
  const auto last_z = [&](int64_t head) { return z_out ? z_out + (c.slots ? x.row(head) : head) * x.sums : nullptr; };
  if (c.causal && x.segments == 1)
    return x.sweep(isa().forward, 0, 1, c.m, c.q.data, [&](int64_t i, int64_t) -> Ends {
      return {x.kv(i), x.z(i), last_kv(i), last_z(i), nullptr, nullptr};
    });
  Cuts cuts(x);
  cuts.sum_angles();
  for (int64_t head = 0; head < x.heads(); head++) cuts.put(head, 0, x.kv(head), x.z(head));
  const bool all = !c.causal || !c.q.data;
  cuts.scan_forward(all);
  if (all)
    for (int64_t head = 0; head < x.heads(); head++) {
      if (kv_out) memcpy(last_kv(head), cuts.kv_at(head, x.segments), 4 * x.state);
      if (z_out) memcpy(last_z(head), cuts.z_at(head, x.segments), 8 * x.sums);
    }
  if (!c.q.data) return;
  x.sweep(c.causal ? isa().forward : isa().answer, 0, x.segments, c.n, true, [&](int64_t head, int64_t s) -> Ends {
    const int64_t from = c.causal ? s : x.segments;
    const bool last = c.causal && s == x.segments - 1;
    return {cuts.kv_at(head, from), cuts.z_at(head, from), last ? last_kv(head) : nullptr,
            last ? last_z(head) : nullptr, cuts.angle_at(head, s), nullptr};
  });
}

// The gradient's outputs beside those in the call: of the first state, or null
struct StateGradient {
  float* kv;
  double* z;
};

// <S, dS> + <z, dz>: the gradient of the log decay of the token after that state
inline double product(const Schedule& x, const float* kv, const double* z, const float* g_kv, const double* g_z) {
  double s = 0;
  for (int64_t i = 0; g_kv && i < x.state; i++) s += (double)kv[i] * g_kv[i];
  for (int64_t i = 0; g_z && i < x.sums; i++) s += z[i] * g_z[i];
  return s;
}

// Room for the anchors of all tasks, where the gradient of log decay is wanted
struct Anchors {
  size_t each = 0;
  std::vector<int64_t> first;
  std::unique_ptr<char[]> room;
  explicit Anchors(const Schedule& x) {
    if (!x.c.causal || !x.c.d_log_decay) return;
    int64_t count = 0;
    for (int64_t i = 0; i < x.tasks(); i++) {
      const Span span = x.span(i, x.c.m);
      first.push_back(count);
      if (span.end > span.begin) count += (span.end - span.begin - 1) / kBlock;
    }
    each = isa().anchor_bytes(x.c), room.reset(new char[count * each + 1]);
  }
  char* of(int64_t task) const { return room ? room.get() + first[task] * each : nullptr; }
};

// Causal, every sequence whole: no state is kept but those that the gradient of log decay needs, anchors and the last
inline void run_backward_whole(const Schedule& x, const StateGradient& to) {
  const Call& c = x.c;
  const bool ends = c.d_log_decay && (c.g_kv || c.g_z);
  const int64_t width = 1 + c.pairs;
  std::vector<float> kv(ends ? x.heads() * x.state : 0);
  std::vector<double> z(ends ? x.heads() * x.sums : 0), sums(x.heads() * width);
  const Anchors anchors(x);
  if (c.grad.data || ends)
    x.sweep(c.grad.data ? isa().backward_queries : isa().forward, 0, 1, c.m, c.grad.data, [&](int64_t i, int64_t) -> Ends {
      return {x.kv(i), x.z(i), ends ? &kv[i * x.state] : nullptr, ends ? &z[i * x.sums] : nullptr, nullptr, nullptr, anchors.of(i)};
    });
  x.sweep(isa().backward_keys, 0, 1, c.m, true, [&](int64_t i, int64_t) -> Ends {
    double* own = &sums[i * width];
    const float* g_kv = c.g_kv ? c.g_kv + i * x.state : nullptr;
    const double* g_z = c.g_z ? c.g_z + i * x.sums : nullptr;
    if (ends) own[0] = product(x, &kv[i * x.state], &z[i * x.sums], g_kv, g_z);
    return {g_kv, g_z, to.kv ? to.kv + i * x.state : nullptr, to.z ? to.z + i * x.sums : nullptr, nullptr, own,
            anchors.of(i)};
  });
}

inline void run_backward(const Schedule& x, const StateGradient& to) {
  const Call& c = x.c;
  if (c.causal && x.segments == 1) return run_backward_whole(x, to);
  const int64_t S = x.segments, width = 1 + c.pairs;
  const bool queries = c.grad.data;
  const bool ends = c.d_log_decay && (c.g_kv || c.g_z);  // then the last state is needed
  Cuts forth(x), back(x);
  std::vector<double> sums(x.tasks() * width);
  const Anchors anchors(x);
  forth.sum_angles();
  for (int64_t head = 0; head < x.heads(); head++) {
    forth.put(head, 0, x.kv(head), x.z(head));
    back.put(head, S, c.g_kv ? c.g_kv + head * x.state : nullptr, c.g_z ? c.g_z + head * x.sums : nullptr);
  }
  if (queries || ends) forth.scan_forward(!c.causal || (ends && !queries));
  if (!c.causal && queries) {  // the gradient of the state of all keys, from all queries
    x.sweep(isa().answer_backward, 0, S, c.n, true, [&](int64_t head, int64_t s) -> Ends {
      return {forth.kv_at(head, S), forth.z_at(head, S), back.kv_at(head, s), back.z_at(head, s),
              forth.angle_at(head, s), nullptr};
    });
    for (int64_t head = 0; head < x.heads(); head++)
      for (int64_t s = 0; s < S; s++) back.add(head, s, S, s);
  }
  if (c.causal && queries)
    x.sweep(isa().backward_queries, 0, S, c.m, true, [&](int64_t head, int64_t s) -> Ends {
      const bool last = ends && s == S - 1;
      return {c.kv || s ? forth.kv_at(head, s) : nullptr, forth.z_at(head, s), last ? forth.kv_at(head, S) : nullptr,
              last ? forth.z_at(head, S) : nullptr, forth.angle_at(head, s), nullptr, anchors.of(head * S + s)};
    });
  if (c.causal && !queries && c.d_log_decay)  // the states before segments are there: now those between
    x.sweep(isa().forward, 0, S, c.m, false, [&](int64_t head, int64_t s) -> Ends {
      return {forth.kv_at(head, s), forth.z_at(head, s), nullptr, nullptr, forth.angle_at(head, s), nullptr,
              anchors.of(head * S + s)};
    });
  if (c.causal && S > 1) {
    x.sweep(isa().backward_keys, 1, S - 1, c.m, false, [&](int64_t head, int64_t s) -> Ends {
      forth.decay[head * S + s] = isa().sum_decay(c, x.span(head * S + s, c.m));
      return {nullptr, nullptr, back.kv_at(head, s), back.z_at(head, s), forth.angle_at(head, s), nullptr};
    });
    back.decay = forth.decay;
    for (int64_t head = 0; head < x.heads(); head++)
      for (int64_t s = S - 1; s > 0; s--) back.add(head, s + 1, s, s);
  }
  if (!c.causal)
    for (int64_t head = 0; head < x.heads(); head++) {
      if (to.kv) memcpy(to.kv + head * x.state, back.kv_at(head, S), 4 * x.state);
      if (to.z) memcpy(to.z + head * x.sums, back.z_at(head, S), 8 * x.sums);
    }
  x.sweep(isa().backward_keys, 0, S, c.m, true, [&](int64_t head, int64_t s) -> Ends {
    double* own = &sums[(head * S + s) * width];
    const int64_t after = c.causal ? s + 1 : S;
    if (c.causal && c.d_log_decay && (ends || s < S - 1))
      own[0] = product(x, forth.kv_at(head, after), forth.z_at(head, after), back.kv_at(head, after),
                       back.z_at(head, after));
    const bool first = c.causal && s == 0;
    return {back.kv_at(head, after), back.z_at(head, after), first && to.kv ? to.kv + head * x.state : nullptr,
            first && to.z ? to.z + head * x.sums : nullptr, forth.angle_at(head, s), own, anchors.of(head * S + s)};
  });
  if (S == 1 || !c.d_angle_steps) return;
  // The angles' sums ran within segments: what later segments hold comes on top
  for (int64_t head = 0; head < x.heads(); head++)
    for (int64_t s = S - 2; s >= 0; s--) {
      double *own = &sums[(head * S + s) * width], *later = own + width;
      const Span span = x.span(head * S + s, c.m);
      const int64_t batch = c.cu_seqlens ? 0 : span.sequence;
      for (int64_t t = span.begin; t < span.end; t++) {
        const int64_t key = (batch * c.m + t) * c.g + span.head;
        for (int64_t p = 0; p < c.pairs; p++) c.d_angle_steps[key * c.pairs + p] += (float)later[1 + p];
      }
      for (int64_t p = 1; p < width; p++) own[p] += later[p];
    }
}

}  // namespace linrope
