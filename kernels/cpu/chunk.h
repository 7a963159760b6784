// A chunk of tokens: how many it has, their decay, and their angles.
#pragma once
#include "arena.h"
#include "rows.h"

namespace linrope {
namespace {

inline double read(const char* p, int type) {
  switch (type) {
    case kFloat32: return *(const float*)p;
    case kFloat64: return *(const double*)p;
    case kBFloat16: return to_float(*(const bf16*)p);
    default: return to_float(*(const fp16*)p);
  }
}
inline int size_of(int type) { return type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2; }

inline int64_t batch_row(const Call& c, const Span& span) { return c.cu_seqlens.data ? 0 : span.sequence; }

// A double plus and minus 1.5 * 2^52 is rounded to an integer. Not with -ffast-math, which removes both
constexpr double kRoundToInteger = 0x1.8p52;

// e^x = e^r 2^n for count numbers, a multiple of W. x is float64: differences of large sums would be off in float32
inline void reduce(const double* x, float* r, float* n, int count) {
  for (int i = 0; i < count; i++) {
    const double d = x[i] > -104 ? x[i] : x[i] == x[i] ? -104 : x[i];
    const double whole = d * 1.4426950408889634 + kRoundToInteger - kRoundToInteger;
    r[i] = (float)(d - whole * 0.69314718055994531);
    n[i] = whole == whole ? (float)whole : 0;
  }
}
// y = e^x
inline void exponentials(const double* x, float* y, int count) {
  for (int from = 0; from < count; from += kChunk) {
    float r[kChunk], n[kChunk];
    const int part = count - from < kChunk ? count - from : kChunk;
    reduce(x + from, r, n, part);
    for (int i = 0; i < part; i += W) store(y + from + i, exp_parts(load(r + i), load(n + i)));
  }
}

struct DecayScratch {
  float *from_start, *to_end, *of_token;  // (kChunk): e^(D_i), e^(D_end - D_i), e^(a_i)
  float *from_first, *to_first;           // (kChunk): e^(D_i - D_0), e^(D_0 - D_i)
  float* between;                         // (kChunk, kChunk): e^(D_i - D_j) for j <= i
  explicit DecayScratch(Arena& arena)
      : from_start(arena.take<float>(kChunk)), to_end(arena.take<float>(kChunk)), of_token(arena.take<float>(kChunk)),
        from_first(arena.take<float>(kChunk)), to_first(arena.take<float>(kChunk)),
        between(arena.take<float>(kChunk * kChunk)) {}
};

// One decay for all features, within a chunk. D_i is log decay summed from the chunk's first token to token i, both
// included; D_end is that of the last token. Where e^(D_i - D_0) and its inverse are ordinary numbers, their products are
// the factors of pairs of tokens.
// Elsewhere each factor is an exponential of its own, so that gates of any strength are exact.
struct Decay {
  // A smaller log decay counts as kMinLogDecay: e^-1000 is 0 in float32 and in float64, and much larger magnitudes would
  // cancel in differences of sums. Python's limit, MIN_LOG_DECAY = -10^4 in linrope/recurrence/decay.py, need not be the
  // same, because e^-10000 is 0, too. Steps may pass gates without it, so that the kernels have a limit of their own.
  static constexpr double kMinLogDecay = -1000;
  const DecayScratch* scratch;  // what plan fills
  const char* base = nullptr;
  int type = 0;
  int64_t stride = 0;
  DecayFactor factor;  // of the whole chunk
  int ordinary = 0;    // the number of the chunk's first tokens whose from_first and to_first are ordinary numbers

  Decay(const Call& c, const Span& span, const DecayScratch* scratch = nullptr) : scratch(scratch) {
    const View& a = c.log_decay;
    if (!a.data || c.units > 1) return;
    type = a.type;
    stride = a.token * size_of(type);
    base = a.data + (batch_row(c, span) * a.batch + span.head * a.head) * size_of(type);
  }
  double at(int64_t token) const {
    if (!base) return 0;
    const double a = read(base + token * stride, type);
    return a < kMinLogDecay ? kMinLogDecay : a;
  }
  // The factors of the chunk of tokens t .. t + rows - 1; `between` if it is wanted. What belongs to a token depends on no
  // later one
  void plan(int64_t t, int rows, bool want_between = true) {
    if (!base) return;
    double a[kChunk] = {}, D[kChunk], x[kChunk];
    double sum = 0;
    for (int i = 0; i < rows; i++) a[i] = at(t + i);
    for (int i = 0; i < kChunk; i++) D[i] = sum += a[i];
    factor = DecayFactor(sum);
    // e^(D_i - D_0) and its inverse. Where both are ordinary numbers, their products are the other factors
    float r[kChunk], n[kChunk], *from_first = scratch->from_first, *to_first = scratch->to_first;
    for (int i = 0; i < kChunk; i++) x[i] = D[i] - D[0];
    reduce(x, r, n, kChunk);
    for (int i = 0; i < kChunk; i += W) {
      store(from_first + i, exp_parts(load(r + i), load(n + i)));
      store(to_first + i, exp_parts(-load(r + i), -load(n + i)));
    }
    const float first = (float)std::exp(a[0]);
    ordinary = 1;
    while (ordinary < kChunk && D[ordinary] - D[0] > -40) ordinary++;
    for (int i = 0; i < kChunk; i += W) {
      store(scratch->from_start + i, load(from_first + i) * first);
      store(scratch->to_end + i, load(to_first + i) * from_first[kChunk - 1]);
    }
    scratch->of_token[0] = first;
    for (int i = 1; i < kChunk; i++) scratch->of_token[i] = from_first[i] * to_first[i - 1];
    if (ordinary < kChunk) strong_factors(a, D);
    if (want_between) fill_between(D, rows);
  }
  // null if there is no decay
  const float* from_start() const { return base ? scratch->from_start : nullptr; }
  const float* to_end() const { return base ? scratch->to_end : nullptr; }
  const float* between() const { return base ? scratch->between : nullptr; }

 private:
  void strong_factors(const double* a, const double* D) {
    double x[kChunk];
    float exact[kChunk];
    for (int i = 0; i < kChunk; i++) x[i] = D[kChunk - 1] - D[i];
    exponentials(x, scratch->to_end, kChunk);
    exponentials(a, exact, kChunk);
    for (int i = ordinary; i < kChunk; i++) scratch->of_token[i] = exact[i];
  }
  void fill_between(const double* D, int rows) {
    for (int i = 0; i < rows; i++) {
      float* row = scratch->between + i * kChunk;
      const int count = round_up(i + 1, W);
      if (i < ordinary) {
        for (int j = 0; j < count; j += W) store(row + j, load(scratch->to_first + j) * scratch->from_first[i]);
      } else {
        double x[kChunk];
        for (int j = 0; j < count; j++) x[j] = j <= i ? D[i] - D[j] : 0;
        exponentials(x, row, count);
      }
    }
  }
};

Transition transition(const Call& c, const Span& span) {
  const Decay decay(c, span);
  double sum = 0;
  for (int64_t t = span.begin; t < span.end; t++) sum += decay.at(t);
  return {sum};
}

// True if queries and keys have the same positions, as they lie in memory: their angles are computed once then
inline bool same_positions(const Call& c) {
  const View &a = c.positions, &b = c.key_positions;
  return a.data == b.data && a.batch == b.batch && a.token == b.token;
}

// Angle steps, converted from radians to 2^-64 turns; sums wrap around
struct Steps {
  const char* base = nullptr;
  int type = 0, pairs = 0;
  int64_t token = 0, pair = 0;
  Steps(const Call& c, const Span& span) {
    const View& w = c.angle_steps;
    if (!w.data) return;
    type = w.type;
    pairs = (int)c.pairs;
    token = w.token * size_of(type);
    pair = w.last * size_of(type);
    base = w.data + (batch_row(c, span) * w.batch + span.head * w.head) * size_of(type);
  }
  // sums += sign * the token's steps
  void add(int64_t t, uint64_t sign, uint64_t* sums) const {
    double x[kMaxDim / 2];
    const char* p = base + t * token;
    if (type == kFloat32 && pair == 4)
      for (int i = 0; i < pairs; i++) x[i] = ((const float*)p)[i];
    else
      for (int i = 0; i < pairs; i++) x[i] = read(p + i * pair, type);
    for (int i = 0; i < pairs; i++) {
      const double y = x[i] * 0.15915494309189535;  // 1 / 2 pi
      const double rounded = y + kRoundToInteger - kRoundToInteger;
      const double whole = std::fabs(y) < 0x1p51 ? rounded : y;  // a larger y is an integer already
      const double fraction = y - whole;
      sums[i] += sign * (uint64_t)(int64_t)((fraction < 0.5 ? fraction : -0.5) * 0x1p64);
    }
  }
};

void sum_steps(const Call& c, const Span& span, int64_t* angle) {
  const Steps steps(c, span);
  if (!steps.base) return;
  for (int64_t t = span.begin; t < span.end; t++) steps.add(t, 1, (uint64_t*)angle);
}

struct AngleMemory {  // of one head; see Angles
  uint64_t *sum, *theta;
  AngleMemory(Arena& arena, const Shape& s)
      : sum(arena.take<uint64_t>(s.half)), theta(arena.take<uint64_t>(s.axes * s.half)) {}
};

struct AngleRows {  // of a chunk, used by the heads of a bundle in turn
  float *cos, *sin;        // (kChunk, half)
  int64_t begin = -1;      // the first of the tokens that they are of, and their number
  int rows = 0;
  AngleRows(Arena& arena, const Shape& s)
      : cos(arena.take<float>(kChunk * s.half)), sin(arena.take<float>(kChunk * s.half)) {}
};

// cos and sin of the angles Theta of a chunk's tokens, first token first
struct Angles {
  const Call& c;
  const Shape& s;
  Steps steps;
  const int64_t* positions;
  int64_t position_stride;
  uint64_t* sum;                // (half): the state's angle plus the angle steps up to the current token
  uint64_t* theta;              // (axes, half)
  const float* rotation_table;  // of this head; null: there is none
  AngleRows* tables;
  float *cos, *sin;             // (kChunk, half): those of the current chunk, in one of the tables
  bool alike;                   // all heads have the same angles: the first one of a bundle computes them

  // p: the positions of queries or of keys
  Angles(const Call& c, const Shape& s, const Span& span, const View& p, const int64_t* angle_in, AngleRows* tables,
         const AngleMemory& memory)
      : c(c), s(s), steps(c, span), positions(p.data ? p.as<int64_t>() + batch_row(c, span) * p.batch : nullptr),
        position_stride(p.token), sum(memory.sum), theta(memory.theta), rotation_table(c.rotation_table), tables(tables),
        cos(tables->cos), sin(tables->sin), alike(!c.theta.head && !c.angle_steps.data && !c.angle.head) {
    if (rotation_table && c.theta.head) rotation_table += span.head * kChunk * 2 * s.half;
    for (int axis = 0; axis < s.axes; axis++) {
      const uint64_t* turns = c.theta.as<uint64_t>() + axis * c.theta.batch + span.head * c.theta.head;
      for (int i = 0; i < s.half; i++) theta[axis * s.half + i] = i < s.pairs ? turns[i] : 0;
    }
    const View& a = c.angle;
    const int64_t at = c.state_row(span.sequence) * a.batch + span.head * a.head;
    for (int i = 0; i < s.half; i++) sum[i] = 0;
    for (int i = 0; i < s.pairs; i++)
      sum[i] = (a.data ? a.as<int64_t>()[at + i] : 0) + (angle_in ? (uint64_t)angle_in[i] : 0);
  }
  int64_t position(int64_t token) const {
    return position_stride ? positions[token * position_stride] : positions[0] + token;
  }

  // cos and sin of the integer angle
  void compute(int64_t token, float* to_cos, float* to_sin) {
    for (int i = 0; i < s.half; i += W) {
      vl x = *(const vlu*)(sum + i);
      for (int a = 0; a < s.axes; a++) {
        const uint64_t p = s.axes == 1 ? position(token) : positions[token * position_stride + a];
        x += *(const vlu*)(theta + a * s.half + i) * p;
      }
      vf cos_i, sin_i;
      cos_sin(__builtin_convertvector((x + 0x80000000u) >> 32, vi), cos_i, sin_i);
      store(to_cos + i, cos_i);
      store(to_sin + i, sin_i);
    }
  }
  // The cos and sin of token chunk_begin + i. If there is a table, and the token's position is less than kChunk after
  // that of the chunk's first token, rotates the first token's cos and sin by an entry of the table.
  void row(int64_t chunk_begin, int i) {
    float *to_cos = cos + i * s.half, *to_sin = sin + i * s.half;
    const int64_t offset = rotation_table && i ? position(chunk_begin + i) - position(chunk_begin) : -1;
    if (offset < 0 || offset >= kChunk) return compute(chunk_begin + i, to_cos, to_sin);
    const float* table = rotation_table + offset * 2 * s.half;  // R(p) = R(p0) R(p - p0)
    for (int p = 0; p < s.half; p += W) {
      const vf c0 = load(cos + p), s0 = load(sin + p), c1 = load(table + p), s1 = load(table + s.half + p);
      store(to_cos + p, c0 * c1 - s0 * s1);
      store(to_sin + p, s0 * c1 + c0 * s1);
    }
  }
  Turn turn(float* to) const { return {cos, sin, to}; }
  void forward(int64_t chunk_begin, int rows, int table = 0) {
    if (!s.half) return;
    AngleRows& to = tables[table];
    cos = to.cos;
    sin = to.sin;
    if (alike && to.begin == chunk_begin && to.rows >= rows) return;
    to.begin = chunk_begin;
    to.rows = rows;
    for (int i = 0; i < rows; i++) {
      if (steps.base) steps.add(chunk_begin + i, 1, sum);
      row(chunk_begin, i);
    }
  }
  void backward(int64_t chunk_begin, int rows, int table = 0) {  // on entry sum is the angle of the chunk's last token
    if (!s.half) return;
    if (!steps.base) return forward(chunk_begin, rows, table);
    cos = tables[table].cos;
    sin = tables[table].sin;
    for (int i = rows - 1; i >= 0; i--) {
      compute(chunk_begin + i, cos + i * s.half, sin + i * s.half);
      steps.add(chunk_begin + i, -1, sum);
    }
  }
};

void fill_rotation_table(const Call& c, float* table) {
  const Shape s(c);
  const int heads = c.theta.head ? (int)c.g : 1;
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < kChunk; i++, table += 2 * s.half) {
      int32_t angles[kMaxDim / 2 + W] = {};
      for (int p = 0; p < s.pairs; p++)
        angles[p] = (int32_t)((i * c.theta.as<uint64_t>()[h * c.theta.head + p] + 0x80000000u) >> 32);
      for (int p = 0; p < s.half; p += W) {
        vf a, b;
        cos_sin(*(const viu*)(angles + p), a, b);
        store(table + p, a);
        store(table + s.half + p, b);
      }
    }
}

}  // namespace
}  // namespace linrope
