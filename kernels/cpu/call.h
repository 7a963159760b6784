// The data that the binding passes to the kernels of each instruction set: plain data.
//
// Axis letters: b batch, n query position, m key position, h query head, g key/value head, f feature dim, e value dim.
#pragma once
#include <cstddef>
#include <cstdint>

// Inline everywhere: a copy out of line, of one instruction set, could be merged with that of another
#define LINROPE_INLINE inline __attribute__((always_inline))

namespace linrope {

// Tokens per chunk: 64 does 20% more arithmetic at 64 features. These depend on it: unit_decay.h is written for four leaves
// of 8 tokens, a chunk has whole panels (vector.h), kBlock is a multiple of it, and amx.h cuts it into tiles of 16 rows
constexpr int kChunk = 32;
constexpr int kMaxDim = 256;
constexpr int kBundle = 8;  // heads that a thread sweeps together, a chunk each in turn
constexpr int kMaxTaps = 8;
constexpr int kMaxValues = (1 << 16) - 1;  // per head, and heads, of the gated norm
constexpr float kUnitEps = 1e-6f;          // added to the squared length of features that are divided by it
constexpr int kBlock = 256;  // tokens of a block. The forward pass saves the state before every block of a sequence
static_assert(kBlock % kChunk == 0);

enum Type : int { kFloat32, kBFloat16, kFloat16, kFloat64, kInt32, kInt64, kBool };
enum Map : int { kIdentity, kElu1, kRelu, kRelu2, kExp, kSilu };
enum Layout : int { kNone, kInterleaved, kHalf };
// The factor w of a value in a layer's step: 1, a gate of its own, 1 - f with the forget gate f, or b of the erase gate
enum WriteFactor : int { kWriteOnes, kWriteGate, kWriteForgotten, kWriteErased };
// The names that Python has for these: see linrope_facts
#define LINROPE_MAPS R"(["identity", "elu+1", "relu", "relu2", "exp", "silu"])"
#define LINROPE_LAYOUTS R"(["none", "interleaved", "half"])"
#define LINROPE_WRITE_FACTORS R"(["none", "independent", "tied", "erased"])"

// A tensor; null data: none. Strides in elements: of its first axis (batch rows, rows of a state, axes of theta), of
// its tokens, its heads and its last axis; 0 along an axis that it lacks, or along which all share its one entry.
struct View {
  char* data;
  int64_t batch, token, head, last;
  int type;
  template <class T> LINROPE_INLINE T* as() const { return (T*)data; }
};

// A call of forward, backward or step. arguments.h has the table of its arguments: their names, shapes and types.
struct Call {
  // Sizes. b: batch rows, 1 if sequences are packed; rows: of kv, z and angle, the sequences unless there are slots
  int64_t b, sequences, n, m, h, g, rows;
  int64_t query_heads, key_heads;  // of q, and of k
  int64_t value_group;  // value heads per head of q and k. More than 1: v has more heads than they have, and h is g
  // The number of heads whose gradients of q and k are added up in one head of dq and dk. It divides value_group. With
  // value_group > 1, dq and dk are float32. With heads_per_gradient > 1 they are zero before the first sweep
  int64_t heads_per_gradient;
  int64_t f, e, pairs, axes;
  int64_t units;   // of log_decay: 1, or one for each pair that turns and for each feature that does not
  int64_t blocks;  // whose states are saved, of all batch rows

  View q, k, v;
  View log_decay, write, angle_steps;  // per token; without write the factor of each value is 1
  View erase;                          // the delta rule's factor b per token. With it there is no z
  View theta;                          // 2^-64 turns; contiguous
  View positions, key_positions;       // without a token stride only token 0's is stored, and the others follow
  View angle;
  View key_mask;
  View cu_seqlens;                     // bounds of packed sequences, b == 1
  View kv, z;                          // without them the state is zero
  View slots;                          // each sequence's row in kv, z and angle; none: sequence i has row i
  View dout, g_kv, g_z;                // the gradients of out and of the last state
  // What the forward pass saves: the states before blocks, and with erase what each token wrote
  View saved_kv, saved_z, saved_u;
  int64_t map, layout;
  bool causal, normalize, add_eps, want_state, save, save_z, want_log_decay, want_angle_steps, want_write, want_erase, advance;
  double eps;
  // If it is not 0, features are divided by their lengths, and those of queries multiplied by it
  double query_factor;

  // What the binding adds: the results
  View out, dq, dk, dv;
  int type;                     // of q, k, v, out and their gradients, but for dq and dk if value_group > 1
  bool kv_swapped;              // S lies in memory as (rows, g, e, f), which only a step can read
  // (1 or g, kChunk, 2, padded pairs): cos and sin of theta times 0 .. kChunk - 1; or null
  const float* rotation_table;
  float *d_log_decay;         // (b, m, g, units) or null
  float *d_write, *d_erase;   // (b, m, g) or null
  float* d_angle_steps;          // (b, m, g, pairs) or null

  LINROPE_INLINE int64_t state_row(int64_t sequence) const {
    return slots.data ? slots.as<int64_t>()[sequence] : sequence;
  }
};

// What the tokens of a span do to a state that they find: they multiply it by e^log_decay, and add their own sums. The
// gradient of a state passes back through them by the same factor.
struct Transition {
  double log_decay;
};

struct Span {  // the tokens [begin, end) of one sequence, which starts at token `start`, and key/value head
  int64_t sequence, head, begin, end, start;
};

// The states before and after a span, and their gradients, (f, e) and (f) in the caller's order. A null in is zero, a null
// out is not wanted, and in may equal out. With z null there is none.
struct Ends {
  const float* kv_in;
  const double* z_in;
  float* kv_out;
  double* z_out;
  bool save;  // a forward sweep saves what the backward pass requires
  const int64_t* angle_in;  // (pairs): sum of the angle steps before the span; null: zero
  // A backward sweep comes from the end: it gets the gradient of the state after the span, and makes that of the one before
  const float* dkv_in;
  const double* dz_in;
  float* dkv_out;
  double* dz_out;
  double* sums;  // (pairs): the gradients of angle steps, as running sums from the end of the span backwards
};

// Sweeps over `count` spans of the same tokens, of different heads. Without want_output it computes only the states.
typedef void Sweep(const Call&, int count, const Span*, const Ends*, bool want_output);

struct Convolution {  // of tokens (b, n, c), or of packed sequences of one batch row
  View x, y, dy, dx;   // the head's stride is not used, here and below
  View before;         // (rows, taps - 1, c): the inputs before each sequence; null data: zeros
  View d_before;       // (sequences, taps - 1, c)
  int type;            // of all these tensors
  int64_t n, c, sequences;
  int taps;
  bool silu;
  int64_t stride;          // of weight and sums: c rounded up to whole vectors
  const float* weight;     // (taps + 1, stride): the last tap is the token's own; then the bias
  const int64_t* bounds;   // (sequences + 1,) of packed sequences, rising; null: not packed
  const int64_t* slots;    // (sequences,): each sequence's row in before; null: sequence i has row i
};

struct Norm {
  View out, y, gate, dy, d_out, d_gate;  // (b, n, h, e); gate with null data: none
  View v, d_v;                           // (b, n, g, e); null data: no skip connection
  int type;                              // of all these tensors
  int64_t n;
  int h, g, e;
  const float* weight;  // (h, e rounded up to whole vectors); null: no norm
  const float* skip;    // (h,)
  float eps;
  bool over_heads, gate_first, skip_first;
  bool sigmoid;  // the gate's factor is sigmoid(z), not silu(z)
};

struct Linear {  // y (rows, n) = x (rows, k) weight^T + bias
  const float *x, *weight, *bias;  // weight (n, k); bias (n,) or null
  int64_t rows, n, k;
  int64_t stride, y_stride;        // of x's and y's rows
};

struct Isa {
  const char* name;
  int lanes;  // of a vector
  int (*padded_pairs)(const Call&);
  void (*fill_rotation_table)(const Call&, float* table);
  // Adds the span's angle steps to angle (pairs).
  void (*sum_steps)(const Call&, const Span&, int64_t* angle);
  Transition (*transition)(const Call&, const Span&);
  // Applies a transition to a state of kv_count and z_count numbers.
  void (*apply)(const Transition&, int64_t kv_count, float* kv, int64_t z_count, double* z);
  Sweep* forward;        // causal: out. Without want_output: the state, also for bidirectional calls
  Sweep* backward;       // causal: all gradients; bidirectional: those of keys and values. Without want_output: the state's
  Sweep* bidirectional;  // out of the span's queries, from the state of all keys
  Sweep* bidirectional_backward;  // dq of the same; Ends' out receives the gradient of the state
  // One token of the heads [first, last) of a row, in place; kv and z are that row's, z null with erase.
  void (*step)(const Call&, int64_t row, int64_t first, int64_t last, float* kv, double* z);
  // The tokens [begin, end) of a batch row; the backward sweeps add to sums: (taps + 1, stride), (2, h, e rounded up).
  void (*convolve)(const Convolution&, int64_t batch, int64_t begin, int64_t end);
  void (*convolve_backward)(const Convolution&, int64_t batch, int64_t begin, int64_t end, float* sums);
  void (*norm)(const Norm&, int64_t batch, int64_t begin, int64_t end);
  void (*norm_backward)(const Norm&, int64_t batch, int64_t begin, int64_t end, float* sums);
  void (*linear)(const Linear&, float* y, int64_t begin, int64_t end);  // the columns [begin, end) of y
  void (*log_gates)(float* x, int count, float bound);                  // in place; see gates.h
};

#if defined(__x86_64__)
extern const Isa isa_baseline, isa_v3, isa_v4, isa_amx;
#else
extern const Isa isa_baseline;
#endif

}  // namespace linrope
