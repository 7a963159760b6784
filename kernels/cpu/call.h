// What the binding hands to the kernels of every instruction set: plain C data, nothing inline.
//
// Axis letters: b batch, n query position, m key position, h query head, g key/value head, f feature dim, e value dim.
#pragma once
#include <cstddef>
#include <cstdint>

namespace linrope {

constexpr int kChunk = 32;  // tokens per chunk: 64 does 20% more arithmetic at 64 features
constexpr int kMaxDim = 256;
constexpr int kBundle = 8;  // heads that take turns
constexpr int kBlock = 128;  // tokens from one anchor to the next (see Ends); chunks do not reach across

enum Type : int { kFloat32, kBFloat16, kFloat16, kFloat64 };
enum Map : int { kIdentity, kElu1, kRelu, kRelu2, kExp, kSilu };
enum Layout : int { kNone, kInterleaved, kHalf };

struct View {  // a (b, n, h, ·) tensor; strides in elements, the last one 1; null: there is none
  char* data;
  int64_t batch, token, head;
};

struct Gate {  // (b, n, g[, pairs]) numbers of any type; stride 0 where they are shared
  const char* data;
  int type;
  int64_t batch, token, head, pair;
};

struct Positions {  // (b, n, axes)
  const int64_t* data;
  int64_t batch, token;
  bool one;  // one number, of token 0 of the row, and consecutive from there
};

struct Call {
  View q, k, v, grad;     // grad: dL/d out
  View out, dq, dk, dv;
  int type;               // of all of these
  int64_t sequences, n, m, h, g;
  int f, e, pairs, layout, map;
  const void* cu_seqlens;  // (sequences + 1,) where packed: then b == 1
  int cu_wide;             // int64, else int32
  bool causal, normalize, add_eps;
  float eps;

  Gate log_decay;          // data null: none
  Gate angle_steps;
  const int64_t* theta;    // (axes, 1 or g, pairs), 2^-64 turns
  int axes;
  int64_t theta_axis, theta_head;
  Positions positions, key_positions;
  const int64_t* angle;    // (rows, 1 or g, pairs) or null
  int64_t angle_row, angle_head;
  const bool* key_mask;    // (b, m) or null
  int64_t mask_batch, mask_token;
  const float* offsets;    // cos and sin of theta times 0 .. kChunk - 1: (1 or g, kChunk, 2, padded pairs), or null

  const float* kv;         // (rows, g, f, e) or null: zero
  const double* z;         // (rows, g, f)
  const int64_t* slots;    // (sequences,): their rows in kv, z and angle; null: in order
  int64_t slots_stride;

  const float* g_kv;       // dL/d of the last state, or null
  const double* g_z;
  float *inverse, *delta;  // (b, n, h): 1 / den and dL/d den, from the sweep of dq to that of dk and dv
  float *d_log_decay;      // (b, m, g) or null
  float *d_angle_steps;    // (b, m, g, pairs) or null
};

struct Span {  // the tokens [begin, end) of one sequence and key/value head
  int64_t sequence, head, begin, end;
  bool last;     // whether the sequence ends here
};

// A state in the caller's order, (f, e) and (f); a null in: zero; a null out: not wanted. in == out is allowed.
struct Ends {
  const float* kv_in;
  const double* z_in;
  float* kv_out;
  double* z_out;
  const int64_t* angle_in;  // (pairs): sum of the angle steps before the span; null: zero
  double* sums;  // gradients of keys: running sums of those of log decay and angle steps (1 + pairs), from the end on
  // The states before every kBlock-th token of the span, anchor_bytes() each; null: not wanted. The sweep forward
  // writes them. From them and the state's gradient the sweep of keys starts its running sum of log decay's gradient
  // anew, so that a rounding error stays within kBlock tokens and does not add up over a sequence.
  char* anchors;
};

// A sweep over spans of one sequence and of the same length, of different heads
typedef void Sweep(const Call&, int count, const Span*, const Ends*, bool emit);

struct Isa {
  const char* name;
  int (*padded_pairs)(int pairs);
  size_t (*anchor_bytes)(const Call&);
  void (*offsets)(const Call&, float* table);
  // The running sum of the span's angle steps is added to angle (pairs).
  void (*sum_steps)(const Call&, const Span&, int64_t* angle);
  double (*sum_decay)(const Call&, const Span&);
  void (*fade)(double log_decay, int64_t count, float* kv, int64_t z_count, double* z);
  Sweep* forward;           // causal; without emit only the state (that of all keys, where not causal)
  Sweep* backward_queries;  // dq, den and delta; the ends hold the states before and after the span
  Sweep* backward_keys;     // dk and dv, last token first; `in` is the gradient of the state after the span
  Sweep* answer;            // not causal: all queries of the span from the state of all keys
  Sweep* answer_backward;   // dq of the same; `out` receives the gradient of the state
  // one token of the heads [first, last) of a row, in place; kv and z are the row's
  void (*step)(const Call&, int64_t row, int64_t first, int64_t last, float* kv, double* z);
};

#if defined(__x86_64__)
extern const Isa isa_baseline, isa_v3, isa_v4;
#else
extern const Isa isa_baseline;
#endif

}  // namespace linrope
