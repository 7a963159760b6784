// The arguments of forward, backward and step: one table of their names, shapes and types makes the operators' schemas,
// takes the arguments from PyTorch's stack, checks them, and fills a Call. Everything that could lead a kernel out of
// bounds is checked.
#pragma once
#include <limits>
#include <iterator>
#include <string_view>
#include <variant>

#include "checks.h"

namespace linrope {

enum Operators : unsigned { kForward = 1, kBackward = 2, kStep = 4, kAll = 7 };

// An axis of a tensor: the member of Call with its size, and the stride of View that it fills
struct Axis {
  const char* name;
  int64_t Call::* size;
  int64_t View::* stride;
  bool or_one = false;      // it may have size 1: all share the one entry
  bool or_missing = false;  // the tensor may lack it if it has size 1
};
namespace axis {
constexpr Axis b{"b", &Call::b, &View::batch}, b1{"b or 1", &Call::b, &View::batch, true};
constexpr Axis rows{"rows", &Call::rows, &View::batch}, sequences{"sequences", &Call::sequences, &View::batch};
constexpr Axis axes{"axes", &Call::axes, &View::batch}, blocks{"blocks", &Call::blocks, &View::batch};
constexpr Axis n{"n", &Call::n, &View::token};
constexpr Axis n1{"n or 1", &Call::n, &View::token, true, true};
constexpr Axis m{"m", &Call::m, &View::token}, m1{"m or 1", &Call::m, &View::token, true};
constexpr Axis h{"h", &Call::h, &View::head}, g{"g", &Call::g, &View::head}, g1{"g or 1", &Call::g, &View::head, true};
constexpr Axis query_heads{"heads of q", &Call::query_heads, &View::head};
constexpr Axis key_heads{"heads of k", &Call::key_heads, &View::head};
constexpr Axis f{"f", &Call::f, &View::last}, e{"e", &Call::e, &View::last}, pairs{"pairs", &Call::pairs, &View::last};
constexpr Axis coordinates{"axes", &Call::axes, &View::last, false, true};
constexpr Axis units{"units", &Call::units, &View::last, false, true};
}  // namespace axis

enum Memory { kAnyStrides, kDenseRows, kContiguous };

struct Argument {
  const char* name;
  unsigned operators;  // those that have the argument
  unsigned required;   // those whose calls always pass it. The others have a default, None or false
  unsigned written;    // those that write to the tensor, as their schema says
  std::variant<View Call::*, int64_t Call::*, bool Call::*, double Call::*> to;  // the member of Call that it fills
  unsigned types = 0;  // of a tensor: a bit for each Type
  Memory memory = kAnyStrides;
  Axis axes[4] = {};
};

constexpr unsigned kInt64s = 1 << kInt64, kBools = 1 << kBool, kBounds = 1 << kInt32 | 1 << kInt64;
constexpr unsigned kFloat32s = 1 << kFloat32, kFloat64s = 1 << kFloat64, kGates = kFloat32s | kFloat64s;
constexpr unsigned kData = kFloat32s | 1 << kBFloat16 | 1 << kFloat16, kFloating = kData | kFloat64s;
constexpr unsigned kTypeOfK = 0;

namespace axis {  // whose names the shapes are written in
// A schema has the required arguments first, then the others, both in this order: frequent ones before rare ones, since
// PyTorch takes longer for a None that is passed than for one left out. cu_seqlens has a shape of its own: see read_packing
constexpr Argument kArguments[] = {
    // name, operators, required in (kAll: in each operator that has it), written by, member of Call, types, strides, shape
    {"k", kAll, kAll, 0, &Call::k, kData, kDenseRows, {b, m, key_heads, f}},
    {"v", kAll, kAll, 0, &Call::v, kTypeOfK, kDenseRows, {b, m, g, e}},
    {"feature_map", kAll, kAll, 0, &Call::map},
    {"query_factor", kAll, kAll, 0, &Call::query_factor},
    {"layout", kAll, kAll, 0, &Call::layout},
    {"causal", kForward | kBackward, kAll, 0, &Call::causal},
    {"normalize", kAll, kAll, 0, &Call::normalize},
    {"eps", kAll, kAll, 0, &Call::eps},
    {"add_eps", kAll, kAll, 0, &Call::add_eps},
    {"want_state", kForward, kAll, 0, &Call::want_state},
    {"save", kForward, kAll, 0, &Call::save},
    {"save_z", kForward, kAll, 0, &Call::save_z},
    {"q", kAll, kStep, 0, &Call::q, kTypeOfK, kDenseRows, {b, n, query_heads, f}},
    {"g_out", kBackward, 0, 0, &Call::dout, kTypeOfK, kDenseRows, {b, n, h, e}},
    {"saved_kv", kBackward, 0, 0, &Call::saved_kv, kFloat32s, kContiguous, {blocks, g, f, e}},
    {"saved_z", kBackward, 0, 0, &Call::saved_z, kFloat64s, kContiguous, {blocks, g, f}},
    {"theta", kAll, 0, 0, &Call::theta, kInt64s, kContiguous, {axes, g1, pairs}},
    {"positions", kAll, 0, kStep, &Call::positions, kInt64s, kContiguous, {b1, n1, coordinates}},
    {"kv", kAll, kStep, kStep, &Call::kv, kFloat32s, kAnyStrides, {rows, g, f, e}},
    {"z", kAll, 0, kStep, &Call::z, kFloat64s, kContiguous, {rows, g, f}},
    {"log_decay", kAll, 0, 0, &Call::log_decay, kGates, kAnyStrides, {b1, n, g1, units}},
    {"want_log_decay", kBackward, 0, 0, &Call::want_log_decay},
    {"write", kAll, 0, 0, &Call::write, kFloating, kAnyStrides, {b1, m, g1}},
    {"want_write", kBackward, 0, 0, &Call::want_write},
    {"key_mask", kAll, 0, 0, &Call::key_mask, kBools, kAnyStrides, {b, m}},
    {"erase", kAll, 0, 0, &Call::erase, kFloating, kAnyStrides, {b1, m, g1}},
    {"want_erase", kBackward, 0, 0, &Call::want_erase},
    {"angle_steps", kAll, 0, 0, &Call::angle_steps, kFloating, kAnyStrides, {b1, n, g1, pairs}},
    {"want_angle_steps", kBackward, 0, 0, &Call::want_angle_steps},
    {"angle", kAll, 0, kStep, &Call::angle, kInt64s, kContiguous, {rows, g1, pairs}},
    {"key_positions", kAll, 0, 0, &Call::key_positions, kInt64s, kContiguous, {b1, m1, coordinates}},
    {"cu_seqlens", kForward | kBackward, 0, 0, &Call::cu_seqlens, kBounds, kContiguous},
    {"slots", kForward | kStep, 0, 0, &Call::slots, kInt64s, kContiguous, {sequences}},
    {"saved_u", kBackward, 0, 0, &Call::saved_u, kFloat32s, kContiguous, {b, m, g, e}},
    {"g_kv", kBackward, 0, 0, &Call::g_kv, kFloat32s, kContiguous, {sequences, g, f, e}},
    {"g_z", kBackward, 0, 0, &Call::g_z, kFloat64s, kContiguous, {sequences, g, f}},
    {"advance", kStep, kAll, 0, &Call::advance},
};
}  // namespace axis
using axis::kArguments;
constexpr int kCount = std::size(kArguments);

constexpr int index_of(std::string_view name) {
  int i = 0;
  while (kArguments[i].name != name) i++;
  return i;
}
constexpr int kGOut = index_of("g_out"), kQ = index_of("q"), kK = index_of("k"), kV = index_of("v");
constexpr int kTheta = index_of("theta"), kAngleSteps = index_of("angle_steps"), kAngle = index_of("angle");
constexpr int kPositions = index_of("positions"), kKeyPositions = index_of("key_positions");
constexpr int kCuSeqlens = index_of("cu_seqlens"), kKv = index_of("kv"), kZ = index_of("z"), kSlots = index_of("slots");
constexpr int kLogDecay = index_of("log_decay"), kWrite = index_of("write"), kErase = index_of("erase");
constexpr int kSavedKv = index_of("saved_kv"), kSavedU = index_of("saved_u");

// An operator's arguments: the tensors as they came, and the Call that read_call fills. It must outlive the call
struct Inputs {
  unsigned op;
  Call call{};
  Maybe tensors[kCount];
  explicit Inputs(unsigned op) : op(op) { call.causal = true; }
  Maybe& operator[](int argument) { return tensors[argument]; }
  // An empty tensor is one, too, but has no data
  bool has(int argument) const { return tensors[argument].has_value(); }
  const Tensor& at(int argument) const { return *tensors[argument]; }
};

// Calls f(i, required) for the arguments of an operator, in the order of its schema
template <class F> void for_arguments(unsigned op, const F& f) {
  for (const bool required : {true, false})
    for (int i = 0; i < kCount; i++)
      if (kArguments[i].operators & op && !(kArguments[i].required & op) != required) f(i, required);
}

inline std::string schema(unsigned op) {
  std::string text = "(";
  char alias = 'a';
  for_arguments(op, [&](int i, bool required) {
    const Argument& x = kArguments[i];
    const bool tensor = std::holds_alternative<View Call::*>(x.to);
    const char* const kinds[] = {"Tensor", "int", "bool", "float"};
    if (text.back() != '(') text += ", ";
    text += kinds[x.to.index()];
    if (x.written & op) text.append("(").append(1, alias++).append("!)");
    if (tensor && !required) text += "?";
    text.append(" ").append(x.name);
    if (!required) text += tensor ? "=None" : "=False";
  });
  return text.append(")");
}

inline Inputs from_stack(unsigned op, Value* stack) {
  Inputs inputs(op);
  for_arguments(op, [&](int i, bool required) {
    const Argument& x = kArguments[i];
    const Value value = *stack++;
    Call& c = inputs.call;
    if (const auto number = std::get_if<int64_t Call::*>(&x.to)) c.*(*number) = take<int64_t>(value);
    else if (const auto flag = std::get_if<bool Call::*>(&x.to)) c.*(*flag) = take<bool>(value);
    else if (const auto real = std::get_if<double Call::*>(&x.to)) c.*(*real) = take<double>(value);
    else if (required) inputs[i] = take<Tensor>(value);
    else inputs[i] = take<Maybe>(value);
  });
  return inputs;
}

// Refuses a tensor that does not fit its row of the table; else fills the row's View
inline void read_tensor(const Argument& x, const Tensor& tensor, Call& c) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t dims = (int64_t)sizes.size();
  View& view = c.*std::get<View Call::*>(x.to);
  view = {};
  int64_t axes = 0;
  bool fits = true;
  for (const Axis& axis : x.axes) {
    if (!axis.size) break;
    const int64_t size = c.*axis.size;
    if (axes == dims && axis.or_missing && size == 1) continue;
    fits = axes < dims && (sizes[axes] == size || (axis.or_one && sizes[axes] == 1));
    if (!fits) break;
    view.*axis.stride = sizes[axes] == 1 ? 0 : strides[axes];
    axes++;
  }
  if (x.axes[0].size && !(fits && axes == dims)) {
    std::string names, expected;
    for (int i = 0; i < 4 && x.axes[i].size; i++) {
      names.append(i ? ", " : "").append(x.axes[i].name);
      expected.append(i ? ", " : "").append(std::to_string(c.*x.axes[i].size));
    }
    refuse(x.name, ": got shape ", shape_text(tensor), ", expected (", names, ") = (", expected,
           x.axes[1].size ? ")" : ",)");
  }
  check_device(x.name, tensor);
  view.type = tensor.type();
  view.data = (char*)tensor.data_ptr();
  require(x.types != kTypeOfK || view.type == c.type, x.name, ": got another dtype, expected k's");
  if (x.types != kTypeOfK) check_types(x.name, view.type, x.types);
  if (x.memory == kContiguous) check_contiguous(x.name, tensor);
  if (x.memory == kDenseRows) check_last_stride(x.name, tensor);
}

// q, k and v, with the words of linrope/operation/checks.py: a step leaves the checks to this function
inline void read_tokens(Inputs& x) {
  Call& c = x.call;
  const bool has_q = x.has(kQ);
  for (const int i : {kQ, kK, kV})
    if (x.has(i) && x.at(i).dim() != 4)
      refuse(kArguments[i].name, ": got shape ", shape_text(x.at(i)), ", expected (batch, length, heads, dim)");
  const auto k = x.at(kK).sizes(), v = x.at(kV).sizes(), q = (has_q ? x.at(kQ) : x.at(kK)).sizes();
  const int64_t heads = k[2];
  c.b = k[0];
  c.m = k[1];
  c.n = q[1];
  c.key_heads = heads;
  c.query_heads = q[2];
  c.g = v[2];
  c.f = k[3];
  c.e = v[3];
  if (v[0] != c.b || v[1] != c.m || heads > c.g || (heads ? c.g % heads : c.g))
    refuse("k, v: got ", shape_text(x.at(kK)), ", ", shape_text(x.at(kV)),
           ", expected (b, m, g, d), (b, m, a multiple of g, e)");
  if (q[0] != c.b) refuse("k: got batch ", c.b, ", expected q's ", q[0]);
  if (q[3] != c.f || !c.f) refuse("q, k: got head dims ", q[3], ", ", c.f, ", expected equal and positive ones");
  if (!c.e) refuse("v: got head dim 0, expected a positive one");
  if (heads ? c.query_heads % heads : c.query_heads)
    refuse("k: got ", heads, " heads, expected a divisor of q's ", c.query_heads);
  if (c.g != heads && c.query_heads != heads)
    refuse("v: got ", c.g, " heads, expected k's ", heads, "; more heads of v require q to have ", heads,
           " heads too, not ", c.query_heads);
  if (c.causal && c.n != c.m) refuse("k: got length ", c.m, ", expected q's ", c.n, " with causal=True");
  if (c.f > kMaxDim || c.e > kMaxDim)
    refuse("k, v: got ", c.f, " features and ", c.e, " values, expected 1 to ", kMaxDim);
  c.blocks = c.m ? c.b * ((c.m - 1) / kBlock) : 0;
  c.value_group = heads ? c.g / heads : 1;
  c.heads_per_gradient = 1;
  c.h = has_q ? c.query_heads * c.value_group : c.g;
  c.type = x.at(kK).type();
  check_types("k", c.type, kData);
}

// The sequences of a packed batch row, and the rows of a pool
inline void read_packing(Inputs& x) {
  Call& c = x.call;
  c.sequences = c.b;
  if (x.has(kCuSeqlens)) {
    const Tensor& bounds = x.at(kCuSeqlens);
    check_cu_seqlens(bounds);
    if (c.b != 1 || c.n != c.m)
      refuse("cu_seqlens: got a batch of ", c.b, ", ", c.n, " queries and ", c.m,
             " keys, expected a batch of 1 and as many queries as keys");
    c.sequences = bounds.size(0) - 1;
  }
  if (x.has(kErase) && x.has(kZ)) refuse("z: got a tensor with erase, expected none: the delta rule has no normalizer");
  if (x.op == kStep && !x.has(kErase) && !x.has(kZ))
    refuse("erase: got None for a state without z, expected a number per token, as in the calls that made the state");
  if (!x.has(kErase) && x.has(kKv) != x.has(kZ)) refuse("kv, z: got one of them, expected both or none");
  if (x.has(kSlots) && !(x.has(kKv) && x.at(kKv).dim() == 4))
    refuse("slots: got a tensor without kv and z, expected a pool's kv and z with it");
  c.rows = x.has(kSlots) ? x.at(kKv).size(0) : c.sequences;
}

inline void read_rotation(Inputs& x) {
  Call& c = x.call;
  c.axes = 1;
  c.units = 1;
  if (c.layout < kNone || c.layout > kHalf) refuse("layout: got ", c.layout, ", expected 0, 1 or 2");
  const bool rotates = x.has(kTheta) || x.has(kAngleSteps) || x.has(kAngle);
  if (rotates != (c.layout != kNone))
    refuse("layout: got ", c.layout, ", expected ", rotates ? "1 or 2 with" : "0 without",
           " theta, angle_steps or angle");
  if (!rotates) return;
  const int source = x.has(kTheta) ? kTheta : x.has(kAngleSteps) ? kAngleSteps : kAngle;
  const auto sizes = x.at(source).sizes();
  c.pairs = sizes.size() ? sizes[sizes.size() - 1] : 0;
  if (2 * c.pairs > c.f)
    refuse(kArguments[source].name, ": got ", c.pairs, " pairs, expected at most half of ", c.f, " features");
  if (x.has(kTheta)) {
    if (sizes.size() != 3 || sizes[0] < 1 || sizes[0] > 64)
      refuse("theta: got shape ", shape_text(x.at(kTheta)), ", expected (1 to 64 axes, g or 1, pairs)");
    c.axes = sizes[0];
    if (!x.has(kPositions)) refuse("positions: got None, expected int64 positions with theta");
  }
  if (x.has(kAngleSteps)) {  // with the words of linrope/operation/checks.py
    const Tensor& steps = x.at(kAngleSteps);
    if (c.n != c.m) refuse("angle_steps: got ", c.n, " queries and ", c.m, " keys, expected equal numbers");
    const auto got = steps.sizes();
    if (got.size() != 4 || (got[0] != c.b && got[0] != 1) || got[1] != c.n || (got[2] != c.g && got[2] != 1))
      refuse("angle_steps: got shape ", shape_text(steps), ", expected (b or 1, n, g or 1, pairs) with b, n, g = (",
             c.b, ", ", c.n, ", ", c.g, ")");
    if (got[3] != c.pairs)
      refuse("angle_steps: got ", got[3], " pairs, expected ", c.pairs, ", the pairs of rotary");
  }
}

// The units of log_decay, with the words of linrope/operation/checks.py
inline void read_units(Inputs& x) {
  Call& c = x.call;
  const Tensor& gates = x.at(kLogDecay);
  const auto got = gates.sizes();
  const int64_t units = c.f - c.pairs, sizes[] = {c.b, c.n, c.g, units};
  bool fits = got.size() == 3 || got.size() == 4;
  for (size_t i = 0; fits && i < got.size(); i++) fits = got[i] == sizes[i] || (got[i] == 1 && i % 2 == 0);
  if (!fits)
    refuse("log_decay: got shape ", shape_text(gates), ", expected (b or 1, n, g or 1) = (", c.b, ", ", c.n, ", ", c.g,
           "), or (", c.b, ", ", c.n, ", ", c.g, ", ", units, "): per pair that turns, then per other feature");
  c.units = got.size() == 4 ? units : 1;
}

// True if kv (rows, g, f, e) lies in memory as (rows, g, e, f), and not as its shape says
inline bool is_swapped(const Tensor& kv) {
  const int64_t g = kv.size(1), f = kv.size(2), e = kv.size(3), strides[4] = {g * f * e, f * e, 1, f};
  bool swapped = !kv.is_contiguous();
  for (int i = 0; i < 4; i++) swapped &= kv.size(i) == 1 || kv.stride(i) == strides[i];
  return swapped;
}

// What the rows of the table do not say about the state and the positions
inline void check_together(Inputs& x) {
  Call& c = x.call;
  if (x.has(kKv)) {
    c.kv_swapped = x.op == kStep && is_swapped(x.at(kKv));
    if (!c.kv_swapped) check_contiguous("kv", x.at(kKv));
  }
  for (int64_t i = 0; c.slots.data && i < c.sequences; i++)
    if (const int64_t slot = c.state_row(i); slot < 0 || slot >= c.rows)
      refuse("slots: got ", slot, ", expected 0 .. ", c.rows - 1);
  if (x.op == kBackward && c.causal && c.blocks && !x.has(kSavedKv))
    refuse("saved_kv: got None, expected what forward saves with save=True");
  if (x.op == kBackward && x.has(kErase) && !x.has(kSavedU))
    refuse("saved_u: got None with erase, expected what forward saves with save=True");
  if (c.log_decay.data && !c.causal)
    refuse("log_decay: got causal=False, expected causal=True: a gate decays earlier keys");
  if (!c.theta.data) {
    c.positions = c.key_positions = {};
    return;
  }
  if (!x.has(kKeyPositions)) {
    if (c.n != c.m && (c.positions.token || c.axes > 1))
      refuse("key_positions: got None for ", c.m, " keys and ", c.n, " queries, expected (b or 1, ", c.m, ")");
    c.key_positions = c.positions;
  }
  if (c.axes > 1 && ((c.n > 1 && !c.positions.token) || (c.m > 1 && !c.key_positions.token)))
    refuse("positions: got coordinates of one token, expected those of each");
}

// Checks all arguments, and fills the Call of an operator with them
inline Call& read_call(Inputs& x) {
  Call& c = x.call;
  if (c.map < kIdentity || c.map > kSilu) refuse("feature_map: got ", c.map, ", expected 0 .. ", (int)kSilu);
  if (!(c.query_factor >= 0 && c.query_factor <= std::numeric_limits<float>::max()))
    refuse("query_factor: got ", c.query_factor, ", expected 0 or a positive finite number");
  if (c.normalize && !(c.eps > 0)) refuse("eps: got ", c.eps, ", expected a positive number");
  if (x.has(kErase) && c.normalize) refuse("normalize: got true with erase, expected false");
  if (x.has(kErase) && !c.causal) refuse("erase: got causal=False, expected causal=True");
  read_tokens(x);
  read_packing(x);
  read_rotation(x);
  if (x.has(kLogDecay)) read_units(x);
  for (int i = 0; i < kCount; i++)
    if (x.has(i)) read_tensor(kArguments[i], x.at(i), c);
  check_together(x);
  return c;
}

}  // namespace linrope
