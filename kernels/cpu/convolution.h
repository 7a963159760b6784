// The causal convolution of each channel: y_i = act(bias + sum_t weight_t x_(i - taps + 1 + t)), and its gradients.
//
// A block of tokens is computed for a vector of channels at a time, so that weights, inputs and sums stay in registers.
// The backward sweep goes from the last token to the first: dx_i takes da_i .. da_(i + taps - 1), with a = y before act.
#pragma once
#include "arena.h"
#include "partial.h"

namespace linrope {
namespace {

constexpr int kTokensAtOnce = 8;  // that a pass computes together; not the kBlock of call.h

// The rows of one sequence, tokens [first, end) of a batch row
template <class T> struct Sequence {
  const Convolution& c;
  int64_t batch, index, first, end;
  const T* zeros;

  const T* x(int64_t token) const {
    if (token >= first) return (const T*)c.x.data + batch * c.x.batch + token * c.x.token;
    if (!c.before.data) return zeros;
    const int64_t row = c.slots ? c.slots[index] : index;
    return (const T*)c.before.data + row * c.before.batch + (c.taps - 1 + token - first) * c.before.token;
  }
  T* at(const View& view, int64_t token) const { return (T*)view.data + batch * view.batch + token * view.token; }
};

// Calls f(sequence, begin, end) for the parts of sequences among the tokens [begin, end) of a batch row
template <class T, class F>
void for_sequences(const Convolution& c, int64_t batch, int64_t begin, int64_t end, const T* zeros, F f) {
  if (!c.bounds) return f(Sequence<T>{c, batch, batch, 0, c.n, zeros}, begin, end);
  int64_t low = 0, high = c.sequences;  // the last sequence that starts at `begin` or before it
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    (c.bounds[middle] <= begin ? low : high) = middle;
  }
  for (int64_t s = low; s < c.sequences && c.bounds[s] < end; s++) {
    const int64_t first = c.bounds[s], last = c.bounds[s + 1];
    const int64_t from = first > begin ? first : begin, to = last < end ? last : end;
    if (from < to) f(Sequence<T>{c, 0, s, first, last, zeros}, from, to);
  }
}

template <class T, int TAPS> struct ForwardBlock {
  const Convolution& c;
  const T* x[kTokensAtOnce + kMaxTaps - 1];  // the rows of the taps - 1 tokens before the block and of its tokens
  T* y[kTokensAtOnce];
  int64_t ahead;  // from a row to the one that the next block reads in its place, in elements

  template <int N, bool PART> void channels(const int64_t begin, const int64_t end) const {
    const int taps = TAPS ? TAPS : c.taps;
    const int64_t stride = c.stride, next = ahead;
    const float* const weight = c.weight;
    const bool silu = c.silu;
    const T* rows[N + kMaxTaps - 1];
    T* to[N];
    for (int r = 0; r < N + taps - 1; r++) rows[r] = x[r];
    for (int i = 0; i < N; i++) to[i] = y[i];
    for (int64_t j = begin; j < end; j += W) {
      const int count = PART ? (int)(end - j) : W;
      vf in[N + kMaxTaps - 1], w[kMaxTaps];
      const vf bias = load(weight + taps * stride + j);
      for (int t = 0; t < taps; t++) w[t] = load(weight + t * stride + j);
      for (int r = 0; r < taps - 1; r++) in[r] = load_lanes<PART>(rows[r] + j, count);
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        in[i + taps - 1] = load_lanes<PART>(rows[i + taps - 1] + j, count);
        __builtin_prefetch(rows[i + taps - 1] + next + j, 0, 2);
        vf a = bias;
        for (int t = 0; t < taps; t++) a += w[t] * in[i + t];
        store_lanes<PART>(to[i] + j, silu ? Silu(a).y : a, count);
      }
    }
  }
  template <int N> void run() const {
    const int64_t whole = c.c / W * W;
    channels<N, false>(0, whole);
    if (whole < c.c) channels<N, true>(whole, c.c);
  }
};

template <class T, int TAPS> void convolve_tokens(const Convolution& c, int64_t batch, int64_t begin, int64_t end) {
  struct Scratch {
    T* zeros;
    Scratch(Arena& arena, int64_t channels) : zeros(arena.take<T>(channels)) {}
  };
  T* zeros = lay_out<Scratch>(c.stride).zeros;
  memset(zeros, 0, c.stride * sizeof(T));
  for_sequences(c, batch, begin, end, zeros, [&](const Sequence<T>& sequence, int64_t from, int64_t to) {
    ForwardBlock<T, TAPS> block{c, {}, {}, kTokensAtOnce * c.x.token};
    const auto run = [&]<int N>(int64_t token) {
      for (int r = 0; r < N + c.taps - 1; r++) block.x[r] = sequence.x(token - c.taps + 1 + r);
      for (int i = 0; i < N; i++) block.y[i] = sequence.at(c.y, token + i);
      block.template run<N>();
    };
    for (; from + kTokensAtOnce <= to; from += kTokensAtOnce) run.template operator()<kTokensAtOnce>(from);
    for (; from < to; from++) run.template operator()<1>(from);
  });
}

template <class T, int TAPS> struct BackwardBlock {
  const Convolution& c;
  const T* x[kTokensAtOnce + kMaxTaps - 1];
  const T* dy[kTokensAtOnce];
  T* dx[kTokensAtOnce];
  float* later;  // (taps - 1, stride): da of the tokens after the block, then of the block's first tokens
  float* sums;   // (taps + 1, stride): the gradients of weight and bias
  int64_t x_ahead, dy_ahead;

  template <int N, bool PART> void channels(const int64_t begin, const int64_t end) const {
    const int taps = TAPS ? TAPS : c.taps;
    const int64_t stride = c.stride, next_x = x_ahead, next_dy = dy_ahead;
    const float* const weight = c.weight;
    float *const after = later, *const to_sums = sums;
    const bool silu = c.silu;
    const T *rows[N + kMaxTaps - 1], *from[N];
    T* to[N];
    for (int r = 0; r < N + taps - 1; r++) rows[r] = x[r];
    for (int i = 0; i < N; i++) {
      from[i] = dy[i];
      to[i] = dx[i];
    }
    for (int64_t j = begin; j < end; j += W) {
      const int count = PART ? (int)(end - j) : W;
      vf in[N + kMaxTaps - 1], da[N + kMaxTaps - 1], w[kMaxTaps], dw[kMaxTaps] = {}, dbias = {};
      const vf bias = load(weight + taps * stride + j);
      for (int t = 0; t < taps; t++) w[t] = load(weight + t * stride + j);
      for (int t = 0; t < taps - 1; t++) {
        da[N + t] = load(after + t * stride + j);
        in[N + t] = load_lanes<PART>(rows[N + t] + j, count);
      }
#pragma GCC unroll 8
      for (int i = N - 1; i >= 0; i--) {
        __builtin_prefetch(rows[i + taps - 1] + next_x + j, 0, 2);
        __builtin_prefetch(from[i] + next_dy + j, 0, 2);
        in[i] = load_lanes<PART>(rows[i] + j, count);
        vf g = load_lanes<PART>(from[i] + j, count);
        if (silu) {
          vf a = bias;
          for (int t = 0; t < taps; t++) a += w[t] * in[i + t];
          g *= Silu(a).slope();
        }
        da[i] = g;
        dbias += g;
        vf d = {};
        for (int t = 0; t < taps; t++) d += w[taps - 1 - t] * da[i + t];
        for (int t = 0; t < taps; t++) dw[t] += g * in[i + t];
        store_lanes<PART>(to[i] + j, d, count);
      }
      for (int t = 0; t < taps - 1; t++) store(after + t * stride + j, da[t]);
      for (int t = 0; t < taps; t++) store(to_sums + t * stride + j, load(to_sums + t * stride + j) + dw[t]);
      store(to_sums + taps * stride + j, load(to_sums + taps * stride + j) + dbias);
    }
  }
  template <int N> void run() const {
    const int64_t whole = c.c / W * W;
    channels<N, false>(0, whole);
    if (whole < c.c) channels<N, true>(whole, c.c);
  }
};

template <class T> struct BackwardScratch {
  T *zeros, *unused;
  float *later, *unused_sums;
  BackwardScratch(Arena& arena, int64_t taps, int64_t stride)
      : zeros(arena.take<T>(stride)), unused(arena.take<T>(stride)), later(arena.take<float>((taps - 1) * stride)),
        unused_sums(arena.take<float>((taps + 1) * stride)) {}
};

template <class T, int TAPS>
void convolve_tokens_backward(const Convolution& c, int64_t batch, int64_t begin, int64_t end, float* sums) {
  const int64_t taps = c.taps;
  const auto scratch = lay_out<BackwardScratch<T>>(taps, c.stride);
  T *zeros = scratch.zeros, *unused = scratch.unused;
  float *later = scratch.later, *unused_sums = scratch.unused_sums;
  memset(zeros, 0, c.stride * sizeof(T));
  memset(unused_sums, 0, (taps + 1) * c.stride * 4);
  for_sequences(c, batch, begin, end, zeros, [&](const Sequence<T>& sequence, int64_t from, int64_t to) {
    BackwardBlock<T, TAPS> block{c, {}, {}, {}, later, sums, -kTokensAtOnce * c.x.token, -kTokensAtOnce * c.dy.token};
    const auto run = [&]<int N>(int64_t token) {
      for (int r = 0; r < N + taps - 1; r++) block.x[r] = sequence.x(token - taps + 1 + r);
      for (int i = 0; i < N; i++) block.dy[i] = sequence.at(c.dy, token + i);
      block.template run<N>();
    };
    // da of the tokens after `to`, which another call differentiates
    memset(later, 0, (taps - 1) * c.stride * 4);
    block.sums = unused_sums;
    block.dx[0] = unused;
    int64_t token = to + taps - 1 < sequence.end ? to + taps - 1 : sequence.end;
    while (token > to) run.template operator()<1>(--token);
    block.sums = sums;
    while (token > from) {
      const int64_t count = token - from >= kTokensAtOnce ? kTokensAtOnce : 1;
      token -= count;
      for (int i = 0; i < count; i++) block.dx[i] = sequence.at(c.dx, token + i);
      if (count == kTokensAtOnce) run.template operator()<kTokensAtOnce>(token);
      else run.template operator()<1>(token);
    }
    if (from > sequence.first || !c.d_before.data) return;
    // The inputs before the sequence: tokens whose own da is zero
    block.sums = unused_sums;
    block.dy[0] = zeros;
    for (int r = 0; r < taps; r++) block.x[r] = zeros;
    for (int64_t i = taps - 2; i >= 0; i--) {
      block.dx[0] = (T*)c.d_before.data + sequence.index * c.d_before.batch + i * c.d_before.token;
      block.template run<1>();
    }
  });
}

void convolve(const Convolution& c, int64_t batch, int64_t begin, int64_t end) {
  with_type(c.type, [&]<class T>() {
    if (c.taps == 4) convolve_tokens<T, 4>(c, batch, begin, end);
    else convolve_tokens<T, 0>(c, batch, begin, end);
  });
}
void convolve_backward(const Convolution& c, int64_t batch, int64_t begin, int64_t end, float* sums) {
  with_type(c.type, [&]<class T>() {
    if (c.taps == 4) convolve_tokens_backward<T, 4>(c, batch, begin, end, sums);
    else convolve_tokens_backward<T, 0>(c, batch, begin, end, sums);
  });
}

}  // namespace
}  // namespace linrope
