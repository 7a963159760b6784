// The operators of linrope_native. They use only PyTorch's stable ABI, as it was in 2.10, so that one library serves any
// Python and every PyTorch since then. linrope itself needs 2.11.
#include <tuple>

#include "mixer.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace linrope {

#if defined(__x86_64__)
// True if the processor has AVX-512 BF16 and AMX for bfloat16, and Linux lets this process use the tile registers
static bool may_use_amx() {
#if defined(LINROPE_EMULATED_TILES)
  return true;  // tests/kernels/cpu/emulated_tiles.h
#endif
  unsigned a, b, c, d, bf16, unused;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &bf16, &unused, &unused, &unused))
    return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5, kAmx = 1u << 22 | 1u << 24;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  return (bf16 & kAvx512Bf16) && (d & kAmx) == kAmx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

static std::vector<const Isa*> find_available() {  // best first
  std::vector<const Isa*> sets;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    if (may_use_amx()) sets.push_back(&isa_amx);
    sets.push_back(&isa_v4);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    sets.push_back(&isa_v3);
#endif
  sets.push_back(&isa_baseline);
  return sets;
}
static const std::vector<const Isa*>& available() {
  static const std::vector<const Isa*> sets = find_available();
  return sets;
}
static const Isa* in_use = available()[0];
const Isa& isa() { return *in_use; }

static std::string isas() {
  std::string names;
  for (const Isa* x : available()) names.append(names.empty() ? "" : ",").append(x->name);
  return names;
}
static std::string isa_name() { return isa().name; }
static void set_isa(std::string name) {
  for (const Isa* x : available())
    if (name == x->name) {
      in_use = x;
      return;
    }
  STD_TORCH_CHECK(false, "isa: got ", name, ", expected one of ", isas());
}

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

// A tensor of zeros or of anything; an empty one if it is not wanted
static Tensor empty_if(bool wanted, ScalarType type, std::initializer_list<int64_t> sizes, bool zeros = false) {
  return wanted ? empty(type, sizes, zeros) : empty(type, {0});
}
template <class T> static T* data_if(bool wanted, const Tensor& x) { return wanted ? (T*)x.data_ptr() : nullptr; }

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(Inputs& inputs) {
  Call& c = read_call(inputs);
  const bool queries = inputs.has(kQ), in_place = inputs.has(kSlots), state = c.want_state && !in_place;
  const bool erases = inputs.has(kErase), saves = c.save && c.causal;
  if (in_place) check_angle_heads(c);
  const Schedule schedule(c);
  const auto table = make_rotation_table(c);
  Tensor out = empty_if(queries, scalar_type(c.type), {c.b, c.n, c.h, c.e});
  Tensor last_kv = empty_if(state, ScalarType::Float, {c.sequences, c.g, c.f, c.e});
  Tensor last_z = empty_if(state && !erases, ScalarType::Double, {c.sequences, c.g, c.f});
  Tensor saved_kv = empty_if(saves, ScalarType::Float, {c.blocks, c.g, c.f, c.e});
  const bool saves_z = saves && !erases && (c.normalize || c.want_state);
  Tensor saved_z = empty_if(saves_z, ScalarType::Double, {c.blocks, c.g, c.f});
  Tensor saved_u = empty_if(saves && erases, ScalarType::Float, {c.b, c.m, c.g, c.e});
  if (saves) c.saved_kv = view(saved_kv);
  if (saves_z) c.saved_z = view(saved_z);
  if (saves && erases) c.saved_u = view(saved_u);
  if (queries) {
    c.out = view(out);
    zero_outside(schedule, out);
  }
  run_forward(schedule, in_place ? StateOut{c.kv.as<float>(), c.z.as<double>()}
                                 : StateOut{data_if<float>(state, last_kv), data_if<double>(state && !erases, last_z)});
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

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(Inputs& inputs) {
  Call& c = read_call(inputs);
  check_wanted(inputs);
  c.heads_per_gradient = heads_per_gradient(c);
  const Schedule schedule(c);
  const auto table = make_rotation_table(c);
  const auto real = ScalarType::Float, type = scalar_type(c.type), shared = c.value_group > 1 ? real : type;
  const int64_t dq_heads = c.h / c.heads_per_gradient, dk_heads = c.g / c.heads_per_gradient;
  const bool adds = c.heads_per_gradient > 1, queries = inputs.has(kQ), state = inputs.has(kKv), state_z = inputs.has(kZ);
  Tensor dq = empty_if(queries, shared, {c.b, c.n, dq_heads, c.f}, !inputs.has(kGOut) || adds);
  Tensor dk = empty(shared, {c.b, c.m, dk_heads, c.f}, adds), dv = empty(type, {c.b, c.m, c.g, c.e});
  Tensor d_log_decay = empty_if(c.want_log_decay, real, {c.b, c.m, c.g, c.units});
  Tensor d_write = empty_if(c.want_write, real, {c.b, c.m, c.g});
  Tensor d_erase = empty_if(c.want_erase, real, {c.b, c.m, c.g});
  Tensor d_angle_steps = empty_if(c.want_angle_steps, real, {c.b, c.m, c.g, c.pairs});
  Tensor dkv = empty_if(state, real, {c.sequences, c.g, c.f, c.e});
  Tensor dz = empty_if(state_z, ScalarType::Double, {c.sequences, c.g, c.f});
  if (queries) c.dq = view(dq);
  c.dk = view(dk);
  c.dv = view(dv);
  c.d_log_decay = data_if<float>(c.want_log_decay, d_log_decay);
  c.d_write = data_if<float>(c.want_write, d_write);
  c.d_erase = data_if<float>(c.want_erase, d_erase);
  c.d_angle_steps = data_if<float>(c.want_angle_steps, d_angle_steps);
  for (const Tensor* x : {&dq, &dk, &dv, &d_log_decay, &d_write, &d_erase, &d_angle_steps})
    if (x->dim() > 1) zero_outside(schedule, *x);
  run_backward(schedule, {data_if<float>(state, dkv), data_if<double>(state_z, dz)});
  return {dq, dk, dv, d_log_decay, d_angle_steps, d_write, d_erase, dkv, dz};
}

static std::tuple<Tensor> step(Inputs& inputs) {
  Call& c = read_call(inputs);
  if (c.n != 1) refuse("q: got ", c.n, " tokens, expected 1");
  check_log_decay(c);
  int64_t* position = nullptr;
  if (c.advance) position = advancing_positions(c.sequences, inputs[kPositions]);
  else if (inputs.has(kPositions)) check_positions(inputs.at(kPositions));
  if (c.angle_steps.data) check_angle_heads(c);
  Tensor out = empty(scalar_type(c.type), {c.sequences, 1, c.h, c.e});
  c.out = view(out);
  // Everything is checked: from here on, the state is written
  if (c.angle_steps.data && c.angle.data) {
    add_steps(c);
    c.angle_steps.data = nullptr;
  }
  run_step(c);
  for (int64_t i = 0; position && i < c.sequences; i++) position[i]++;
  return {out};
}

// An operator as PyTorch calls it: takes its arguments from the stack, and leaves its results there
template <unsigned op, auto run> static void boxed(StableIValue* stack, uint64_t, uint64_t) {
  Inputs inputs = from_stack(op, stack);
  std::apply([&](const auto&... results) { ((*stack++ = torch::stable::detail::from(results)), ...); }, run(inputs));
}

}  // namespace linrope

STABLE_TORCH_LIBRARY(linrope_native, m) {
  using namespace linrope;
  m.def(schema("forward", kForward, "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)").c_str());
  m.def(
      schema("backward", kBackward, "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)").c_str());
  m.def(schema("step", kStep, "Tensor").c_str());
  m.def("convolve(Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? cu_seqlens, bool silu) -> Tensor");
  m.def(
      "convolve_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? cu_seqlens, "
      "bool silu) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gated_norm(Tensor out, Tensor? gate, Tensor? v, Tensor? weight, Tensor? skip, float eps, bool over_heads, "
      "bool gate_first, bool skip_first, bool sigmoid) -> Tensor");
  m.def(
      "gated_norm_backward(Tensor gradient, Tensor out, Tensor? gate, Tensor? v, Tensor? weight, Tensor? skip, "
      "float eps, bool over_heads, bool gate_first, bool skip_first, bool sigmoid) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor)");
  m.def(
      "mixer_step(Tensor x, int heads, bool gate, bool forget, Tensor? up, Tensor? up_bias, float bound, int write, "
      "float erase, Tensor? weight, Tensor? bias, Tensor(a!)? inputs, bool silu, Tensor? decay, Tensor(b!) kv, "
      "Tensor(c!)? z, Tensor(d!) positions, Tensor? theta, int layout, int feature_map, float unit, "
      "bool normalize, float eps, Tensor? norm, float norm_eps, bool over_heads, bool gate_first, Tensor? skip, "
      "bool skip_first, Tensor? slots=None) -> Tensor");
  m.def("add_norm(Tensor(a!) x, Tensor? y, Tensor weight, float eps) -> Tensor");
  m.def("silu_product(Tensor x) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("isas() -> str");
  m.def("isa() -> str");
  m.def("set_isa(str name) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(linrope_native, CPU, m) {
  m.impl("forward", &linrope::boxed<linrope::kForward, linrope::forward>);
  m.impl("backward", &linrope::boxed<linrope::kBackward, linrope::backward>);
  m.impl("step", &linrope::boxed<linrope::kStep, linrope::step>);
  m.impl("mixer_step", TORCH_BOX(&linrope::mixer_step));
  m.impl("add_norm", TORCH_BOX(&linrope::add_norm));
  m.impl("silu_product", TORCH_BOX(&linrope::silu_product));
  m.impl("linear", TORCH_BOX(&linrope::linear));
  m.impl("convolve", TORCH_BOX(&linrope::convolve));
  m.impl("convolve_backward", TORCH_BOX(&linrope::convolve_backward));
  m.impl("gated_norm", TORCH_BOX(&linrope::gated_norm));
  m.impl("gated_norm_backward", TORCH_BOX(&linrope::gated_norm_backward));
}
STABLE_TORCH_LIBRARY_IMPL(linrope_native, CompositeExplicitAutograd, m) {
  m.impl("isas", TORCH_BOX(&linrope::isas));
  m.impl("isa", TORCH_BOX(&linrope::isa_name));
  m.impl("set_isa", TORCH_BOX(&linrope::set_isa));
}
