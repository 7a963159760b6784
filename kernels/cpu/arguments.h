// Checks the arguments and makes a Call of them. Everything that could lead a kernel out of bounds is checked; an error
// names the argument, what was expected and, but for dtypes and devices, what it got.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "call.h"

namespace linrope {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

const Isa& isa();

inline std::string shape_text(const Tensor& x) {
  std::string text;
  for (int64_t i = 0; i < x.dim(); i++) text.append(i ? ", " : "(").append(std::to_string(x.size(i)));
  return text.empty() ? "()" : text.append(")");
}

// An expected size: one number, or either of two
struct Size {
  int64_t a, b;
  Size(int64_t a) : a(a), b(a) {}
  Size(int64_t a, int64_t b) : a(a), b(b) {}
};

inline void check_shape(const char* name, const Tensor& x, std::initializer_list<Size> sizes) {
  bool matches = x.dim() == (int64_t)sizes.size();
  const auto actual = x.sizes();
  for (int64_t i = 0; matches && i < (int64_t)sizes.size(); i++)
    matches = actual[i] == sizes.begin()[i].a || actual[i] == sizes.begin()[i].b;
  if (!matches) {
    std::string expected;
    for (const Size& size : sizes) {
      expected.append(expected.empty() ? "" : ", ").append(std::to_string(size.a));
      if (size.a != size.b) expected.append(" or ").append(std::to_string(size.b));
    }
    STD_TORCH_CHECK(false, name, ": got shape ", shape_text(x), ", expected (", expected, ")");
  }
  STD_TORCH_CHECK(x.is_cpu(), name, ": got a tensor of another device, expected one on the CPU");
}

inline void check_type(const char* name, const Tensor& x, ScalarType expected, const char* text) {
  STD_TORCH_CHECK(x.scalar_type() == expected, name, ": got another dtype, expected ", text);
}

inline void check_contiguous(const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_contiguous(), name, ": got a tensor that is not contiguous, expected a contiguous one");
}

// By the C shim, because the stable ABI's new_empty takes the slow way through the boxed dispatcher
inline Tensor empty(ScalarType dtype, std::initializer_list<int64_t> sizes, bool zeros = false) {
  int64_t strides[8], stride = 1, count = (int64_t)sizes.size();
  for (int64_t i = count; i-- > 0;) strides[i] = stride, stride *= sizes.begin()[i] > 1 ? sizes.begin()[i] : 1;
  const int32_t type = dtype == ScalarType::Float      ? aoti_torch_dtype_float32()
                       : dtype == ScalarType::Double   ? aoti_torch_dtype_float64()
                       : dtype == ScalarType::BFloat16 ? aoti_torch_dtype_bfloat16()
                       : dtype == ScalarType::Long     ? aoti_torch_dtype_int64()
                                                       : aoti_torch_dtype_float16();
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(count, sizes.begin(), strides, type, aoti_torch_device_type_cpu(), 0, &handle));
  Tensor result(handle);
#if defined(__linux__)
  // Each fresh page costs a fault, together a quarter of a long call's time: ask for large pages
  constexpr uintptr_t kHuge = 1 << 21;
  const uintptr_t first = ((uintptr_t)result.data_ptr() + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = ((uintptr_t)result.data_ptr() + result.numel() * result.element_size()) / kHuge * kHuge;
  if (last >= first + 2 * kHuge) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
  if (zeros && result.numel()) memset(result.data_ptr(), 0, (size_t)result.numel() * result.element_size());
  return result;
}

inline View view(const Tensor& x) { return {(char*)x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)}; }

// Rows of one number and those of empty tensors may have any stride: numpy's may be 0
inline void check_last_stride(const char* name, const Tensor& x) {
  const int64_t last = x.dim() - 1;
  STD_TORCH_CHECK(x.size(last) <= 1 || x.stride(last) == 1 || x.numel() == 0, name, ": got stride ", x.stride(last),
                  " in the last dimension, expected 1");
}

inline void check_rows(const char* name, const Tensor& x, ScalarType type) {
  check_type(name, x, type, "k's");
  check_last_stride(name, x);
}

inline void check_cu_seqlens(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) >= 1 && x.is_cpu(), "cu_seqlens: got shape ", shape_text(x),
                  ", expected (s + 1,) on the CPU");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Long || x.scalar_type() == ScalarType::Int,
                  "cu_seqlens: got another dtype, expected int32 or int64");
  check_contiguous("cu_seqlens", x);
}

// The bounds of packed sequences, forced to rise within 0 .. n: others would lead a kernel out of bounds
inline std::vector<int64_t> rising_bounds(const void* data, bool wide, int64_t count, int64_t n) {
  std::vector<int64_t> bounds;
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t x = wide ? ((const int64_t*)data)[i] : ((const int32_t*)data)[i];
    bounds.push_back(last = x < last ? last : x > n ? n : x);
  }
  return bounds;
}

inline PerToken per_token(const char* name, const Tensor& x, int64_t b, int64_t m, int64_t g, bool allow_half,
                          int64_t pairs) {
  if (pairs < 0) check_shape(name, x, {{b, 1}, m, {g, 1}});
  else check_shape(name, x, {{b, 1}, m, {g, 1}, pairs});
  const auto type = x.scalar_type();
  const bool wide = type == ScalarType::Float || type == ScalarType::Double;
  STD_TORCH_CHECK(wide || (allow_half && (type == ScalarType::BFloat16 || type == ScalarType::Half)), name,
                  ": got another dtype, expected float32 or float64", allow_half ? ", bfloat16 or float16" : "");
  const int kind = type == ScalarType::Float ? kFloat32 : type == ScalarType::Double ? kFloat64
                   : type == ScalarType::BFloat16 ? kBFloat16 : kFloat16;
  return {(const char*)x.data_ptr(), kind, x.size(0) == 1 ? 0 : x.stride(0), x.stride(1),
          x.size(2) == 1 ? 0 : x.stride(2), pairs < 0 ? 0 : x.stride(3)};
}

inline Positions positions(const char* name, const Tensor& x, int64_t b, int64_t n, int64_t axes) {
  if (axes == 1 && x.dim() == 2) check_shape(name, x, {{b, 1}, {n, 1}});
  else check_shape(name, x, {{b, 1}, n, axes});
  check_type(name, x, ScalarType::Long, "int64");
  if (x.dim() == 3) check_last_stride(name, x);
  return {(const int64_t*)x.data_ptr(), x.size(0) == 1 ? 0 : x.stride(0), x.stride(1), x.dim() == 2 && x.size(1) == 1};
}

struct Arguments {  // the arguments that forward, backward and step have in common
  const Maybe& q;
  const Tensor &k, &v;
  int64_t feature_map;
  const Maybe &log_decay, &write, &theta, &positions, &key_positions, &angle_steps, &angle, &key_mask, &cu_seqlens, &kv,
      &z, &slots;
  int64_t layout;
  bool causal, normalize;
  double eps;
  bool add_eps;
  bool one_token = false;  // a step
};

inline void read_sizes(const Arguments& x, Call& c) {
  STD_TORCH_CHECK(x.k.dim() == 4 && x.v.dim() == 4, "k, v: got ", x.k.dim(), " and ", x.v.dim(),
                  " dimensions, expected 4");
  const auto type = x.k.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "k: got another dtype, expected float32, bfloat16 or float16");
  c.type = type == ScalarType::Float ? kFloat32 : type == ScalarType::BFloat16 ? kBFloat16 : kFloat16;
  const int64_t b = x.k.size(0), f = x.k.size(3), e = x.v.size(3);
  const int64_t key_heads = x.k.size(2);
  c.m = x.k.size(1), c.g = x.v.size(2), c.n = c.m, c.h = c.g, c.heads_per_gradient = 1;
  STD_TORCH_CHECK(f >= 1 && f <= kMaxDim && e >= 1 && e <= kMaxDim, "k, v: got ", f, " features and ", e,
                  " values, expected 1 to ", kMaxDim);
  c.f = (int)f, c.e = (int)e;
  STD_TORCH_CHECK(key_heads > 0 ? c.g % key_heads == 0 && c.g > 0 : c.g == 0, "v: got ", c.g,
                  " heads, expected a multiple of k's ", key_heads);
  c.value_group = key_heads > 0 ? c.g / key_heads : 1;
  check_shape("v", x.v, {b, c.m, c.g, e});
  check_rows("k", x.k, type), check_rows("v", x.v, type);
  c.k = view(x.k), c.v = view(x.v);
  if (x.q) {
    STD_TORCH_CHECK(x.q->dim() == 4, "q: got ", x.q->dim(), " dimensions, expected 4");
    const int64_t query_heads = x.q->size(2);
    c.n = x.q->size(1), c.h = query_heads * c.value_group;
    check_shape("q", *x.q, {b, x.causal ? c.m : c.n, query_heads, f}), check_rows("q", *x.q, type);
    const bool fits = key_heads > 0 ? query_heads % key_heads == 0 : query_heads == 0;
    const bool grouped = c.value_group > 1;
    STD_TORCH_CHECK(grouped ? query_heads == key_heads : fits, "q: got ", query_heads, " heads, expected ",
                    grouped ? "" : "a multiple of ", "k's ", key_heads);
    c.q = view(*x.q);
  }
  c.sequences = b;
  if (x.cu_seqlens) {
    const Tensor& cu = *x.cu_seqlens;
    check_cu_seqlens(cu);
    STD_TORCH_CHECK(b == 1 && c.n == c.m, "cu_seqlens: got a batch of ", b, ", ", c.n, " queries and ", c.m,
                    " keys, expected a batch of 1 and as many queries as keys");
    c.cu_seqlens = cu.data_ptr(), c.cu_wide = cu.scalar_type() == ScalarType::Long, c.sequences = cu.size(0) - 1;
  }
}

inline void read_rotation(const Arguments& x, Call& c) {
  const int64_t b = x.k.size(0);
  STD_TORCH_CHECK(x.layout >= kNone && x.layout <= kHalf, "layout: got ", x.layout, ", expected 0, 1 or 2");
  const bool rotates = x.theta || x.angle_steps || x.angle;
  STD_TORCH_CHECK(rotates == (x.layout != kNone), "layout: got ", x.layout, ", expected ",
                  rotates ? "1 or 2 with" : "0 without", " theta, angle_steps or angle");
  c.layout = (int)x.layout, c.axes = 1;
  if (!rotates) return;
  const Tensor& any = x.theta ? *x.theta : x.angle_steps ? *x.angle_steps : *x.angle;
  const int64_t pairs = any.dim() ? any.size(any.dim() - 1) : 0;
  STD_TORCH_CHECK(2 * pairs <= c.f, "theta: got ", pairs, " pairs, expected at most half of ", c.f, " features");
  c.pairs = (int)pairs;
  if (x.theta) {
    const Tensor& theta = *x.theta;
    STD_TORCH_CHECK(theta.dim() == 3 && theta.size(0) >= 1 && theta.size(0) <= 64, "theta: got shape ",
                    shape_text(theta), ", expected (axes, 1 or g, pairs)");
    check_shape("theta", theta, {theta.size(0), {c.g, 1}, pairs});
    check_type("theta", theta, ScalarType::Long, "int64"), check_contiguous("theta", theta);
    c.theta = (const int64_t*)theta.data_ptr(), c.axes = (int)theta.size(0);
    c.theta_axis = theta.size(1) * pairs, c.theta_head = theta.size(1) == 1 ? 0 : pairs;
    STD_TORCH_CHECK(x.positions, "positions: got none, expected int64 positions with theta");
    c.positions = positions("positions", *x.positions, b, c.n, c.axes);
    c.key_positions = c.positions;
    if (x.key_positions) c.key_positions = positions("key_positions", *x.key_positions, b, c.m, c.axes);
    else
      STD_TORCH_CHECK(c.n == c.m || c.positions.consecutive, "key_positions: got none for ", c.m, " keys and ", c.n,
                      " queries, expected (b or 1, ", c.m, ")");
  }
  if (x.angle_steps) {
    STD_TORCH_CHECK(c.n == c.m, "angle_steps: got ", c.n, " queries and ", c.m, " keys, expected as many");
    c.angle_steps = per_token("angle_steps", *x.angle_steps, b, c.m, c.g, true, pairs);
  }
}

// True if kv (rows, g, f, e) lies in memory as (rows, g, e, f), and not as its shape says
inline bool is_swapped(const Tensor& kv) {
  const int64_t g = kv.size(1), f = kv.size(2), e = kv.size(3), strides[4] = {g * f * e, f * e, 1, f};
  bool swapped = !kv.is_contiguous();
  for (int i = 0; i < 4; i++) swapped &= kv.size(i) == 1 || kv.stride(i) == strides[i];
  return swapped;
}

inline void read_state(const Arguments& x, Call& c) {
  STD_TORCH_CHECK(x.kv.has_value() == x.z.has_value(), "kv, z: got one of them, expected both or none");
  int64_t rows = c.sequences;
  if (x.slots) {
    STD_TORCH_CHECK(x.kv && x.kv->dim() == 4,
                    "slots: got a tensor without kv and z, expected a pool's kv and z with it");
    check_shape("slots", *x.slots, {c.sequences}), check_type("slots", *x.slots, ScalarType::Long, "int64");
    check_contiguous("slots", *x.slots);
    rows = x.kv->size(0), c.slots = (const int64_t*)x.slots->data_ptr();
    for (int64_t i = 0; i < c.sequences; i++)
      STD_TORCH_CHECK(c.slots[i] >= 0 && c.slots[i] < rows, "slots: got ", c.slots[i], ", expected 0 .. ", rows - 1);
  }
  if (x.kv) {
    check_shape("kv", *x.kv, {rows, c.g, c.f, c.e}), check_shape("z", *x.z, {rows, c.g, c.f});
    check_type("kv", *x.kv, ScalarType::Float, "float32"), check_type("z", *x.z, ScalarType::Double, "float64");
    c.kv_swapped = x.one_token && is_swapped(*x.kv);
    if (!c.kv_swapped) check_contiguous("kv", *x.kv);
    check_contiguous("z", *x.z);
    c.kv = (const float*)x.kv->data_ptr(), c.z = (const double*)x.z->data_ptr();
  }
  if (x.angle) {
    check_shape("angle", *x.angle, {rows, {c.g, 1}, c.pairs});
    check_type("angle", *x.angle, ScalarType::Long, "int64"), check_contiguous("angle", *x.angle);
    c.angle = (const int64_t*)x.angle->data_ptr();
    c.angle_row = x.angle->size(1) * c.pairs, c.angle_head = x.angle->size(1) == 1 ? 0 : c.pairs;
  }
}

inline Call read_call(const Arguments& x) {
  Call c{};
  STD_TORCH_CHECK(x.feature_map >= kIdentity && x.feature_map <= kSilu, "feature_map: got ", x.feature_map,
                  ", expected 0 .. 5");
  STD_TORCH_CHECK(x.eps > 0 || !x.normalize, "eps: got ", x.eps, ", expected a positive number");
  c.map = (int)x.feature_map, c.causal = x.causal, c.normalize = x.normalize;
  c.eps = (float)x.eps, c.add_eps = x.add_eps;
  read_sizes(x, c), read_rotation(x, c), read_state(x, c);
  const int64_t b = x.k.size(0);
  if (x.log_decay) {
    STD_TORCH_CHECK(x.causal, "log_decay: got a tensor with causal=False, expected none");
    c.log_decay = per_token("log_decay", *x.log_decay, b, c.m, c.g, false, -1);
  }
  if (x.write) c.write = per_token("write", *x.write, b, c.m, c.g, true, -1);
  if (x.key_mask) {
    check_shape("key_mask", *x.key_mask, {b, c.m}), check_type("key_mask", *x.key_mask, ScalarType::Bool, "bool");
    c.key_mask = (const bool*)x.key_mask->data_ptr();
    c.mask_batch = x.key_mask->stride(0), c.mask_token = x.key_mask->stride(1);
  }
  return c;
}

}  // namespace linrope
