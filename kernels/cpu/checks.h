// Checks of tensors, whose errors name the argument, what it got and what was expected. A shape or a number that does
// not fit is a ValueError in Python. A dtype, a device or strides, which linrope's Python code prepares, are a
// RuntimeError.
#pragma once
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <initializer_list>
#include <vector>

#include "pytorch.h"

namespace linrope {

const Isa& isa();

inline std::string shape_text(const Tensor& x) {  // as Python writes a tuple
  std::string text = "(";
  for (int64_t i = 0; i < x.dim(); i++) text.append(i ? ", " : "").append(std::to_string(x.size(i)));
  return text.append(x.dim() == 1 ? ",)" : ")");
}

// types: a bit for each Type that is accepted
inline void check_types(const char* name, int type, unsigned types) {
  if (type >= 0 && types >> type & 1) return;
  const char* const names[] = {"float32", "bfloat16", "float16", "float64", "int32", "int64", "bool"};
  std::string expected;
  for (int i = 0; i <= kBool; i++)
    if (types >> i & 1) expected.append(expected.empty() ? "" : " or ").append(names[i]);
  require(false, name, ": got another dtype, expected ", expected);
}
inline void check_type(const char* name, const Tensor& x, Type expected) {
  check_types(name, x.type(), 1u << expected);
}

inline void check_device(const char* name, const Tensor& x) {
  require(x.is_cpu(), name, ": got a tensor of another device, expected one on the CPU");
}

inline void check_contiguous(const char* name, const Tensor& x) {
  require(x.is_contiguous(), name, ": got a tensor that is not contiguous, expected a contiguous one");
}

// Rows of one number and those of empty tensors may have any stride: numpy's may be 0
inline void check_last_stride(const char* name, const Tensor& x) {
  const int64_t last = x.dim() - 1;
  require(x.size(last) <= 1 || x.stride(last) == 1 || x.numel() == 0, name, ": got stride ", x.stride(last),
                  " in the last dimension, expected 1");
}

inline void check_shape(const char* name, const Tensor& x, std::initializer_list<int64_t> sizes) {
  bool matches = x.dim() == (int64_t)sizes.size();
  const auto actual = x.sizes();
  for (int64_t i = 0; matches && i < (int64_t)sizes.size(); i++) matches = actual[i] == sizes.begin()[i];
  if (!matches) {
    std::string expected;
    for (const int64_t size : sizes) expected.append(expected.empty() ? "" : ", ").append(std::to_string(size));
    refuse(name, ": got shape ", shape_text(x), ", expected (", expected, sizes.size() == 1 ? ",)" : ")");
  }
  check_device(name, x);
}

// The numbers of a contiguous tensor
template <class T>
const T* numbers(const char* name, const Tensor& x, Type type, std::initializer_list<int64_t> sizes) {
  check_shape(name, x, sizes);
  check_type(name, x, type);
  check_contiguous(name, x);
  return (const T*)x.data_ptr();
}

inline void check_cu_seqlens(const Tensor& x) {
  if (x.dim() != 1 || x.size(0) < 1) refuse("cu_seqlens: got shape ", shape_text(x), ", expected (s + 1,)");
  check_device("cu_seqlens", x);
  check_types("cu_seqlens", x.type(), 1u << kInt32 | 1u << kInt64);
  check_contiguous("cu_seqlens", x);
}

// The bounds of packed sequences, forced to rise within 0 .. n: others would lead a kernel out of bounds
inline std::vector<int64_t> rising_bounds(const void* data, int type, int64_t count, int64_t n) {
  std::vector<int64_t> bounds;
  int64_t last = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t x = type == kInt64 ? ((const int64_t*)data)[i] : ((const int32_t*)data)[i];
    last = x < last ? last : x > n ? n : x;
    bounds.push_back(last);
  }
  return bounds;
}

inline Tensor empty(int type, std::initializer_list<int64_t> sizes, bool zeros = false) {
  int64_t strides[8], stride = 1, count = (int64_t)sizes.size(), bytes = Tensor::size_of(type);
  for (int64_t i = count; i-- > 0;) {
    strides[i] = stride;
    stride *= sizes.begin()[i] > 1 ? sizes.begin()[i] : 1;
    bytes *= sizes.begin()[i];
  }
  TensorHandle handle;
  succeed(pytorch.aoti_torch_empty_strided(count, sizes.begin(), strides, Tensor::code_of(type),
                                           pytorch.aoti_torch_device_type_cpu(), 0, &handle),
          "make a tensor");
  Tensor result(handle);
#if defined(__linux__)
  // Each fresh page costs a fault, together a quarter of a long call's time: ask for large pages
  constexpr uintptr_t kHuge = 1 << 21;
  const uintptr_t first = ((uintptr_t)result.data_ptr() + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = ((uintptr_t)result.data_ptr() + bytes) / kHuge * kHuge;
  if (last >= first + 2 * kHuge) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
  if (zeros && bytes) memset(result.data_ptr(), 0, (size_t)bytes);
  return result;
}

// A tensor whose rows are read or written in place
inline View view(const Tensor& x) {
  return {(char*)x.data_ptr(), x.stride(0), x.stride(1), x.stride(2), 1, x.type()};
}

// A tensor of zeros or of anything; none if it is not wanted
inline Maybe empty_if(bool wanted, int type, std::initializer_list<int64_t> sizes, bool zeros = false) {
  return wanted ? Maybe(empty(type, sizes, zeros)) : Maybe();
}
template <class T> T* data_of(const Maybe& x) { return x ? (T*)x->data_ptr() : nullptr; }
inline View view_of(const Maybe& x) { return x ? view(*x) : View{}; }

}  // namespace linrope
