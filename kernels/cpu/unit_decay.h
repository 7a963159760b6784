// A decay of its own for each unit (a pair of features that turns, or a feature that does not) within a chunk. The factor
// of a pair of tokens then differs from feature to feature:  <x, y>_ij = sum_c x_ic y_jc e^(D_ic - D_jc)
//
// A chunk has leaves of kLeaf tokens. No exponent is positive, so that gates of any strength are exact:
//   across leaves: products of rows that carry the decay from the later leaf's start and to the earlier leaf's end; what
//     passes through a leaf between them is multiplied by the leaf's decay
//   within a leaf: the earlier row is carried from token to token, feature by feature
#pragma once
#include "task.h"

namespace linrope {
namespace {

constexpr int kLeaf = 8, kLeaves = kChunk / kLeaf;
static_assert(kLeaves == 4, "set_keys, keys_of and scores spell out the pairs of four leaves");

// The factors e^D of `count` features, each with a D of its own. They multiply the rows or columns of a state, in the same
// two forms as DecayFactor.
struct FeatureFactors {
  float *whole, *part;  // S whole + S part: 1 and e^D - 1 near 1, 0 and e^D further from 1
  double* exact;
  FeatureFactors(Arena& arena, int count)
      : whole(arena.take<float>(count)), part(arena.take<float>(count)), exact(arena.take<double>(count)) {}
  // count: a multiple of W
  void set(const double* D, int count) const {
    exponentials(D, part, count);
    for (int i = 0; i < count; i += W / 2) {
      const vd x = *(const vdu*)(D + i), zero = {}, one = zero + 1, near = x > -0.5 ? x : zero, far = widen(part + i);
      vd series = one;  // Taylor's, of (e^x - 1) / x
      for (int n = 13; n > 1; n--) series = one + series * near * (1.0 / n);
      const vd change = near * series;
      *(vdu*)(exact + i) = x > -0.5 ? one + change : far;
      *(vhalf*)(part + i) = __builtin_convertvector(x > -0.5 ? change : far, vhalf);
      *(vhalf*)(whole + i) = __builtin_convertvector(x > -0.5 ? one : zero, vhalf);
    }
  }
};

// Reads a token's log decay of each unit
struct Units {
  const char* base = nullptr;
  int type = 0, count = 0;  // count: of the features
  int64_t token = 0, unit_stride = 0;  // in bytes, from a token or a unit to the next
  bool copies = false;    // the units are float32 numbers side by side, and the kernels' features are pairs, then the rest
  int unit_of[kMaxDim + NW];  // each feature's unit; -1: padding

  // `internal`: of the kernels' features; else of the caller's
  Units(const Call& c, const Span& span, const Shape& s, bool internal) : count(internal ? s.F : s.f) {
    const View& a = c.log_decay;
    if (!a.data || c.units == 1) return;
    type = a.type;
    token = a.token * size_of(type);
    unit_stride = a.last * size_of(type);
    for (int i = 0; i < count; i++) {
      const int f = internal ? s.caller_index(i) : i, p = s.pairs;
      unit_of[i] = f < 0 ? -1 : f >= 2 * p ? f - p : s.layout == kInterleaved ? f / 2 : f % p;
    }
    copies = internal && !s.compact && s.stored == s.pairs && type == kFloat32 && unit_stride == 4;
    go_to(c, span);
  }
  void go_to(const Call& c, const Span& span) {
    const View& a = c.log_decay;
    base = a.data + (batch_row(c, span) * a.batch + span.head * a.head) * size_of(type);
  }
  // (count): the log decay of each feature, 0 for padding
  template <class T> void read_row(const Shape& s, int64_t t, T* a) const {
    const char* from = base + t * token;
    const auto gather = [&]<class Number>(const Number*) {
      for (int i = 0; i < count; i++) a[i] = unit_of[i] < 0 ? 0 : (T) * (const Number*)(from + unit_of[i] * unit_stride);
    };
    if (!copies) return type == kFloat32 ? gather((const float*)nullptr) : gather((const double*)nullptr);
    const float* x = (const float*)from;
    for (int i = 0; i < count; i++) a[i] = 0;
    for (int i = 0; i < s.pairs; i++) a[i] = a[s.half + i] = x[i];
    for (int i = 0; i < s.rest; i++) a[2 * s.half + i] = x[s.pairs + i];
  }
  // a: the same; gates: e^a, exact to the last digits of a
  void read_gates(const Shape& s, int64_t t, double* a, float* gates) const {
    read_row(s, t, a);
    if (type == kFloat64) return exponentials(a, gates, count);
    read_row(s, t, gates);
    for (int f = 0; f < count; f += W) store(gates + f, exponential(load(gates + f)));
  }
};

struct UnitDecay {
  const Shape& s;
  const int F;
  // (kChunk, F): e^(a_i); e to the sum of a from the leaf's start to i; e to the sum of a after i to the leaf's end
  float *gates, *from_leaf, *to_leaf;
  float* leaf;                          // (kLeaves, F): e to the sum of a over the leaf
  float *from_start, *to_end;           // (kChunk, F): like from_leaf and to_leaf, from the chunk's start and to its end
  float *keys, *keys_t, *of_leaf;       // what `set_keys` and `scores` leave: see there
  FeatureFactors factors;               // of the whole chunk
  double *gate, *leaf_sum, *total;  // log decay of a token, of a leaf and of the chunk
  int rows = 0;

  UnitDecay(Arena& arena, const Shape& s)  // without memory if the decay is not per unit
      : s(s), F(s.per_unit ? s.F : 0), gates(rows_of(arena)), from_leaf(rows_of(arena)), to_leaf(rows_of(arena)),
        leaf(arena.take<float>(kLeaves * F)), from_start(rows_of(arena)), to_end(rows_of(arena)), keys(rows_of(arena)),
        keys_t(rows_of(arena)), of_leaf(rows_of(arena)), factors(arena, F), gate(arena.take<double>(F)),
        leaf_sum(arena.take<double>(F)), total(arena.take<double>(F)) {}
  float* rows_of(Arena& arena) const { return arena.take<float>(kChunk * F); }

  void plan(const Units& units, int64_t t, int count) {
    rows = count;
    for (int f = 0; f < F; f++) total[f] = 0;
    for (int J = 0; J < kLeaves; J++) {
      for (int f = 0; f < F; f++) leaf_sum[f] = 0;
      for (int i = J * kLeaf; i < (J + 1) * kLeaf; i++) {
        if (i < rows) {
          units.read_gates(s, t + i, gate, gates + i * F);
          for (int f = 0; f < F; f++) leaf_sum[f] += gate[f];
        } else {
          for (int f = 0; f < F; f++) gates[i * F + f] = 1;
        }
      }
      for (int f = 0; f < F; f++) total[f] += leaf_sum[f];
      exponentials(leaf_sum, leaf + J * F, F);
    }
    factors.set(total, F);
    for (int f = 0; f < F; f += W) plan_column(f);
  }
  void plan_column(int f) {
    const vf one = splat(1);
    vf x = one;
    for (int J = 0; J < kLeaves; J++) {
      vf y = one;
      for (int i = J * kLeaf; i < (J + 1) * kLeaf; i++) {
        y *= load(gates + i * F + f);
        store(from_leaf + i * F + f, y);
        store(from_start + i * F + f, y * x);
      }
      x *= load(leaf + J * F + f);
    }
    x = one;
    for (int J = kLeaves - 1; J >= 0; J--) {
      vf y = one;
      for (int i = (J + 1) * kLeaf - 1; i >= J * kLeaf; i--) {
        store(to_leaf + i * F + f, y);
        store(to_end + i * F + f, y * x);
        y *= load(gates + i * F + f);
      }
      x *= load(leaf + J * F + f);
    }
  }

  // RunningSum's rows, a leaf at a time: products of many gates would be off by the sum of their errors
  void add_rows(RunningSum& sum, const float* x, float* z, float* before) const {
    sum.columns([&]<int N>(int f) {
      for (int v = 0; v < N; v++) {
        const int c = f + v * W;
        const vf total = sum.total_at(c);
        vf leaves = {};  // of the leaves before, at the leaf's start
        for (int J = 0; J * kLeaf < rows; J++) {
          vf w = {};
          for (int i = J * kLeaf; i < J * kLeaf + rows_in(J); i++) {
            const int at = i * F + c;
            const vf passed = total * load(from_start + at) + leaves * load(from_leaf + at);
            w *= load(gates + at);
            if (before) store(before + at, passed + w);
            w += load(x + at);
            store(z + at, passed + w);
          }
          leaves = leaves * load(leaf + J * F + c) + w;
        }
        store(sum.chunk + c, leaves);
      }
    });
  }
  void add_rows_backward(RunningSum& sum, float* x) const {
    sum.columns([&]<int N>(int f) {
      for (int v = 0; v < N; v++) {
        const int c = f + v * W;
        const vf total = sum.total_at(c);
        vf leaves = {};  // of the leaves after, at the leaf's end
        for (int J = (rows - 1) / kLeaf; J >= 0; J--) {
          vf w = {};
          for (int i = J * kLeaf + rows_in(J) - 1; i >= J * kLeaf; i--) {
            const int at = i * F + c;
            w += load(x + at);
            store(x + at, total * load(to_end + at) + leaves * load(to_leaf + at) + w);
            w *= load(gates + at);
          }
          leaves = leaves * load(leaf + J * F + c) + w;
        }
        store(sum.chunk + c, leaves);
      }
    });
  }

  // The transposed keys (K, F) that `scores` multiplies, in these columns: leaf 0 carried to the end of leaf 1, leaf 1,
  // leaf 0, leaf 2, each carried to its own end. Rows from `rows` on to a multiple of kLeaf are zero, here and in `scores`
  void set_keys(const float* K) {
    const int source[kLeaves] = {0, 1, 0, 2};
    for (int J = 0; J < kLeaves; J++)
      for (int i = 0; i < kLeaf; i++) {
        const int from = source[J] * kLeaf + i;
        float* to = keys + (J * kLeaf + i) * F;
        if (from >= rows) {
          zero(to, F);
          continue;
        }
        for (int f = 0; f < F; f += W) {
          const vf y = load(K + from * F + f) * load(to_leaf + from * F + f);
          store(to + f, J == 0 ? y * load(leaf + F + f) : y);
        }
      }
    transpose(keys, kChunk, F, keys_t);
  }
  // The keys of leaf J, carried to its end
  const float* keys_of(int J) const { return keys + (J == 0 ? 2 : J == 1 ? 1 : 3) * kLeaf * F; }

  // to_ij = scale_i <A_i, K_j>_ij for j <= i, and 0 for later j. Afterwards of_leaf holds the rows of A, each carried from
  // the start of its leaf
  void scores(const float* A, const float* K, const float* scale, float* to) {
    for (int i = 0; i < rows; i++) {
      zero(to + i * kChunk, kChunk);
      for (int f = 0; f < F; f += W) store(of_leaf + i * F + f, load(A + i * F + f) * load(from_leaf + i * F + f));
    }
    if (rows > kLeaf) across<kLeaf>(of_leaf + kLeaf * F, kLeaf, 2 * kLeaf, to, 0);
    if (rows > 2 * kLeaf) across<2 * kLeaf>(of_leaf + 2 * kLeaf * F, 2 * kLeaf, 0, to, 0);
    if (rows > 3 * kLeaf) {
      across<kLeaf>(of_leaf + 3 * kLeaf * F, 3 * kLeaf, 3 * kLeaf, to, 2 * kLeaf);
      alignas(64) float through[kLeaf * (kMaxDim + NW)];  // the last leaf's rows, carried from the start of the one before
      for (int i = 3 * kLeaf; i < rows; i++)
        for (int f = 0; f < F; f += W)
          store(through + (i - 3 * kLeaf) * F + f, load(of_leaf + i * F + f) * load(leaf + 2 * F + f));
      across<2 * kLeaf>(through, 3 * kLeaf, 0, to, 0);
    }
    for (int J = 0; J * kLeaf < rows; J++) within(A, K, J, to);
    for (int i = 0; scale && i < rows; i++)
      for (int j = 0; j < kChunk; j += W) store(to + i * kChunk + j, load(to + i * kChunk + j) * scale[i]);
  }

  // Adds sum_j scores_ij e^(D_i - D_j) K_j over the j of earlier leaves to row i of `to`. across, if not null (kLeaves, F):
  // adds factor_i A_i o the terms to the sums of the leaves between j and i
  void add_earlier(const float* scores, float* to, const float* A, const float* factor, float* across) const {
    panels(s.feature_row, [&]<int N>(int e0) {
      for (int I = 1; I * kLeaf < rows; I++)
        row_blocks(rows_in(I), MR, [&]<int M>(int r0) {
          const int i0 = I * kLeaf + r0;
          vf acc[M][N] = {};
          for (int J = 0; J < I; J++) {
            if (J) multiply_rows(acc, leaf + J * F + e0, 0);
            if (J && across) add_across<M, N>(acc, i0, J, e0, A, factor, across);
            multiply(acc, kLeaf, scores + i0 * kChunk + J * kLeaf, kChunk, keys_of(J) + e0, F);
          }
          multiply_rows(acc, from_leaf + i0 * F + e0, F);
          add_rows(acc, to + i0 * F + e0);
        });
    });
  }
  // Adds sum_i scores_ij e^(D_i - D_j) A_i over the i of later leaves to row j of `to`; of_leaf: as `scores` left it
  void add_later(const float* scores, float* to) const {
    const int last = (rows - 1) / kLeaf;
    panels(s.feature_row, [&]<int N>(int e0) {
      for (int J = 0; J < last; J++)
        row_blocks(kLeaf, MR, [&]<int M>(int r0) {
          const int j0 = J * kLeaf + r0;
          vf acc[M][N] = {};
          for (int I = last; I > J; I--) {
            if (I < last) multiply_rows(acc, leaf + I * F + e0, 0);
            multiply<true>(acc, rows_in(I), scores + I * kLeaf * kChunk + j0, kChunk, of_leaf + I * kLeaf * F + e0, F);
          }
          multiply_rows(acc, to_leaf + j0 * F + e0, F);
          add_rows(acc, to + j0 * F + e0);
        });
    });
  }
  // The pairs j <= i of the same leaf (without `own`: j < i), with factor_i (null: 1): dA_i += scores_ij e^(D_i - D_j) K_j,
  // dK_j += factor_i scores_ij e^(D_i - D_j) A_i. da: the gradient of log decay (C, F); null: not wanted
  void add_within(const float* scores, const float* A, float* dA, const float* K, float* dK, const float* factor, bool own,
                  float* da) const {
    for (int J = 0; J * kLeaf < rows; J++)
      for (int f = 0; f < F; f += W) {
        const int last = rows_in(J), at = J * kLeaf * F + f;
        const float* P = scores + J * kLeaf * kChunk + J * kLeaf;
        for (int j = 0; j < last; j++) {
          vf key = load(K + at + j * F), carried = splat(1), d_key = load(dK + at + j * F), pairs[kLeaf] = {};
          for (int i = j; i < last; i++) {
            if (i == j && !own) continue;
            if (i > j) key *= load(gates + at + i * F), carried *= load(gates + at + i * F);
            const float p = P[i * kChunk + j];
            const vf a = load(A + at + i * F) * (factor ? p * factor[J * kLeaf + i] : p);
            store(dA + at + i * F, load(dA + at + i * F) + key * p);
            d_key += carried * a;
            pairs[i] = key * a;
          }
          store(dK + at + j * F, d_key);
          vf later = {};
          for (int i = last - 1; da && i > j; i--) {
            later += pairs[i];
            store(da + at + i * F, load(da + at + i * F) + later);
          }
        }
      }
  }

 private:
  int rows_in(int leaf) const { return rows - leaf * kLeaf < kLeaf ? rows - leaf * kLeaf : kLeaf; }
  template <int M, int N> LINROPE_INLINE static void multiply_rows(vf (&acc)[M][N], const float* rows, int stride) {
    for (int r = 0; r < M; r++)
      for (int v = 0; v < N; v++) acc[r][v] *= load(rows + r * stride + v * W);
  }
  template <int M, int N> LINROPE_INLINE void add_rows(const vf (&acc)[M][N], float* to) const {
    for (int r = 0; r < M; r++)
      for (int v = 0; v < N; v++) store(to + r * F + v * W, load(to + r * F + v * W) + acc[r][v]);
  }
  // acc: what the leaves before J contribute to rows from i0 on, carried through J
  template <int M, int N>
  void add_across(const vf (&acc)[M][N], int i0, int J, int e0, const float* A, const float* factor, float* across) const {
    for (int v = 0; v < N; v++) {
      const int e = e0 + v * W;
      vf total = {};
      for (int r = 0; r < M; r++) {
        const vf x = acc[r][v] * load(from_leaf + (i0 + r) * F + e) * load(A + (i0 + r) * F + e);
        total += factor ? x * factor[i0 + r] : x;
      }
      for (int K = J + 1; K < i0 / kLeaf; K++) total *= load(leaf + K * F + e);
      store(across + J * F + e, load(across + J * F + e) + total);
    }
  }
  // to_ij for the rows of a leaf, which are A, from row i0 on; j0: the first of `columns` keys, in column c0 of keys_t
  template <int columns> void across(const float* A, int i0, int c0, float* to, int j0) const {
    constexpr int N = columns / W < 1 ? 1 : columns / W < NV ? columns / W : NV;
    const int count = rows - i0 < kLeaf ? rows - i0 : kLeaf;
    row_blocks(count, MR, [&]<int M>(int r0) {
      for (int c = c0 / W * W; c < c0 + columns; c += N * W) {
        vf acc[M][N] = {};
        multiply(acc, s.feature_row.used, A + r0 * F, F, keys_t + c / NW * NW * F + c % NW, NW);
        alignas(64) float block[N * W];
        for (int r = 0; r < M; r++) {
          for (int v = 0; v < N; v++) store(block + v * W, acc[r][v]);
          const int first = c > c0 ? c : c0, last = c + N * W < c0 + columns ? c + N * W : c0 + columns;
          memcpy(to + (i0 + r0 + r) * kChunk + j0 + first - c0, block + first - c, 4 * (last - first));
        }
      }
    });
  }
  // The pairs of leaf J
  void within(const float* A, const float* K, int J, float* to) const {
    const int count = rows_in(J), first = J * kLeaf;
    for (int j = 0; j < count; j++) {
      vf acc[kLeaf] = {};
      for (int f = 0; f < F; f += W) {
        vf key = load(K + (first + j) * F + f);
        acc[j] += load(A + (first + j) * F + f) * key;
        for (int i = j + 1; i < count; i++) {
          key *= load(gates + (first + i) * F + f);
          acc[i] += load(A + (first + i) * F + f) * key;
        }
      }
      for (int i = j; i < count; i++) to[(first + i) * kChunk + first + j] = sum(acc[i]);
    }
  }
};

// y = x o factors, of count numbers; y may be x
inline void multiply_elements(const float* x, const float* factors, int count, float* y) {
  for (int i = 0; i < count; i += W) store(y + i, load(x + i) * load(factors + i));
}

// The decay of a chunk: one for all features, or one per unit
struct ChunkDecay {
  struct Scratch {
    DecayScratch scalar;
    UnitDecay units;
    float* scaled;  // (kChunk, F) of rows carried to or from the chunk's ends
    Scratch(Arena& arena, const Shape& s)
        : scalar(arena), units(arena, s), scaled(arena.take<float>(s.per_unit ? kChunk * s.F : 0)) {}
  };
  Scratch& w;
  const Shape& s;
  Decay scalar;
  Units units;
  const bool per_unit;

  ChunkDecay(const Call& c, const Span& span, const Shape& s, Scratch& w)
      : w(w), s(s), scalar(c, span, &w.scalar), units(c, span, s, true), per_unit(s.per_unit) {}
  void plan(int64_t t, int rows, bool want_between = true) {
    if (per_unit) w.units.plan(units, t, rows);
    else scalar.plan(t, rows, want_between);
  }
  // e^(D_i) and e^(D_end - D_i), one number for each row; null: 1, or a number per feature
  const float* from_start_of_rows() const { return per_unit ? nullptr : scalar.from_start(); }
  const float* to_end_of_rows() const { return per_unit ? nullptr : scalar.to_end(); }
  // Rows A, times e^(D_i) or e^(D_end - D_i) if that is per feature
  const float* carried_from_start(const float* A, int rows) const { return carried(A, rows, w.units.from_start); }
  const float* carried_to_end(const float* A, int rows) const { return carried(A, rows, w.units.to_end); }
  // Makes K_t of keys K, for `scores`. Rows after the last, up to a multiple of W, become zero
  void transpose_keys(float* K, int rows, float* K_t) const {
    zero_rest(K, rows, s.F);
    if (per_unit) w.units.set_keys(K);
    else transpose(K, rows, s.F, K_t);
  }
  // to_ij = scale_i e^(D_i - D_j) <A_i, K_j> for j <= i, else 0. scale: null: 1
  void scores(const Task& task, const float* A, const float* K, const float* K_t, int rows, const float* scale,
              float* to) const {
    if (per_unit) w.units.scores(A, K, scale, to);
    else task.multiply_scores({rows, s.feature_row, A, K_t, scalar.between(), scale, to});
  }
  // The product x, whose A, scale and scores are set here: the scores are those of A and K, and go to `to`. What A reads
  // from the state has decayed from the chunk's start
  void attend(const Task& task, const float* A, const float* K, const float* K_t, Product x, float* to) const {
    x.A = carried_from_start(A, x.rows);
    x.scale = from_start_of_rows();
    x.scores = to;
    if (!per_unit) return task.attend({x.rows, s.feature_row, A, K_t, scalar.between(), nullptr, to}, x);
    scores(task, A, K, K_t, x.rows, nullptr, to);
    task.multiply(x);
  }
  // The state after the chunk, S = e^(D_end) S + B^T V, with features as rows or as columns of S. Without `first` S has
  // decayed already
  Update update(Update x, bool in_columns, bool first) const {
    x.in_columns = in_columns;
    if (!first) return x;
    if (per_unit) {
      x.whole = w.units.factors.whole;
      x.part = w.units.factors.part;
    } else {
      x.factor = scalar.factor;
    }
    return x;
  }
  // z of each token and, if not null, z before it: see RunningSum
  void add_rows(RunningSum& sum, const float* x, int rows, float* z, float* before) const {
    if (per_unit) w.units.add_rows(sum, x, z, before);
    else sum.rows(x, rows, scalar, z, before);
  }
  void add_rows_backward(RunningSum& sum, float* x, int rows) const {
    if (per_unit) w.units.add_rows_backward(sum, x);
    else sum.rows_backward(x, rows, scalar);
  }
  void end_chunk(RunningSum& sum) const {
    sum.end_chunk(scalar.factor.exact, per_unit ? w.units.factors.exact : nullptr);
  }

 private:
  const float* carried(const float* A, int rows, const float* factors) const {
    if (!per_unit) return A;
    multiply_elements(A, factors, rows * s.F, w.scaled);
    return w.scaled;
  }
};

}  // namespace
}  // namespace linrope
