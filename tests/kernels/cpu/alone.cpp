// Runs a built library without PyTorch, on numbers that are the same on every machine, and prints the results:
//
//     alone PATH
//
// It stands in for PyTorch with the functions of pytorch.h, as far as the operators call them. So it runs where PyTorch does
// not, in an emulator or in Wine, and shows that a library needs nothing but these functions.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "pytorch.h"
#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

using namespace linrope;

PyTorch linrope::pytorch;  // unused here: the library has its own

struct linrope::OpaqueTensor {
  std::shared_ptr<std::vector<char>> memory;
  int64_t offset = 0;
  int32_t type = kFloat32;
  std::vector<int64_t> sizes, strides;
};

static std::map<std::string, std::string> schemas;
static std::map<std::string, Operator> operators;

static OpaqueTensor* new_tensor(int32_t type, std::vector<int64_t> sizes, std::vector<int64_t> strides = {}) {
  int64_t count = 1;
  if (strides.empty()) strides.resize(sizes.size());
  for (size_t i = sizes.size(); i-- > 0; count *= sizes[i]) strides[i] = count;
  auto memory = std::make_shared<std::vector<char>>(count * Tensor::size_of(type));
  return new OpaqueTensor{memory, 0, type, sizes, strides};
}

// PyTorch's functions, with a Type for a dtype
static int32_t aoti_torch_device_type_cpu() { return 0; }
static int32_t aoti_torch_dtype_float32() { return kFloat32; }
static int32_t aoti_torch_dtype_bfloat16() { return kBFloat16; }
static int32_t aoti_torch_dtype_float16() { return kFloat16; }
static int32_t aoti_torch_dtype_float64() { return kFloat64; }
static int32_t aoti_torch_dtype_int32() { return kInt32; }
static int32_t aoti_torch_dtype_int64() { return kInt64; }
static int32_t aoti_torch_dtype_bool() { return kBool; }
static int32_t aoti_torch_get_dim(TensorHandle x, int64_t* dim) { return *dim = (int64_t)x->sizes.size(), 0; }
static int32_t aoti_torch_get_sizes(TensorHandle x, int64_t** sizes) { return *sizes = x->sizes.data(), 0; }
static int32_t aoti_torch_get_strides(TensorHandle x, int64_t** strides) { return *strides = x->strides.data(), 0; }
static int32_t aoti_torch_get_storage_offset(TensorHandle x, int64_t* offset) { return *offset = x->offset, 0; }
static int32_t aoti_torch_get_dtype(TensorHandle x, int32_t* dtype) { return *dtype = x->type, 0; }
static int32_t aoti_torch_get_device_type(TensorHandle, int32_t* device) { return *device = 0; }
static int32_t aoti_torch_get_data_ptr(TensorHandle x, void** data) {
  return *data = x->memory->data() + x->offset * Tensor::size_of(x->type), 0;
}
static int32_t aoti_torch_new_tensor_handle(TensorHandle x, TensorHandle* to) { return *to = new OpaqueTensor(*x), 0; }
static int32_t aoti_torch_new_uninitialized_tensor(TensorHandle* to) { return *to = nullptr, 0; }
static int32_t aoti_torch_delete_tensor_object(TensorHandle x) { return delete x, 0; }
static int32_t aoti_torch__reinterpret_tensor(TensorHandle x, int64_t dims, const int64_t* sizes, const int64_t* strides,
                                              int64_t offset, TensorHandle* to) {
  *to = new OpaqueTensor{x->memory, offset, x->type, {sizes, sizes + dims}, {strides, strides + dims}};
  return 0;
}
static int32_t aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t*, int32_t dtype, int32_t,
                                        int32_t, TensorHandle* to) {
  return *to = new_tensor(dtype, {sizes, sizes + dims}), 0;
}
static int32_t torch_parallel_for(int64_t first, int64_t last, int64_t, Range run, void* context) {
  for (int64_t i = first; i < last; i++) run(i, i + 1, context);
  return 0;
}
static int32_t torch_get_num_threads(uint32_t* count) { return *count = 2, 0; }
static int32_t aoti_torch_library_init_def(const char*, const char*, uint32_t, LibraryHandle*) { return 0; }
static int32_t aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, LibraryHandle*) { return 0; }
static int32_t aoti_torch_library_def(LibraryHandle, const char* schema) {
  const std::string text = schema;
  return schemas[text.substr(0, text.find('('))] = text.substr(text.find('(') + 1), 0;
}
static int32_t torch_library_impl(LibraryHandle, const char* name, Operator run, uint64_t) {
  return operators[name] = run, 0;
}

// An argument: a tensor or the bits of a number
struct Given {
  TensorHandle tensor = nullptr;
  Value bits = 0;
  Given(TensorHandle x) : tensor(x) {}
  Given(int x) : bits((Value)(int64_t)x) {}
  Given(bool x) : bits(x) {}
  Given(double x) : bits(std::bit_cast<Value>(x)) {}
};
using Arguments = std::map<std::string, Given>;

// The results of an operator, whose other arguments are None or false. No results: it has refused the arguments
static std::vector<TensorHandle> run(const std::string& name, const Arguments& arguments) {
  const std::string schema = schemas.at(name), parameters = schema.substr(0, schema.find(") -> "));
  std::vector<Value> stack;
  for (size_t at = 0; at < parameters.size();) {
    size_t end = parameters.find(", ", at);
    if (end == std::string::npos) end = parameters.size();
    std::string parameter = parameters.substr(at, end - at);  // "Tensor(a!)? x", "bool y=False"
    at = end + 2;
    const bool optional = parameter.find("? ") != std::string::npos;
    parameter = parameter.substr(parameter.find(' ') + 1);
    const auto given = arguments.find(parameter.substr(0, parameter.find('=')));
    if (given == arguments.end()) stack.push_back(0);
    else if (!given->second.tensor) stack.push_back(given->second.bits);
    else {
      const Value handle = (Value) new OpaqueTensor(*given->second.tensor);
      stack.push_back(optional ? (Value) new Value(handle) : handle);
    }
  }
  size_t results = 1;
  for (const char c : schema.substr(parameters.size() + 5)) results += c == ',';
  const size_t given = stack.size();
  if (stack.size() < results) stack.resize(results);
  operators.at(name)(stack.data(), given, results);
  std::vector<TensorHandle> tensors;
  for (size_t i = 0; i < results; i++) tensors.push_back((TensorHandle)stack[i]);
  if (!tensors[0]) tensors.clear();
  return tensors;
}

static uint64_t seed = 1;
static double number() {  // -2 .. 2
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (double)((int64_t)(seed >> 40) - (1 << 23)) / (1 << 22);
}
static TensorHandle numbers(std::vector<int64_t> sizes, double scale = 1) {
  TensorHandle x = new_tensor(kFloat32, sizes);
  for (size_t i = 0; i < x->memory->size() / 4; i++) ((float*)x->memory->data())[i] = (float)(scale * number());
  return x;
}
// Of gates: negative logarithms, or factors of 0 .. 1
static TensorHandle gates(std::vector<int64_t> sizes, bool logarithms) {
  TensorHandle x = numbers(sizes);
  for (size_t i = 0; i < x->memory->size() / 4; i++) {
    float& gate = ((float*)x->memory->data())[i];
    gate = logarithms ? -gate * gate : 0.5f + gate / 4;
  }
  return x;
}
static TensorHandle integers(std::vector<int64_t> sizes, std::vector<int64_t> values) {
  TensorHandle x = new_tensor(kInt64, sizes);
  memcpy(x->memory->data(), values.data(), x->memory->size());
  return x;
}

static void print(const std::string& name, const std::vector<TensorHandle>& results) {
  for (size_t r = 0; r < results.size(); r++) {
    if (!results[r]) continue;  // it was not wanted
    const OpaqueTensor& x = *results[r];
    const int64_t count = (int64_t)x.memory->size() / Tensor::size_of(x.type);
    for (int64_t i = 0; i < count; i += 7) {
      const double value = x.type == kFloat64 ? ((double*)x.memory->data())[i] : ((float*)x.memory->data())[i];
      printf("%s.%d %d %.9g\n", name.c_str(), (int)r, (int)i, value);
    }
  }
}

// Two heads of keys, four of queries, one sequence; then a token more
static void run_attention(int64_t f, int64_t e, int64_t pairs, int layout, int map, Arguments more) {
  const int64_t n = 75, g = 2, h = 4;
  const bool erases = more.contains("erase");
  std::vector<int64_t> turns(pairs);
  for (int64_t p = 0; p < pairs; p++) turns[p] = (int64_t)(std::pow(2.0, 61 - (double)p) / 3);
  Arguments inputs = more;
  inputs.insert({{"q", numbers({1, n, h, f})}, {"k", numbers({1, n, g, f}, erases ? 0.1 : 1)}, {"v", numbers({1, n, g, e})},
                 {"feature_map", map}, {"query_factor", 0.0}, {"theta", integers({1, 1, pairs}, turns)},
                 {"positions", integers({1, 1}, {1000})}, {"layout", layout}, {"causal", true}, {"normalize", !erases},
                 {"eps", 1e-6}, {"add_eps", false}});
  Arguments first = inputs;
  first.insert({{"want_state", true}, {"save", true}, {"save_z", !erases}});
  const auto saved = run("forward", first);
  print("forward", saved);
  Arguments last = inputs;
  last.insert({{"g_out", numbers({1, n, h, e})}, {"saved_kv", saved[3]}, {"want_log_decay", more.contains("log_decay")},
               {"want_write", more.contains("write")}, {"want_erase", erases}, {"want_angle_steps", false}});
  if (erases) last.insert({"saved_u", saved[5]});
  else last.insert({"saved_z", saved[4]});
  print("backward", run("backward", last));
  Arguments step = inputs;
  for (const auto& [name, width] : {std::pair("q", h * f), {"k", g * f}, {"v", g * e}, {"log_decay", g}, {"write", g},
                                    {"erase", g}}) {
    if (!step.contains(name)) continue;
    TensorHandle token = new OpaqueTensor(*step.at(name).tensor);
    token->sizes[1] = 1;
    step.at(name) = token;
  }
  step.insert({"kv", saved[1]});
  if (!erases) step.insert({"z", saved[2]});
  print("step", run("step", step));
}

static void run_others() {
  const Arguments tokens{{"x", numbers({2, 40, 24})}, {"weight", numbers({24, 4})}, {"bias", numbers({24})}, {"silu", true}};
  print("convolve", run("convolve", tokens));
  Arguments back = tokens;
  back.insert({"gradient", numbers({2, 40, 24})});
  print("convolve_backward", run("convolve_backward", back));
  const Arguments heads{{"out", numbers({2, 40, 3, 8})}, {"gate", numbers({2, 40, 24})}, {"weight", numbers({3, 8})},
                        {"eps", 1e-6}, {"over_heads", false}, {"gate_first", false}, {"skip_first", false},
                        {"sigmoid", false}};
  print("gated_norm", run("gated_norm", heads));
  back = heads;
  back.insert({"gradient", numbers({2, 40, 24})});
  print("gated_norm_backward", run("gated_norm_backward", back));
  print("linear", run("linear", {{"x", numbers({3, 33})}, {"weight", numbers({70, 33})}, {"bias", numbers({70})}}));
  print("swiglu", run("swiglu", {{"x", numbers({3, 33})}, {"w1", numbers({17, 33})}, {"w3", numbers({17, 33})},
                                 {"w2", numbers({5, 17})}}));
  print("add_norm", run("add_norm", {{"x", numbers({3, 17})}, {"y", numbers({3, 17})}, {"weight", numbers({17})},
                                     {"eps", 1e-6}}));
}

int main(int, char** arguments) {
#if defined(_WIN32)
  HMODULE library = LoadLibraryA(arguments[1]);
  const auto find = [&](const char* name) { return (void*)GetProcAddress(library, name); };
#else
  void* library = dlopen(arguments[1], RTLD_NOW);
  const auto find = [&](const char* name) { return dlsym(library, name); };
#endif
  if (!library) return fprintf(stderr, "%s cannot be loaded\n", arguments[1]), 1;
  const auto text = [&](const char* name) { return ((const char* (*)())find(name))(); };
#define LINROPE_NAME(name, arguments) #name " "
  if (strcmp(text("linrope_pytorch_functions"), LINROPE_PYTORCH(LINROPE_NAME))) return 2;  // of other sources
#define LINROPE_ADDRESS(name, arguments) (void*)name,
  void* addresses[] = {LINROPE_PYTORCH(LINROPE_ADDRESS)};
  if (const char* why = ((const char* (*)(void**))find("linrope_start"))(addresses)) return fprintf(stderr, "%s\n", why), 3;
  const auto set = (const char* (*)(size_t))find("linrope_instruction_set");
  const auto use = (void (*)(size_t))find("linrope_use_instruction_set");
  for (size_t i = 0; const char* name = set(i); i++) {
    printf("# %s\n", name);
    use(i);
    seed = 1;
    run_attention(64, 64, 32, 2, 1, {});
    run_attention(20, 13, 7, 1, 3, {{"log_decay", gates({1, 75, 2}, true)}, {"write", gates({1, 75, 2}, false)}});
    run_attention(20, 13, 7, 1, 0, {{"log_decay", gates({1, 75, 2}, true)}, {"erase", gates({1, 75, 2}, false)}});
    run_attention(24, 16, 8, 2, 0, {{"log_decay", gates({1, 75, 2, 16}, true)}, {"erase", gates({1, 75, 2}, false)}});
    run_others();
  }
  if (!run("linear", {{"x", numbers({3, 3})}, {"weight", numbers({3, 4})}}).empty()) return 4;
  printf("# %s\n", text("linrope_error"));
}
