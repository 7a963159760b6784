// The operators of linrope_native, and the library's own functions, which Python calls by ctypes.
#include "mixer.h"
#include "processor.h"

#if defined(_WIN32)
#define LINROPE_EXPORT extern "C" __declspec(dllexport)
#else
#define LINROPE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace linrope {

PyTorch pytorch;
static const std::vector<const Isa*> available = available_sets();  // best first
static const Isa* in_use = available[0];
const Isa& isa() { return *in_use; }

// The table of cos and sin of theta times 0 .. kChunk - 1, for calls of several tokens with one axis and without angle
// steps; else it is empty
static std::vector<float> make_rotation_table(Call& c) {
  std::vector<float> table;
  if (!c.theta.data || c.axes != 1 || c.angle_steps.data || (c.n < 2 && c.m < 2)) return table;
  table.resize((c.theta.head ? c.g : 1) * kChunk * 2 * isa().padded_pairs(c));
  isa().fill_rotation_table(c, table.data());
  c.rotation_table = table.data();
  return table;
}

// Adds the angle steps of each sequence to the state's angle
static void add_steps(const Call& c) {
  const Schedule x(c);
  const int64_t heads = c.angle.head ? c.g : 1;
  for (int64_t sequence = 0; sequence < c.sequences; sequence++)
    for (int64_t head = 0; head < heads; head++) {
      Span span = x.span((sequence * c.g + head) * x.segments, c.m);
      span.end = x.span((sequence * c.g + head + 1) * x.segments - 1, c.m).end;
      isa().sum_steps(c, span, c.angle.as<int64_t>() + c.state_row(sequence) * c.angle.batch + head * c.angle.head);
    }
}
static void check_angle_heads(const Call& c) {
  if (c.angle.data && c.angle_steps.head && !c.angle.head && c.g != 1)
    refuse("angle: got 1 head, expected angle_steps' ", c.g);
}

#define LINROPE_RESULTS(RESULT)                                           \
  RESULT(Tensor, out) RESULT(Maybe, kv) RESULT(Maybe, z)                  \
  RESULT(Maybe, saved_kv) RESULT(Maybe, saved_z) RESULT(Maybe, saved_u)
LINROPE_RECORD(Results, LINROPE_RESULTS)

static Results forward(Inputs& inputs) {
  Call& c = read_call(inputs);
  const bool queries = inputs.has(kQ), in_place = inputs.has(kSlots), state = c.want_state && !in_place;
  const bool erases = inputs.has(kErase), saves = c.save && c.causal && c.blocks;
  if (in_place) check_angle_heads(c);
  const Schedule schedule(c);
  const auto table = make_rotation_table(c);
  const Tensor out = queries ? empty(c.type, {c.b, c.n, c.h, c.e}) : empty(c.type, {0});
  const Maybe last_kv = empty_if(state, kFloat32, {c.sequences, c.g, c.f, c.e});
  const Maybe last_z = empty_if(state && !erases, kFloat64, {c.sequences, c.g, c.f});
  const Maybe saved_kv = empty_if(saves, kFloat32, {c.blocks, c.g, c.f, c.e});
  const Maybe saved_z = empty_if(saves && c.save_z, kFloat64, {c.blocks, c.g, c.f});
  const Maybe saved_u = empty_if(c.save && c.causal && erases, kFloat32, {c.b, c.m, c.g, c.e});
  c.saved_kv = view_of(saved_kv);
  c.saved_z = view_of(saved_z);
  c.saved_u = view_of(saved_u);
  if (queries) {
    c.out = view(out);
    zero_outside(schedule, out);
  }
  run_forward(schedule, in_place ? StateOut{c.kv.as<float>(), c.z.as<double>()}
                                 : StateOut{data_of<float>(last_kv), data_of<double>(last_z)});
  if (in_place && c.angle.data && c.angle_steps.data) add_steps(c);
  return {out, last_kv, last_z, saved_kv, saved_z, saved_u};
}

static void check_wanted(const Inputs& inputs) {
  const Call& c = inputs.call;
  if (inputs.has(kGOut) && !inputs.has(kQ)) refuse("g_out: got a tensor without q, expected none");
  if (c.want_angle_steps && !c.angle_steps.data)
    refuse("want_angle_steps: got true without angle_steps, expected false");
  if (c.want_log_decay && !c.log_decay.data) refuse("want_log_decay: got true without log_decay, expected false");
  if (c.want_write && !c.write.data) refuse("want_write: got true without write, expected false");
  if (c.want_erase && !c.erase.data) refuse("want_erase: got true without erase, expected false");
}

// Named after the inputs
#define LINROPE_GRADIENTS(RESULT)                                                                                 \
  RESULT(Tensor, q) RESULT(Tensor, k) RESULT(Tensor, v) RESULT(Maybe, log_decay) RESULT(Maybe, angle_steps)       \
  RESULT(Maybe, write) RESULT(Maybe, erase) RESULT(Maybe, kv) RESULT(Maybe, z)
LINROPE_RECORD(Gradients, LINROPE_GRADIENTS)

static Gradients backward(Inputs& inputs) {
  Call& c = read_call(inputs);
  check_wanted(inputs);
  c.heads_per_gradient = heads_per_gradient(c);
  const Schedule schedule(c);
  const auto table = make_rotation_table(c);
  const int real = kFloat32, type = c.type, shared = c.value_group > 1 ? real : type;
  const int64_t dq_heads = c.h / c.heads_per_gradient, dk_heads = c.g / c.heads_per_gradient;
  const bool adds = c.heads_per_gradient > 1, queries = inputs.has(kQ);
  const Tensor dq = queries ? empty(shared, {c.b, c.n, dq_heads, c.f}, !inputs.has(kGOut) || adds) : empty(shared, {0});
  const Tensor dk = empty(shared, {c.b, c.m, dk_heads, c.f}, adds), dv = empty(type, {c.b, c.m, c.g, c.e});
  const Maybe d_log_decay = empty_if(c.want_log_decay, real, {c.b, c.m, c.g, c.units});
  const Maybe d_write = empty_if(c.want_write, real, {c.b, c.m, c.g});
  const Maybe d_erase = empty_if(c.want_erase, real, {c.b, c.m, c.g});
  const Maybe d_angle_steps = empty_if(c.want_angle_steps, real, {c.b, c.m, c.g, c.pairs});
  const Maybe dkv = empty_if(inputs.has(kKv), real, {c.sequences, c.g, c.f, c.e});
  const Maybe dz = empty_if(inputs.has(kZ), kFloat64, {c.sequences, c.g, c.f});
  if (queries) c.dq = view(dq);
  c.dk = view(dk);
  c.dv = view(dv);
  c.d_log_decay = data_of<float>(d_log_decay);
  c.d_write = data_of<float>(d_write);
  c.d_erase = data_of<float>(d_erase);
  c.d_angle_steps = data_of<float>(d_angle_steps);
  for (const Tensor* x : {&dq, &dk, &dv})
    if (x->dim() > 1) zero_outside(schedule, *x);
  for (const Maybe* x : {&d_log_decay, &d_write, &d_erase, &d_angle_steps})
    if (*x) zero_outside(schedule, **x);
  run_backward(schedule, {data_of<float>(dkv), data_of<double>(dz)});
  return {dq, dk, dv, d_log_decay, d_angle_steps, d_write, d_erase, dkv, dz};
}

static Tensor step(Inputs& inputs) {
  Call& c = read_call(inputs);
  if (c.n != 1) refuse("q: got ", c.n, " tokens, expected 1");
  check_log_decay(c);
  int64_t* position = nullptr;
  if (c.advance) position = advancing_positions(c.sequences, inputs[kPositions]);
  else if (inputs.has(kPositions)) check_positions(inputs.at(kPositions));
  if (c.angle_steps.data) check_angle_heads(c);
  Tensor out = empty(c.type, {c.sequences, 1, c.h, c.e});
  c.out = view(out);
  // Everything is checked: from here on, the state is written
  if (c.angle_steps.data && c.angle.data) {
    add_steps(c);
    c.angle_steps.data = nullptr;
  }
  run_step(c);
  for (int64_t i = 0; position && i < c.sequences; i++) position[i]++;
  return out;
}

// An operator of the table in arguments.h
template <unsigned op, auto run> static void from_table(Value* stack, uint64_t, uint64_t count) {
  leave(stack, count, [&] {
    Inputs inputs = from_stack(op, stack);
    return run(inputs);
  });
}

static void register_operators() {
  constexpr uint64_t kAbi = 0x020a000000000000;  // the stable ABI of PyTorch 2.10, which later releases keep
  LibraryHandle definitions, kernels;  // never deleted: the operators would go with them
  succeed(pytorch.aoti_torch_library_init_def("linrope_native", __FILE__, __LINE__, &definitions), "define operators");
  succeed(pytorch.aoti_torch_library_init_impl("linrope_native", "CPU", __FILE__, __LINE__, &kernels), "add operators");
  const auto add = [&](const std::string& name, const std::string& schema, Operator run) {
    succeed(pytorch.aoti_torch_library_def(definitions, (name + schema).c_str()), name.c_str());
    succeed(pytorch.torch_library_impl(kernels, name.c_str(), run, kAbi), name.c_str());
  };
  const auto add_boxed = [&]<class F>(const char* name, F) { add(name, F::schema(), F::call); };
  add("forward", schema(kForward) + results_in_schema<Results>(), from_table<kForward, forward>);
  add("backward", schema(kBackward) + results_in_schema<Gradients>(), from_table<kBackward, backward>);
  add("step", schema(kStep) + results_in_schema<Tensor>(), from_table<kStep, step>);
  add_boxed("convolve", Boxed<convolve>());
  add_boxed("convolve_backward", Boxed<convolve_backward>());
  add_boxed("gated_norm", Boxed<gated_norm>());
  add_boxed("gated_norm_backward", Boxed<gated_norm_backward>());
  add_boxed("mixer_step", Boxed<mixer_step>());
  add_boxed("add_norm", Boxed<add_norm>());
  add_boxed("swiglu", Boxed<swiglu>());
  add_boxed("linear", Boxed<linear>());
}

}  // namespace linrope

// The names of PyTorch's functions that the library calls, in the order in which linrope_start takes their addresses
LINROPE_EXPORT const char* linrope_pytorch_functions() {
#define LINROPE_NAME(name, arguments) #name " "
  return LINROPE_PYTORCH(LINROPE_NAME);
}
// Defines the operators. Returns null, or the reason why it cannot
LINROPE_EXPORT const char* linrope_start(const void* const* addresses) {
  static std::string reason;
  memcpy((void*)&linrope::pytorch, addresses, sizeof linrope::pytorch);
  try {
    linrope::register_operators();
    return nullptr;
  } catch (const std::exception& error) {
    return (reason = error.what()).c_str();
  }
}
// What Python has to know of the kernels, in JSON: limits, and names in the order of their numbers
LINROPE_EXPORT const char* linrope_facts() {
  using namespace linrope;
  static const std::string facts = [] {
    std::ostringstream text;
    text << R"({"max_dim": )" << kMaxDim << R"(, "max_taps": )" << kMaxTaps << R"(, "max_values": )" << kMaxValues
         << R"(, "max_position": )" << kMaxPosition << R"(, "block": )" << kBlock << R"(, "unit_eps": )" << kUnitEps
         << R"(, "maps": )" LINROPE_MAPS R"(, "layouts": )" LINROPE_LAYOUTS R"(, "write_factors": )" LINROPE_WRITE_FACTORS "}";
    return text.str();
  }();
  return facts.c_str();
}
// The error of the last operator that returned undefined tensors in this thread: "ValueError: .."
LINROPE_EXPORT const char* linrope_error() { return linrope::failure.said; }
// The digest of the sources
LINROPE_EXPORT const char* linrope_build() { return "linrope build " LINROPE_BUILD; }
// The i-th best instruction set that this machine can run, or null
LINROPE_EXPORT const char* linrope_instruction_set(size_t i) {
  return i < linrope::available.size() ? linrope::available[i]->name : nullptr;
}
LINROPE_EXPORT void linrope_use_instruction_set(size_t i) { linrope::in_use = linrope::available[i]; }
