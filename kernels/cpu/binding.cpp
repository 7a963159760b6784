// The operators of linrope_native. They use PyTorch's stable ABI of 2.10, so that one library serves any Python and
// PyTorch that linrope supports.
#include <cstring>
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
  if (!c.theta || c.axes != 1 || c.angle_steps.data || (c.n < 2 && c.m < 2)) return table;
  table.resize((c.theta_head ? c.g : 1) * kChunk * 2 * isa().padded_pairs(c));
  isa().fill_rotation_table(c, table.data());
  c.rotation_table = table.data();
  return table;
}

// Adds the angle steps of each sequence to the state's angle
static void add_steps(const Call& c, const Schedule& x, int64_t* angle) {
  const int64_t heads = c.angle_head ? c.g : 1;
  for (int64_t sequence = 0; sequence < c.sequences; sequence++)
    for (int64_t head = 0; head < heads; head++) {
      Span span = x.span((sequence * c.g + head) * x.segments, c.m);
      span.end = x.span((sequence * c.g + head + 1) * x.segments - 1, c.m).end;
      const int64_t row = c.slots ? c.slots[sequence] : sequence;
      isa().sum_steps(c, span, angle + row * c.angle_row + head * c.angle_head);
    }
}
static void check_angle_heads(const Call& c) {
  STD_TORCH_CHECK(!c.angle || !c.angle_steps.head || c.angle_head || c.g == 1,
                  "angle: got 1 head, expected angle_steps' ", c.g);
}

using OutAndState = std::tuple<Tensor, Tensor, Tensor>;

static OutAndState forward(Maybe q, Tensor k, Tensor v, int64_t feature_map, Maybe log_decay, Maybe write,
                           Maybe theta, Maybe positions, Maybe key_positions, Maybe angle_steps, Maybe angle,
                           Maybe key_mask, Maybe cu_seqlens, Maybe kv, Maybe z, Maybe slots, int64_t layout, bool causal,
                           bool normalize, double eps, bool add_eps, bool want_state) {
  Call c = read_call({q, k, v, feature_map, log_decay, write, theta, positions, key_positions, angle_steps, angle,
                      key_mask, cu_seqlens, kv, z, slots, layout, causal, normalize, eps, add_eps});
  if (slots) check_angle_heads(c);
  const Schedule schedule(c);
  const auto table = make_rotation_table(c);
  const auto type = k.scalar_type();
  Tensor out = q ? empty(type, {k.size(0), c.n, c.h, c.e}) : empty(type, {0});
  const bool state = want_state && !slots;
  Tensor last_kv = state ? empty(ScalarType::Float, {c.sequences, c.g, c.f, c.e}) : empty(ScalarType::Float, {0});
  Tensor last_z = state ? empty(ScalarType::Double, {c.sequences, c.g, c.f}) : empty(ScalarType::Double, {0});
  if (q) c.out = view(out), zero_outside(schedule, out);
  float* to_kv = slots ? (float*)kv->data_ptr() : state ? (float*)last_kv.data_ptr() : nullptr;
  double* to_z = slots ? (double*)z->data_ptr() : state ? (double*)last_z.data_ptr() : nullptr;
  run_forward(schedule, to_kv, to_z);
  if (slots && c.angle && c.angle_steps.data) add_steps(c, schedule, (int64_t*)angle->data_ptr());
  return {out, last_kv, last_z};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Maybe g_out, Maybe g_kv, Maybe g_z, Maybe q, Tensor k, Tensor v, int64_t feature_map, Maybe log_decay, Maybe write,
    Maybe theta, Maybe positions, Maybe key_positions, Maybe angle_steps, Maybe angle, Maybe key_mask,
    Maybe cu_seqlens, Maybe kv, Maybe z, int64_t layout, bool causal, bool normalize, double eps, bool add_eps,
    bool want_log_decay, bool want_angle_steps, bool want_write) {
  const Maybe none;
  Call c = read_call({q, k, v, feature_map, log_decay, write, theta, positions, key_positions, angle_steps, angle,
                      key_mask, cu_seqlens, kv, z, none, layout, causal, normalize, eps, add_eps});
  const auto type = k.scalar_type();
  const int64_t b = k.size(0);
  STD_TORCH_CHECK(q || !g_out, "g_out: got a tensor without q, expected none");
  STD_TORCH_CHECK(!want_angle_steps || c.angle_steps.data,
                  "want_angle_steps: got true without angle_steps, expected false");
  STD_TORCH_CHECK(!want_log_decay || c.log_decay.data, "want_log_decay: got true without log_decay, expected false");
  STD_TORCH_CHECK(!want_write || c.write.data, "want_write: got true without write, expected false");
  if (g_out) {
    check_shape("g_out", *g_out, {b, c.n, c.h, c.e}), check_rows("g_out", *g_out, type);
    c.dout = view(*g_out);
  }
  if (g_kv) {
    check_shape("g_kv", *g_kv, {c.sequences, c.g, c.f, c.e}), check_contiguous("g_kv", *g_kv);
    check_type("g_kv", *g_kv, ScalarType::Float, "float32");
    c.g_kv = (const float*)g_kv->data_ptr();
  }
  if (g_z) {
    check_shape("g_z", *g_z, {c.sequences, c.g, c.f}), check_contiguous("g_z", *g_z);
    check_type("g_z", *g_z, ScalarType::Double, "float64");
    c.g_z = (const double*)g_z->data_ptr();
  }
  c.heads_per_gradient = heads_per_gradient(c);
  const Schedule schedule(c);
  const auto table = make_rotation_table(c);
  const auto shared = c.value_group > 1 ? ScalarType::Float : type;
  const int64_t dq_heads = c.h / c.heads_per_gradient, dk_heads = c.g / c.heads_per_gradient;
  const bool adds = c.heads_per_gradient > 1;
  Tensor dq = q ? empty(shared, {b, c.n, dq_heads, c.f}, !g_out || adds) : empty(shared, {0});
  Tensor dk = empty(shared, {b, c.m, dk_heads, c.f}, adds), dv = empty(type, {b, c.m, c.g, c.e});
  Tensor d_log_decay = want_log_decay ? empty(ScalarType::Float, {b, c.m, c.g}) : empty(ScalarType::Float, {0});
  Tensor d_write = want_write ? empty(ScalarType::Float, {b, c.m, c.g}) : empty(ScalarType::Float, {0});
  Tensor d_angle_steps =
      want_angle_steps ? empty(ScalarType::Float, {b, c.m, c.g, c.pairs}) : empty(ScalarType::Float, {0});
  Tensor dkv = kv ? empty(ScalarType::Float, {c.sequences, c.g, c.f, c.e}) : empty(ScalarType::Float, {0});
  Tensor dz = kv ? empty(ScalarType::Double, {c.sequences, c.g, c.f}) : empty(ScalarType::Double, {0});
  if (q) c.dq = view(dq);
  c.dk = view(dk), c.dv = view(dv);
  if (want_log_decay) c.d_log_decay = (float*)d_log_decay.data_ptr();
  if (want_write) c.d_write = (float*)d_write.data_ptr();
  if (want_angle_steps) c.d_angle_steps = (float*)d_angle_steps.data_ptr();
  for (const Tensor* x : {&dq, &dk, &dv, &d_log_decay, &d_write, &d_angle_steps})
    if (x->dim() > 1) zero_outside(schedule, *x);
  std::vector<float> saved(g_out && causal ? 2 * b * c.n * c.h : 0);
  c.inverse_den = saved.data(), c.dden = saved.data() + saved.size() / 2;
  run_backward(schedule, {kv ? (float*)dkv.data_ptr() : nullptr, kv ? (double*)dz.data_ptr() : nullptr});
  return {dq, dk, dv, d_log_decay, d_angle_steps, d_write, dkv, dz};
}

static Tensor step(Tensor q, Tensor k, Tensor v, int64_t feature_map, Maybe log_decay, Maybe write, Maybe theta,
                   Maybe positions, Maybe key_positions, Maybe angle_steps, Maybe angle, Maybe key_mask, Tensor kv,
                   Tensor z, Maybe slots, int64_t layout, bool normalize, double eps, bool add_eps, bool advance) {
  const Maybe query = q, state = kv, sums = z, none;
  Call c = read_call({query, k, v, feature_map, log_decay, write, theta, positions, key_positions, angle_steps, angle,
                      key_mask, none, state, sums, slots, layout, true, normalize, eps, add_eps, true});
  STD_TORCH_CHECK(c.n == 1, "q: got ", c.n, " tokens, expected 1");
  int64_t* position = nullptr;
  if (advance) {
    position = advancing_positions(c, positions);
    const PerToken& gate = c.log_decay;
    for (int64_t i = 0; gate.data && i < c.sequences * c.g; i++) {
      const int64_t at = i / c.g * gate.batch + i % c.g * gate.head;
      const double a = gate.type == kFloat32 ? ((const float*)gate.data)[at] : ((const double*)gate.data)[at];
      STD_TORCH_CHECK(!(a > 0), "log_decay: got ", a, ", expected numbers <= 0");
    }
  }
  Tensor out = empty(k.scalar_type(), {c.sequences, 1, c.h, c.e});
  c.out = view(out);
  if (c.angle_steps.data && c.angle) {
    check_angle_heads(c);
    add_steps(c, Schedule(c), (int64_t*)angle->data_ptr());
    c.angle_steps.data = nullptr;
  }
  run_step(c, kv, z, position);
  return out;
}

}  // namespace linrope

STABLE_TORCH_LIBRARY(linrope_native, m) {
  m.def(
      "forward(Tensor? q, Tensor k, Tensor v, int feature_map, Tensor? log_decay, Tensor? write, Tensor? theta, "
      "Tensor? positions, Tensor? key_positions, Tensor? angle_steps, Tensor? angle, Tensor? key_mask, "
      "Tensor? cu_seqlens, Tensor? kv, Tensor? z, Tensor? slots, int layout, bool causal, bool normalize, float eps, "
      "bool add_eps, bool want_state) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor? g_out, Tensor? g_kv, Tensor? g_z, Tensor? q, Tensor k, Tensor v, int feature_map, "
      "Tensor? log_decay, Tensor? write, Tensor? theta, Tensor? positions, Tensor? key_positions, Tensor? angle_steps, "
      "Tensor? angle, Tensor? key_mask, Tensor? cu_seqlens, Tensor? kv, Tensor? z, int layout, bool causal, "
      "bool normalize, float eps, bool add_eps, bool want_log_decay, bool want_angle_steps, bool want_write) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "step(Tensor q, Tensor k, Tensor v, int feature_map, Tensor? log_decay, Tensor? write, Tensor? theta, "
      "Tensor(d!)? positions, Tensor? key_positions, Tensor? angle_steps, Tensor(a!)? angle, Tensor? key_mask, "
      "Tensor(b!) kv, Tensor(c!) z, Tensor? slots, int layout, bool normalize, float eps, bool add_eps, "
      "bool advance=False) -> Tensor");
  m.def("convolve(Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? cu_seqlens, bool silu) -> Tensor");
  m.def(
      "convolve_backward(Tensor gradient, Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? cu_seqlens, "
      "bool silu) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gated_norm(Tensor out, Tensor? gate, Tensor? v, Tensor? weight, Tensor? skip, float eps, bool over_heads, "
      "bool gate_first, bool skip_first) -> Tensor");
  m.def(
      "gated_norm_backward(Tensor gradient, Tensor out, Tensor? gate, Tensor? v, Tensor? weight, Tensor? skip, "
      "float eps, bool over_heads, bool gate_first, bool skip_first) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "mixer_step(Tensor x, int heads, bool gate, bool forget, bool write, bool tied, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? inputs, bool silu, Tensor? decay, Tensor(b!) kv, Tensor(c!) z, Tensor(d!) positions, Tensor? theta, "
      "int layout, int feature_map, bool normalize, float eps, Tensor? norm, float norm_eps, bool over_heads, "
      "bool gate_first, Tensor? skip, bool skip_first, Tensor? slots=None) -> Tensor");
  m.def("add_norm(Tensor(a!) x, Tensor? y, Tensor weight, float eps) -> Tensor");
  m.def("silu_product(Tensor x) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("isas() -> str");
  m.def("isa() -> str");
  m.def("set_isa(str name) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(linrope_native, CPU, m) {
  m.impl("forward", TORCH_BOX(&linrope::forward));
  m.impl("backward", TORCH_BOX(&linrope::backward));
  m.impl("step", TORCH_BOX(&linrope::step));
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
