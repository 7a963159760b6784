// Conversion of features, values and states between the caller's layout and that of the kernels.
//
// Whatever the caller's layout, the kernels keep a row of features in this order: the first members of the pairs, then
// the second members, each padded with zeros to whole vectors; then the features that do not rotate. Together F
// numbers. If that makes rows shorter, the features that do not rotate form pairs too, whose angle is 0; of an odd
// number the last one has no partner. A row that fits in one vector keeps the caller's order: a permutation then finds
// each feature's partner.
#pragma once
#include "partial.h"
#include "core.h"

namespace linrope {
namespace {

// The rotation of rows that are one vector, in the caller's order
struct CompactRotation {
  vi partner, pair;  // of each feature; -1: no pair
  vf sign;           // -1 for the first members of pairs, 1 for the second ones
  CompactRotation(int pairs, bool interleaved) {
    for (int i = 0; i < W; i++) {
      const bool first = interleaved ? i % 2 == 0 : i < pairs;
      const int distance = interleaved ? 1 : pairs;
      pair[i] = i >= 2 * pairs ? -1 : interleaved ? i / 2 : i % pairs;
      partner[i] = first ? i + distance : i - distance;
      sign[i] = first ? -1 : 1;
    }
  }
  // cos and sin: of the pairs
  LINROPE_INLINE vf operator()(vf x, const float* cos, const float* sin, bool transposed) const {
    const vf c = permute(load(cos), pair), n = permute(load(sin), pair) * sign;
    const vf y = x * c + permute(x, partner) * (transposed ? -n : n);
    return pair >= 0 ? y : x;
  }
};

struct Shape {
  int f, pairs, e, layout, map, axes;
  bool per_unit;             // log decay is per unit
  bool compact;              // true if the features fit in one vector; they then keep the caller's order
  int stored;                // pairs in a row, including those of angle 0
  int half, rest;            // `stored` rounded up to whole vectors; features outside of pairs
  RowLayout feature_row, value_row;
  int F, E;                  // their sizes
  int pair_stride, partner;  // pair p: the features p * pair_stride and p * pair_stride + partner
  CompactRotation rotation;
  explicit Shape(const Call& c)
      : f((int)c.f), pairs(c.layout == kNone ? 0 : (int)c.pairs), e((int)c.e), layout((int)c.layout), map((int)c.map),
        axes(c.theta.data ? (int)c.axes : 0), per_unit(c.log_decay.data && c.units > 1), compact(f <= W),
        stored(stored_pairs()), half(round_up(stored, W)), rest(stored == pairs ? f - 2 * pairs : 0),
        feature_row(row_layout(compact ? f : 2 * half + rest)), value_row(row_layout(e)), F(feature_row.size),
        E(value_row.size), pair_stride(compact && layout == kInterleaved ? 2 : 1),
        partner(!compact ? half : layout == kInterleaved ? 1 : pairs),
        rotation(compact ? pairs : 0, layout == kInterleaved) {}
  bool padded() const { return F != f; }
  // True if a row is the caller's without padding, at most with its interleaved pairs split into their members
  bool plain() const { return !padded() && (stored == pairs || layout == kInterleaved); }
  int whole() const { return stored < f / 2 ? stored : f / 2; }  // stored pairs of two features
  int caller_index(int i) const {  // the caller's index of the kernels' feature i; -1: padding
    if (compact) return i < f ? i : -1;
    if (i >= 2 * half) return i - 2 * half < rest ? i - 2 * half + 2 * pairs : -1;
    const int second = i >= half, p = i - second * half;
    if (p >= (second ? whole() : stored)) return -1;
    if (layout == kInterleaved) return 2 * p + second;
    return p < pairs ? p + second * pairs : p + (second ? stored : pairs);
  }

 private:
  int stored_pairs() const {
    const auto size = [&](int stored, int rest) { return row_layout(2 * round_up(stored, W) + rest).size; };
    const int all = (f + 1) / 2;
    return pairs && !compact && size(all, 0) < size(pairs, f - 2 * pairs) ? all : pairs;
  }
};

struct Rows {  // the rows of one batch entry and head, indexed by token
  char* base;
  int64_t stride;
  int type;
  Rows(const View& x, int type, int64_t batch, int64_t head) : type(type) {
    const int64_t size = type == kFloat32 ? 4 : 2;
    base = x.data ? x.data + (batch * x.batch + head * x.head) * size : nullptr;
    stride = x.token * size;
  }
  char* at(int64_t token) const { return base + token * stride; }
};

// Before row x of many, `step` bytes apart, is read: brings the row after the next into the first cache
LINROPE_INLINE void fetch_near(const char* x, int64_t step, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(x + 2 * step + i, 0, 3);
}

template <class T> inline void copy_in(const T* x, float* y, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(y + i, load(x + i));
  for (; i < n; i++) y[i] = to_float(x[i]);
}
template <class T> inline void copy_out(const float* x, T* y, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(y + i, load(x + i));
  for (; i < n; i++) put(y + i, x[i]);
}

template <class T> void read_features(const Shape& s, const T* x, float* y) {
  if (s.layout == kInterleaved) {
    int p = 0;
    for (; p + W <= s.whole(); p += W) {
      vf a, b;
      load_pairs(x + 2 * p, a, b);
      store(y + p, a);
      store(y + s.half + p, b);
    }
    for (; p < s.whole(); p++) {
      y[p] = to_float(x[2 * p]);
      y[s.half + p] = to_float(x[2 * p + 1]);
    }
    if (p < s.stored) y[p] = to_float(x[2 * p]);
  } else if (s.layout == kHalf) {
    const int pairs = s.pairs;
    copy_in(x, y, pairs);
    copy_in(x + pairs, y + s.half, pairs);
    copy_in(x + 2 * pairs, y + pairs, s.stored - pairs);
    copy_in(x + pairs + s.stored, y + s.half + pairs, s.whole() - pairs);
  }
  copy_in(x + s.f - s.rest, y + 2 * s.half, s.rest);
}

template <class T> void write_features(const Shape& s, const float* y, T* x) {
  if (s.compact) return store_lanes<true>(x, load(y), s.f);
  if (s.layout == kInterleaved) {
    int p = 0;
    for (; p + W <= s.whole(); p += W) store_pairs(x + 2 * p, load(y + p), load(y + s.half + p));
    for (; p < s.whole(); p++) {
      put(x + 2 * p, y[p]);
      put(x + 2 * p + 1, y[s.half + p]);
    }
    if (p < s.stored) put(x + 2 * p, y[p]);
  } else if (s.layout == kHalf) {
    const int pairs = s.pairs;
    copy_out(y, x, pairs);
    copy_out(y + s.half, x + pairs, pairs);
    copy_out(y + pairs, x + 2 * pairs, s.stored - pairs);
    copy_out(y + s.half + pairs, x + pairs + s.stored, s.whole() - pairs);
  }
  copy_out(y + 2 * s.half, x + s.f - s.rest, s.rest);
}

inline void zero(float* x, int n) { memset(x, 0, 4 * (size_t)n); }

// A row that is one vector. Padding is zeroed because a map may change it.
template <class T> LINROPE_INLINE void read_compact(const Shape& s, const char* x, int map, float* y) {
  store(y, iota() < s.f ? apply(map, load_lanes<true>((const T*)x, s.f)) : vf{});
  for (int i = W; i < s.F; i += W) store(y + i, vf{});
}

// y = map(the row's features)
void features(const Shape& s, const Rows& rows, int64_t token, int map, float* y) {
  if (s.compact) return with_type(rows.type, [&]<class T>() { read_compact<T>(s, rows.at(token), map, y); });
  if (s.padded()) zero(y, s.F);
  const char* x = rows.at(token);
  if (rows.type == kFloat32) read_features(s, (const float*)x, y);
  else if (rows.type == kBFloat16) read_features(s, (const bf16*)x, y);
  else read_features(s, (const fp16*)x, y);
  if (map == kIdentity) return;
  for (int i = 0; i < s.F; i += W) store(y + i, apply(map, load(y + i)));
  if (s.padded()) {
    for (int i = s.stored; i < s.half; i++) y[i] = 0;
    for (int i = s.whole(); i < s.half; i++) y[s.half + i] = 0;
    for (int i = 2 * s.half + s.rest; i < s.F; i++) y[i] = 0;
  }
}

// y = R x, or R^T x if transposed
template <bool transposed>
LINROPE_INLINE void rotate(const Shape& s, const float* x, const float* cos, const float* sin, float* y) {
  int done = 0;
  if (s.compact && s.pairs) {
    store(y, s.rotation(load(x), cos, sin, transposed));
    done = W;
  } else {
    for (int p = 0; p < s.half; p += W) {
      const vf a = load(x + p), b = load(x + s.half + p), c = load(cos + p), n = transposed ? -load(sin + p) : load(sin + p);
      store(y + p, a * c - b * n);
      store(y + s.half + p, a * n + b * c);
    }
    done = 2 * s.half;
  }
  for (int i = done; y != x && i < s.F; i += W) store(y + i, load(x + i));
}

// cos and sin of the tokens' angles (count, half), and where the rotated rows go (count, F); null: not wanted
struct Turn {
  const float *cos, *sin;
  float* to;
  void row(const Shape& s, int i, const float* x) const {
    rotate<false>(s, x, cos + i * s.half, sin + i * s.half, to + i * s.F);
  }
};

// The pairs p .. p + W - 1 of a plain row
template <class T> LINROPE_INLINE void read_pairs(const T* x, int p, int half, bool interleaved, vf& first, vf& second) {
  if (interleaved) return load_pairs(x + 2 * p, first, second);
  first = load(x + p);
  second = load(x + half + p);
}

// y (count, F) = map(features) of the rows from `token` on, each one vector or plain, and the rotated rows
template <class T, int M, bool turns>
void read_rows(const Shape& s, const Rows& rows, int64_t token, int count, float* y, Turn turn) {
  const int half = s.half, F = s.F;
  const bool interleaved = s.layout == kInterleaved;
  const int64_t step = rows.stride, bytes = s.f * sizeof(T);
  const char* x = rows.at(token);
  for (int i = 0; i < count; i++, x += step, y += F) {
    fetch_near(x, step, bytes);
    if (s.compact) {
      read_compact<T>(s, x, M, y);
      if (turns) turn.row(s, i, y);
      continue;
    }
    const T* from = (const T*)x;
    const float *cos = turn.cos + i * half, *sin = turn.sin + i * half;
    float* to = turn.to + i * F;
    for (int p = 0; p < half; p += W) {
      vf a, b;
      read_pairs(from, p, half, interleaved, a, b);
      a = apply(M, a);
      b = apply(M, b);
      store(y + p, a);
      store(y + half + p, b);
      if constexpr (turns) {
        const vf c = load(cos + p), n = load(sin + p);
        store(to + p, a * c - b * n);
        store(to + half + p, a * n + b * c);
      }
    }
    for (int f = 2 * half; f < F; f += W) {
      const vf a = apply(M, load(from + f));
      store(y + f, a);
      if constexpr (turns) store(to + f, a);
    }
  }
}
// The same for all rows
void features(const Shape& s, const Rows& rows, int64_t token, int count, float* y, const Turn& turn) {
  if (s.plain() || s.compact)
    return with_type(rows.type, [&]<class T>() {
      with_map(s.map, [&]<int M>() {
        turn.to ? read_rows<T, M, true>(s, rows, token, count, y, turn)
                : read_rows<T, M, false>(s, rows, token, count, y, turn);
      });
    });
  for (int i = 0; i < count; i++) {
    features(s, rows, token + i, s.map, y + i * s.F);
    if (turn.to) turn.row(s, i, y + i * s.F);
  }
}

inline void add_multiple(float factor, const float* x, int n, float* y) {  // y += factor x
  for (int i = 0; i < n; i += W) store(y + i, load(y + i) + load(x + i) * factor);
}
inline float dot(const float* x, const float* y, int n) {
  vf acc = {};
  for (int i = 0; i < n; i += W) acc += load(x + i) * load(y + i);
  return sum(acc);
}
// to_i = <x_i, y_i> for rows of K numbers; y's are `stride` apart. Reads, and writes for, up to three rows beyond the last
inline void dots(const float* x, const float* y, int stride, int count, int K, float* to) {
  for (int i = 0; i < count; i += 4) {
    vf sums[4] = {}, parts[4];
    for (int f = 0; f < K; f += W)
      for (int r = 0; r < 4; r++) sums[r] += load(x + (i + r) * K + f) * load(y + (i + r) * stride + f);
    transpose_blocks(sums, parts);
    *(v4*)(to + i) = sum_of_quarters((parts[0] + parts[1]) + (parts[2] + parts[3]));
  }
}

// Divides a row by its length and multiplies it by `length`. Returns the factor of the row: 0 if its length
// is beyond float32
float set_length(const Shape& s, float* y, float length) {
  const float factor = length / std::sqrt(dot(y, y, s.F) + kUnitEps);
  for (int i = 0; i < s.F; i += W) store(y + i, load(y + i) * factor);
  return factor;
}
// Turns the gradient d of such a row y into that of the row before it
void set_length_backward(const Shape& s, const float* y, float length, float factor, float* d) {
  const float along = dot(y, d, s.F) / (length * length);
  for (int i = 0; i < s.F; i += W) store(d + i, (load(d + i) - load(y + i) * along) * factor);
}

void write_features(const Shape& s, const float* y, const Rows& rows, int64_t token) {
  with_type(rows.type, [&]<class T>() { write_features(s, y, (T*)rows.at(token)); });
}

// The same, added to a row of float32
void add_features(const Shape& s, const float* y, const Rows& rows, int64_t token) {
  float row[kMaxDim], *to = (float*)rows.at(token);
  write_features(s, y, row);
  for (int i = 0; i < s.f; i++) to[i] += row[i];
}

// y (count, E) = the values of the rows from `token` on, times a factor each; null: 1. True if all of them are
// finite
bool values(const Shape& s, const Rows& rows, int64_t token, int count, const float* factors, float* y) {
  vf bad = {};
  with_type(rows.type, [&]<class T>() {
    const int e = s.e, E = s.E, whole = e / W * W;
    const int64_t step = rows.stride;
    const char* from = rows.at(token);
    for (int i = 0; i < count; i++, y += E, from += step) {
      fetch_near(from, step, e * sizeof(T));
      const T* x = (const T*)from;
      const float factor = factors ? factors[i] : 1;
      const auto put_vector = [&](int at, vf value) {
        store(y + at, value);
        bad += value - value;
      };
      for (int at = 0; at < whole; at += W) put_vector(at, load(x + at) * factor);
      if (whole < E) {
        for (int at = whole; at < E; at += W) store(y + at, vf{});
        if (whole < e) put_vector(whole, iota() < e - whole ? load_lanes<true>(x + whole, e - whole) * factor : vf{});
      }
    }
  });
  const float sum_of_bad = sum(bad);
  return sum_of_bad == sum_of_bad;
}
// y: `count` rows, `stride` numbers apart
void write_values(const Shape& s, const float* y, int64_t stride, const Rows& rows, int64_t token, int count) {
  with_type(rows.type, [&]<class T>() {
    for (int i = 0; i < count; i++) copy_out(y + i * stride, (T*)rows.at(token + i), s.e);
  });
}

// True if all n numbers, a multiple of W, are finite
bool all_finite(const float* x, int n) {
  vf bad = {};
  for (int i = 0; i < n; i += W) bad += load(x + i) - load(x + i);
  const float s = sum(bad);
  return s == s;
}

// The dot product in float64. A vector of W doubles takes two registers, which GCC would keep in memory.
inline double product(const float* x, const float* y, int n) {
  vd low = {}, high = {};
  for (int i = 0; i < n; i += W) {
    low += widen(x + i) * widen(y + i);
    high += widen(x + i + W / 2) * widen(y + i + W / 2);
  }
  return sum(low + high);
}

// Copies the caller's (f, e) into panels of S (F rows); null: zero
void state_in(const Shape& s, const float* kv, float* S) {
  zero(S, s.F * s.E);
  const int P = s.value_row.panel;
  for (int i = 0; kv && i < s.F; i++)
    if (const int f = s.caller_index(i); f >= 0)
      for (int x = 0; x < s.e; x += P) memcpy(S + i * P + x * s.F, kv + f * s.e + x, 4 * (s.e - x < P ? s.e - x : P));
}
// The same of its transpose (E rows). S: scratch
void transposed_state_in(const Shape& s, const float* kv, float* S, float* S_t) {
  if (!kv) return zero(S_t, s.F * s.E);
  state_in(s, kv, S);
  transpose_state(S, s.feature_row, s.value_row, S_t);
}
void state_out(const Shape& s, const float* S, float* kv) {
  const int P = s.value_row.panel;
  for (int i = 0; i < s.F; i++) {
    const int f = s.caller_index(i);
    if (f < 0) continue;
    for (int x = 0; x < s.e; x += P) memcpy(kv + f * s.e + x, S + i * P + x * s.F, 4 * (s.e - x < P ? s.e - x : P));
  }
}
void z_in(const Shape& s, const double* z, double* internal) {
  for (int i = 0; i < s.F; i++) {
    const int f = s.caller_index(i);
    internal[i] = f < 0 || !z ? 0 : z[f];
  }
}
void z_out(const Shape& s, const double* internal, double* z) {
  for (int i = 0; i < s.F; i++)
    if (const int f = s.caller_index(i); f >= 0) z[f] = internal[i];
}

}  // namespace
}  // namespace linrope
