// PyTorch as the operators see it: a tensor, and the way in and out of an operator.
//
// All of it is made of the C functions below, which are part of PyTorch's stable ABI since 2.10 (stable/c/shim.h and
// aoti_torch/c/shim.h in torch/csrc). Python looks them up in the PyTorch that it has loaded (linrope/backends/library.py).
// So neither headers nor libraries of PyTorch are needed to build, one build serves every PyTorch and Python, and since no
// exception leaves an operator, it does not matter which C++ library PyTorch was built with.
#pragma once
#include <bit>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "call.h"

namespace linrope {

typedef struct OpaqueTensor* TensorHandle;
typedef struct OpaqueLibrary* LibraryHandle;
using Value = uint64_t;                                   // an argument or a result: a number's bits, or a pointer
using Operator = void (*)(Value*, uint64_t, uint64_t);  // its arguments, and afterwards its results; their numbers
using Range = void (*)(int64_t first, int64_t last, void* context);

// All return an int32_t: a code for a type or a device, or else 0 if nothing failed
#define LINROPE_PYTORCH(FUNCTION)                                                                                     \
  FUNCTION(aoti_torch_device_type_cpu, ())                                                                            \
  FUNCTION(aoti_torch_dtype_float32, ())                                                                              \
  FUNCTION(aoti_torch_dtype_bfloat16, ())                                                                             \
  FUNCTION(aoti_torch_dtype_float16, ())                                                                              \
  FUNCTION(aoti_torch_dtype_float64, ())                                                                              \
  FUNCTION(aoti_torch_dtype_int32, ())                                                                                \
  FUNCTION(aoti_torch_dtype_int64, ())                                                                                \
  FUNCTION(aoti_torch_dtype_bool, ())                                                                                 \
  FUNCTION(aoti_torch_get_dim, (TensorHandle, int64_t*))                                                              \
  FUNCTION(aoti_torch_get_sizes, (TensorHandle, int64_t**))                                                           \
  FUNCTION(aoti_torch_get_strides, (TensorHandle, int64_t**))                                                         \
  FUNCTION(aoti_torch_get_storage_offset, (TensorHandle, int64_t*))                                                   \
  FUNCTION(aoti_torch_get_dtype, (TensorHandle, int32_t*))                                                            \
  FUNCTION(aoti_torch_get_device_type, (TensorHandle, int32_t*))                                                      \
  FUNCTION(aoti_torch_get_data_ptr, (TensorHandle, void**))                                                           \
  FUNCTION(aoti_torch_new_tensor_handle, (TensorHandle, TensorHandle*))                                               \
  FUNCTION(aoti_torch_new_uninitialized_tensor, (TensorHandle*))                                                      \
  FUNCTION(aoti_torch_delete_tensor_object, (TensorHandle))                                                           \
  FUNCTION(aoti_torch__reinterpret_tensor,                                                                            \
           (TensorHandle, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset, TensorHandle*)) \
  FUNCTION(aoti_torch_empty_strided, (int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype,      \
                                      int32_t device, int32_t index, TensorHandle*))                                  \
  FUNCTION(torch_parallel_for, (int64_t first, int64_t last, int64_t at_least, Range, void* context))                 \
  FUNCTION(torch_get_num_threads, (uint32_t*))                                                                        \
  FUNCTION(aoti_torch_library_init_def, (const char* name, const char* file, uint32_t line, LibraryHandle*))          \
  FUNCTION(aoti_torch_library_init_impl,                                                                              \
           (const char* name, const char* key, const char* file, uint32_t line, LibraryHandle*))                      \
  FUNCTION(aoti_torch_library_def, (LibraryHandle, const char* schema))                                               \
  FUNCTION(torch_library_impl, (LibraryHandle, const char* name, Operator, uint64_t version))

struct PyTorch {  // the addresses, in this order
#define LINROPE_MEMBER(name, arguments) int32_t(*name) arguments;
  LINROPE_PYTORCH(LINROPE_MEMBER)
};
extern PyTorch pytorch;

// A ValueError in Python
template <class... Parts> [[noreturn, gnu::cold]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}
// A RuntimeError in Python, unless what was checked is true
template <class... Parts> void require(bool checked, const Parts&... parts) {
  if (checked) [[likely]]
    return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}
inline void succeed(int32_t code, const char* what) { require(!code, "PyTorch failed: ", what); }

// Shares the tensor with its other owners. What is asked of PyTorch is asked once
class Tensor {
 public:
  explicit Tensor(TensorHandle handle) : handle(handle, pytorch.aoti_torch_delete_tensor_object) {
    int32_t failed = pytorch.aoti_torch_get_dim(handle, &dims);
    failed |= pytorch.aoti_torch_get_sizes(handle, &all_sizes) | pytorch.aoti_torch_get_strides(handle, &all_strides);
    failed |= pytorch.aoti_torch_get_dtype(handle, &dtype) | pytorch.aoti_torch_get_device_type(handle, &device);
    succeed(failed | pytorch.aoti_torch_get_data_ptr(handle, &memory), "describe a tensor");
  }
  TensorHandle get() const { return handle.get(); }
  int64_t dim() const { return dims; }
  std::span<const int64_t> sizes() const { return {all_sizes, (size_t)dims}; }
  std::span<const int64_t> strides() const { return {all_strides, (size_t)dims}; }
  int64_t size(int64_t i) const { return all_sizes[i]; }
  int64_t stride(int64_t i) const { return all_strides[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : sizes()) count *= size;
    return count;
  }
  int64_t storage_offset() const {
    int64_t offset;
    succeed(pytorch.aoti_torch_get_storage_offset(get(), &offset), "describe a tensor");
    return offset;
  }
  void* data_ptr() const { return memory; }
  bool is_cpu() const { return device == pytorch.aoti_torch_device_type_cpu(); }
  bool is_contiguous() const {
    int64_t stride = 1;
    for (int64_t i = dims; i-- > 0; stride *= all_sizes[i])
      if (all_sizes[i] != 1 && all_strides[i] != stride) return numel() == 0;
    return true;
  }
  int type() const {  // -1: one that no kernel reads
    for (int type = 0; type <= kBool; type++)
      if (dtype == code_of(type)) return type;
    return -1;
  }
  int64_t element_size() const { return size_of(type()); }

  static int64_t size_of(int type) {
    constexpr int64_t sizes[] = {4, 2, 2, 8, 4, 8, 1};  // as in Type
    return sizes[type];
  }
  static int32_t code_of(int type) {
    static const int32_t codes[] = {pytorch.aoti_torch_dtype_float32(), pytorch.aoti_torch_dtype_bfloat16(),
                                    pytorch.aoti_torch_dtype_float16(), pytorch.aoti_torch_dtype_float64(),
                                    pytorch.aoti_torch_dtype_int32(),   pytorch.aoti_torch_dtype_int64(),
                                    pytorch.aoti_torch_dtype_bool()};  // as in Type
    return codes[type];
  }

 private:
  std::shared_ptr<OpaqueTensor> handle;
  int64_t dims, *all_sizes, *all_strides;
  int32_t dtype, device;
  void* memory;
};
using Maybe = std::optional<Tensor>;

struct Written : Tensor {  // an argument that the operator writes to, as its schema says
  using Tensor::Tensor;
};
using MaybeWritten = std::optional<Written>;

// An argument, which the operator owns from here on
template <class T> T take(Value value) {
  if constexpr (std::is_base_of_v<Tensor, T>) return T((TensorHandle)value);
  else if constexpr (std::is_constructible_v<T, std::nullopt_t>) {
    if (!value) return {};
    const std::unique_ptr<Value> inner((Value*)value);  // made by PyTorch's `new`
    return take<typename T::value_type>(*inner);
  } else if constexpr (std::is_same_v<T, bool>) return value & 1;
  else return std::bit_cast<T>(value);
}

// The class and the text of the error that this thread's last failed operator raises in Python
struct Failure {
  const char* said = "";
  std::string text;
  void set(const char* kind, const std::exception& error) { said = text.assign(kind).append(error.what()).c_str(); }
};
inline thread_local Failure failure;

inline TensorHandle shared(const Tensor& x) {
  TensorHandle handle;
  succeed(pytorch.aoti_torch_new_tensor_handle(x.get(), &handle), "return a tensor");
  return handle;
}
// An undefined tensor is None in Python
inline TensorHandle none() {
  TensorHandle handle;
  succeed(pytorch.aoti_torch_new_uninitialized_tensor(&handle), "return no tensor");
  return handle;
}
inline TensorHandle shared(const Maybe& x) { return x ? shared(*x) : none(); }

// alias: the letter of the next tensor that is written
template <class T> std::string type_in_schema(char& alias) {
  if constexpr (std::is_same_v<T, Written>) return std::string("Tensor(") + alias++ + "!)";
  else if constexpr (std::is_constructible_v<T, std::nullopt_t>) return type_in_schema<typename T::value_type>(alias) + "?";
  else if constexpr (std::is_same_v<T, Tensor>) return "Tensor";
  else return std::is_same_v<T, bool> ? "bool" : std::is_same_v<T, double> ? "float" : "int";
}

// A record of the arguments or the results of an operator. LIST(X) is X(type, name) for each of them, in the order of the
// schema
#define LINROPE_FIELD(type, name) type name;
#define LINROPE_TAKE(type, name) take<type>(*stack++),
#define LINROPE_DESCRIBE(type, name) .append(type_in_schema<type>(alias)).append(" " #name ", ")
#define LINROPE_VISIT(type, name) f(name);
#define LINROPE_RECORD(Record, LIST)                                                                              \
  struct Record {                                                                                                 \
    LIST(LINROPE_FIELD)                                                                                           \
    static Record from_stack(const Value*& stack) { return {LIST(LINROPE_TAKE)}; }                                \
    static std::string schema() {                                                                                 \
      char alias = 'a';                                                                                           \
      const std::string text = std::string() LIST(LINROPE_DESCRIBE);                                              \
      return text.substr(0, text.size() - 2);                                                                     \
    }                                                                                                             \
    template <class F> void each(const F& f) const { LIST(LINROPE_VISIT) }                                        \
  };

// The arguments of a backward operator with one gradient
template <class Record> struct WithGradient {
  Record call;
  Tensor gradient;
  static WithGradient from_stack(const Value*& stack) { return {Record::from_stack(stack), take<Tensor>(*stack++)}; }
  static std::string schema() { return Record::schema() + ", Tensor gradient"; }
};

template <class Results> std::string results_in_schema() {
  if constexpr (std::is_same_v<Results, Tensor>) return " -> Tensor";
  else {
    std::string text = " -> (" + Results::schema() + ")";
    std::erase(text, '?');  // an absent result is an undefined tensor
    return text;
  }
}

// Writes the tensors that `run` returns to the stack. If it throws, sets `failure` and returns undefined tensors. The first
// result of a run that succeeds is therefore never undefined
template <class Run> void leave(Value* stack, uint64_t count, const Run& run) noexcept {
  try {
    const auto results = run();
    Value* to = stack;
    const auto put = [&](const auto& x) { *to++ = (Value)shared(x); };
    if constexpr (std::is_same_v<decltype(results), const Tensor>) put(results);
    else results.each(put);
    return;
  } catch (const std::bad_alloc&) {
    failure.said = "MemoryError: no memory for a kernel's scratch";
  } catch (const std::invalid_argument& error) {
    failure.set("ValueError: ", error);
  } catch (const std::exception& error) {
    failure.set("RuntimeError: ", error);
  }
  for (uint64_t i = 0; i < count; i++) pytorch.aoti_torch_new_uninitialized_tensor((TensorHandle*)&stack[i]);
}
// A function of a record as an operator
template <auto run> struct Boxed;
template <class Results, class Record, Results (*run)(const Record&)> struct Boxed<run> {
  static std::string schema() {
    return "(" + Record::schema() + ")" + results_in_schema<Results>();
  }
  static void call(Value* stack, uint64_t, uint64_t count) {
    leave(stack, count, [&] {
      const Value* next = stack;
      return run(Record::from_stack(next));
    });
  }
};

}  // namespace linrope
