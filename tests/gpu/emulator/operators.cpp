// The operators of torch on the emulated GPU. Every one that has a CUDA kernel gets another, which
// queues that the operator's CPU kernel computes on the same bytes, and returns.
//
// What an operator will return (shapes, strides, types) is learnt by a call of the CPU kernel with
// zeros, once for every form of the arguments. An operator whose result has a shape that depends on
// numbers makes the host wait, as on a GPU. Kernels hold no memory: what was freed and is used
// again, they read.
#include <torch/library.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

extern "C" {
cudaError_t emulator_launch(cudaStream_t, void (*)(void*), void (*)(void*), void*);
cudaError_t emulator_mark_freed(int, cudaStream_t, void*, size_t);
void emulator_fail(const char*);
}

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// Computed by torch's own code: they allocate, look at or copy bytes, and launch nothing.
const std::unordered_set<std::string> NATIVE = {
    "as_strided", "_efficientzerotensor", "empty", "empty_strided", "is_pinned",
    "is_set_to", "_local_scalar_dense", "_pin_memory", "record_stream", "_reshape_alias", "resize_",
    "set_", "unfold", "_unsafe_view", "view", "view_as_complex", "view_as_real"};
// Choose a library by the device, so they must be caught before.
const std::vector<std::string> CHOOSE_BY_DEVICE = {
    "aten::convolution", "aten::_convolution", "aten::convolution_backward"};
// Bring a CPU tensor of indices to the GPU themselves.
const std::unordered_set<std::string> BRING_INDICES = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
constexpr size_t MOST_FORMS = 1 << 16;
constexpr uint64_t DRAWN = 4; // by which a generator advances for each kernel, as for one thread

// What an operator returns, or leaves in an argument.
struct Form {
  std::vector<int64_t> sizes, strides;
  at::ScalarType type = at::kFloat;
};

struct Slot {
  int argument = -1; // the tensor argument that is returned; -1: a new tensor, or none
  bool defined = true;
  Form form;
};

struct Result {
  bool is_list = false;
  std::vector<Slot> slots;
};

struct Outcome {
  bool waits = false; // only the numbers tell
  std::vector<Result> results;
  std::vector<std::pair<int, Form>> resized; // tensor arguments that grow
};

// No autograd, no autocast, no Python around a kernel.
struct Bare {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard others{
      c10::autocast_dispatch_keyset | c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  c10::InferenceMode ordinary{false};
};

void call_cpu(const c10::OperatorHandle& op, Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

Form form_of(const Tensor& t) {
  return {t.sizes().vec(), t.strides().vec(), t.scalar_type()};
}

// Apply a function to every tensor among arguments; what it returns takes their place.
template <class Function>
void for_tensors(Stack& arguments, Function function) {
  for (IValue& value : arguments) {
    if (value.isTensor()) {
      if (value.toTensor().defined())
        value = function(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> changed;
      for (const Tensor& t : value.toTensorVector())
        changed.push_back(t.defined() ? function(t) : t);
      value = changed;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> changed;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        changed.push_back(t && t->defined() ? std::optional(function(*t)) : t);
      value = changed;
    }
  }
}

std::vector<Tensor> tensors_of(Stack arguments) {
  std::vector<Tensor> found;
  for_tensors(arguments, [&](const Tensor& t) {
    found.push_back(t);
    return t;
  });
  return found;
}

Tensor keep_wrapped(Tensor made, const Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Tensor zeros_like_on_host(const Tensor& t) {
  Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU).pinned_memory(false));
  if (made.storage().nbytes())
    std::memset(made.storage().mutable_data(), 0, made.storage().nbytes());
  return keep_wrapped(made, t);
}

// The same bytes as a tensor of the CPU; numbers of the host as they are now.
Tensor on_host(const Tensor& t) {
  if (!t.is_cuda())
    return keep_wrapped(t.clone(), t);
  Tensor seen = at::from_blob(
      const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(),
      at::TensorOptions().dtype(t.scalar_type()));
  return keep_wrapped(seen, t);
}

// ---- the device of an operator ----

c10::Device find_device(const c10::OperatorHandle& op, const Stack& arguments) {
  std::optional<c10::Device> found;
  const std::string& name = op.schema().name();
  std::vector<Tensor> on_cpu;
  for (const Tensor& t : tensors_of(arguments)) {
    if (!t.is_cuda()) {
      if (t.dim())
        on_cpu.push_back(t);
      continue;
    }
    TORCH_CHECK(
        !found || *found == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
        *found, " and ", t.device(), "! (emulated GPU, ", name, ")");
    found = t.device();
  }
  TORCH_CHECK(
      on_cpu.empty() || BRING_INDICES.count(name), "Expected all tensors to be on the same device, but found at least two devices, ",
      found.value_or(c10::Device(at::kCUDA)), " and cpu! (emulated GPU, ", name, ")");
  for (const IValue& value : arguments)
    if (!found && value.isDevice() && value.toDevice().is_cuda())
      found = value.toDevice();
  if (found && found->has_index())
    return *found;
  return c10::Device(at::kCUDA, c10::cuda::current_device());
}

void check_written(const c10::OperatorHandle& op, const Stack& arguments) {
  for (size_t i = 0; i < arguments.size(); i++) {
    auto* alias = op.schema().arguments()[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor() && arguments[i].toTensor().defined())
      TORCH_CHECK(
          arguments[i].toTensor().is_cuda(), op.schema().name(),
          ": writes a tensor of the CPU from tensors of a GPU (emulated GPU)");
  }
}

// ---- random numbers: seed and offset are the generator's at the time of the call ----

struct Randomness {
  int argument = -1;
  at::PhiloxCudaState state;
};

Randomness draw(const c10::OperatorHandle& op, const Stack& arguments) {
  Randomness found;
  for (size_t i = 0; i < arguments.size(); i++)
    if (op.schema().arguments()[i].name() == "generator")
      found.argument = static_cast<int>(i);
  if (found.argument < 0)
    return found;
  const IValue& given = arguments[found.argument];
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      given.isNone() ? std::nullopt : std::optional(given.toGenerator()),
      at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard<std::mutex> guard(generator->mutex_);
  found.state = generator->philox_cuda_state(DRAWN);
  return found;
}

at::Generator make_generator(const at::PhiloxCudaState& state) {
  uint64_t seed = state.captured_ ? *reinterpret_cast<uint64_t*>(state.seed_.ptr) : state.seed_.val;
  uint64_t offset = state.captured_
      ? *reinterpret_cast<uint64_t*>(state.offset_.ptr) + state.offset_intragraph_
      : state.offset_.val;
  uint64_t mixed = (seed ^ (offset * 0x9e3779b97f4a7c15ull)) * 0xbf58476d1ce4e5b9ull;
  return at::make_generator<at::CPUGeneratorImpl>(mixed ^ (mixed >> 31));
}

// ---- what an operator returns ----

bool writes_only(const c10::OperatorHandle& op) { // in place: numbers change no shape
  const auto& returned = op.schema().returns();
  for (const auto& value : returned)
    if (!value.alias_info() || !value.alias_info()->isWrite())
      return false;
  return true;
}

void append(std::string& key, const void* bytes, size_t length) {
  key.append(static_cast<const char*>(bytes), length);
}

void append(std::string& key, int64_t number) {
  append(key, &number, sizeof number);
}

void append(std::string& key, const Tensor& t) {
  append(key, t.dim() * 4 + t.is_cuda() * 2 + t.unsafeGetTensorImpl()->is_wrapped_number());
  append(key, static_cast<int64_t>(t.scalar_type()));
  append(key, t.sizes().data(), t.dim() * sizeof(int64_t));
  append(key, t.strides().data(), t.dim() * sizeof(int64_t));
}

std::string key_of(const c10::OperatorHandle& op, const Stack& arguments) {
  std::string key;
  bool in_place = writes_only(op);
  append(key, reinterpret_cast<int64_t>(&op.schema()));
  for (const IValue& value : arguments) {
    key.push_back(value.isNone() ? 'n' : value.isTensor() ? 't' : value.isDouble() ? 'd' : 'o');
    if (value.isNone() || value.isGenerator())
      continue;
    if (value.isTensor()) {
      if (value.toTensor().defined())
        append(key, value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      std::vector<Tensor> all = tensors_of({value});
      append(key, static_cast<int64_t>(value.toListRef().size()));
      for (const IValue& t : value.toListRef())
        key.push_back(t.isTensor() && t.toTensor().defined());
      for (const Tensor& t : all)
        append(key, t);
    } else if (value.isDouble()) {
      double number = in_place ? 0 : value.toDouble();
      append(key, &number, sizeof number);
    } else if (value.isInt())
      append(key, value.toInt());
    else if (value.isBool())
      key.push_back(value.toBool());
    else if (value.isIntList())
      for (int64_t number : value.toIntVector())
        append(key, number);
    else {
      std::ostringstream text;
      text << value;
      key += text.str();
    }
  }
  return key;
}

Outcome try_with_zeros(const c10::OperatorHandle& op, const Stack& arguments, const Randomness& randomness) {
  Stack stack = arguments;
  for_tensors(stack, zeros_like_on_host);
  if (randomness.argument >= 0)
    stack[randomness.argument] = at::make_generator<at::CPUGeneratorImpl>(0);
  for (IValue& value : stack)
    if (value.isDevice())
      value = c10::Device(at::kCPU);
  std::vector<Tensor> given = tensors_of(stack), wanted = tensors_of(arguments);
  call_cpu(op, stack);
  Outcome outcome;
  auto look = [&](const Tensor& t) {
    Slot slot;
    slot.defined = t.defined();
    for (size_t i = 0; slot.defined && i < given.size(); i++) {
      if (given[i].is_same(t))
        slot.argument = static_cast<int>(i);
      else if (t.storage().nbytes() && given[i].storage().is_alias_of(t.storage()) && slot.argument < 0)
        TORCH_CHECK(false, "emulated GPU: ", op.schema().name(), " returns a view: make it native");
    }
    if (slot.defined && slot.argument < 0)
      slot.form = form_of(t);
    return slot;
  };
  for (const IValue& value : stack) {
    Result result;
    if (value.isTensor())
      result.slots.push_back(look(value.toTensor()));
    else if (value.isTensorList()) {
      result.is_list = true;
      for (const Tensor& t : value.toTensorVector())
        result.slots.push_back(look(t));
    } else
      outcome.waits = true; // a number of Python
    outcome.results.push_back(result);
  }
  for (size_t i = 0; i < given.size(); i++)
    if (given[i].sizes() != wanted[i].sizes())
      outcome.resized.emplace_back(i, form_of(given[i]));
  return outcome;
}

bool depends_on_numbers(const c10::OperatorHandle& op, const Stack& arguments) {
  if (!op.hasTag(at::Tag::dynamic_output_shape))
    return false;
  if (op.schema().name() != "aten::index")
    return true;
  for (const std::optional<Tensor>& t : arguments[1].toOptionalTensorVector()) // masks only
    if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte))
      return true;
  return false;
}

Outcome foresee(const c10::OperatorHandle& op, const Stack& arguments, const Randomness& randomness) {
  static std::mutex lock;
  static std::unordered_map<std::string, Outcome> known;
  Outcome outcome;
  if (depends_on_numbers(op, arguments)) {
    outcome.waits = true;
    return outcome;
  }
  std::string key = key_of(op, arguments);
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = known.find(key);
    if (found != known.end())
      return found->second;
  }
  try {
    outcome = try_with_zeros(op, arguments, randomness);
  } catch (const c10::Error&) { // of the numbers, or of the shapes: the numbers will tell
    outcome.waits = true;
    return outcome;
  }
  std::lock_guard<std::mutex> guard(lock);
  if (known.size() == MOST_FORMS)
    known.clear();
  known.emplace(key, outcome);
  return outcome;
}

// ---- who looks for races is told what every kernel reads and writes ----

struct Access {
  const void* start;
  int writes, is_output;
};
using Observer = void (*)(const char* name, cudaStream_t, const Access*, int count);
std::atomic<Observer> observer{nullptr};

void observe(const c10::OperatorHandle& op, const Stack& arguments, const Stack& results, c10::Device device) {
  Observer told = observer;
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  // What is captured runs when its graph is launched, as work of that stream, which is not told.
  if (!told || cudaStreamIsCapturing(stream, &capture) || capture != cudaStreamCaptureStatusNone)
    return;
  std::vector<Access> found;
  std::unordered_set<c10::TensorImpl*> given;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto* alias = op.schema().arguments()[i].alias_info();
    for (const Tensor& t : tensors_of({arguments[i]})) {
      given.insert(t.unsafeGetTensorImpl());
      if (t.is_cuda() && t.numel())
        found.push_back({t.const_data_ptr(), alias && alias->isWrite(), 0});
    }
  }
  for (const Tensor& t : tensors_of(results))
    if (!given.count(t.unsafeGetTensorImpl()) && t.numel())
      found.push_back({t.const_data_ptr(), 1, 1});
  std::string name = op.schema().name() + "." + op.schema().overload_name();
  told(name.c_str(), stream, found.data(), static_cast<int>(found.size()));
}

// ---- kernels ----

struct Kernel {
  c10::OperatorHandle op;
  Stack arguments;
  Randomness randomness;
  std::vector<Tensor> outputs; // where new tensors lie, as tensors of the CPU
  bool keeps = false; // the results, for who waits
  Stack results;
  std::exception_ptr error;
};

void compute(Kernel& kernel) {
  Bare bare;
  Stack stack = kernel.arguments;
  if (kernel.randomness.argument >= 0)
    stack[kernel.randomness.argument] = make_generator(kernel.randomness.state);
  call_cpu(kernel.op, stack);
  if (kernel.keeps) {
    kernel.results = stack;
    return;
  }
  size_t next = 0;
  std::unordered_set<c10::TensorImpl*> given;
  for (const Tensor& t : tensors_of(kernel.arguments))
    given.insert(t.unsafeGetTensorImpl());
  for (const Tensor& t : tensors_of(stack))
    if (!given.count(t.unsafeGetTensorImpl())) {
      TORCH_CHECK(t.sizes() == kernel.outputs.at(next).sizes(), kernel.op.schema().name(), ": another shape than foreseen");
      if (t.numel())
        kernel.outputs[next].copy_(t);
      next++;
    }
}

void run(void* data) {
  Kernel& kernel = *static_cast<Kernel*>(data);
  try {
    compute(kernel);
  } catch (const std::exception& error) {
    if (kernel.keeps)
      kernel.error = std::current_exception();
    else
      emulator_fail((kernel.op.schema().name() + ": " + error.what()).c_str());
  }
}

void drop(void* data) {
  delete static_cast<Kernel*>(data);
}

// Memory that torch's allocator takes back is marked, in the order of its stream.
void watch_frees() {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Entry& entry) {
    if (entry.action_ == Entry::FREE_COMPLETED)
      emulator_mark_freed(
          entry.device_, static_cast<cudaStream_t>(entry.stream_),
          reinterpret_cast<void*>(entry.addr_), entry.size_);
  });
}

Kernel* make_kernel(const c10::OperatorHandle& op, const Stack& arguments, const Randomness& randomness) {
  auto* kernel = new Kernel{op, arguments, randomness, {}, false, {}, nullptr};
  for_tensors(kernel->arguments, on_host);
  for (IValue& value : kernel->arguments)
    if (value.isDevice())
      value = c10::Device(at::kCPU);
  return kernel;
}

Tensor make_output(const Form& form, c10::Device device) {
  return at::empty_strided(form.sizes, form.strides, at::TensorOptions().dtype(form.type).device(device));
}

// The host waits for what was queued, and for the kernel.
Stack compute_now(Kernel* kernel, c10::Device device, const Stack& arguments) {
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  std::unique_ptr<Kernel> own(kernel);
  own->keeps = true;
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  C10_CUDA_CHECK(emulator_launch(stream, run, nullptr, kernel));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  if (own->error)
    std::rethrow_exception(own->error);
  std::vector<Tensor> seen = tensors_of(own->arguments), given = tensors_of(arguments);
  for (size_t i = 0; i < seen.size(); i++)
    if (given[i].is_cuda() && seen[i].sizes() != given[i].sizes()) { // it was resized, elsewhere
      given[i].resize_(seen[i].sizes());
      on_host(given[i]).copy_(seen[i]);
    }
  for_tensors(own->results, [&](const Tensor& t) {
    for (size_t i = 0; i < seen.size(); i++)
      if (seen[i].is_same(t))
        return given[i];
    Tensor made = make_output(form_of(t), device);
    if (t.numel())
      on_host(made).copy_(t);
    return made;
  });
  return own->results;
}

Stack compute_later(Kernel* kernel, c10::Device device, const Stack& arguments, const Outcome& outcome) {
  std::vector<Tensor> given = tensors_of(arguments);
  Stack results;
  for (const Result& result : outcome.results) {
    c10::List<Tensor> made;
    for (const Slot& slot : result.slots) {
      Tensor t;
      if (slot.argument >= 0)
        t = given[slot.argument];
      else if (slot.defined) {
        t = make_output(slot.form, device);
        kernel->outputs.push_back(on_host(t));
      }
      made.push_back(t);
    }
    if (result.is_list)
      results.emplace_back(made);
    else
      results.emplace_back(made.get(0));
  }
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  C10_CUDA_CHECK(emulator_launch(stream, run, drop, kernel));
  return results;
}

void emulate(const c10::OperatorHandle& op, Stack* stack) {
  static std::once_flag once;
  size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  Bare bare;
  c10::Device device = find_device(op, arguments);
  check_written(op, arguments);
  c10::cuda::CUDAGuard guard(device);
  std::call_once(once, watch_frees);
  Randomness randomness = draw(op, arguments);
  Outcome outcome = foresee(op, arguments, randomness);
  if (!outcome.resized.empty()) {
    std::vector<Tensor> given = tensors_of(arguments);
    for (const auto& [i, form] : outcome.resized)
      given[i].resize_(form.sizes);
  }
  Kernel* kernel = make_kernel(op, arguments, randomness);
  Stack results = outcome.waits ? compute_now(kernel, device, arguments)
                                : compute_later(kernel, device, arguments, outcome);
  observe(op, arguments, results, device);
  for (IValue& value : results)
    stack->push_back(std::move(value));
}

// ---- operators with a way of their own ----

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  Stack stack = {self, source, non_blocking};
  if (self.is_cuda() && source.is_cuda() && self.device() == source.device())
    emulate(op, &stack);
  else {
    at::native::copy_(self, source, non_blocking); // cudaMemcpyAsync
    observe(op, stack, {}, self.is_cuda() ? self.device() : source.device());
  }
  return self;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0 : 1 / (1 - p)), mask};
}

int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0; // plain operators
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<torch::Library> register_all() {
  Silent silent; // each kernel takes the place of another
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  std::vector<torch::Library> made;
  made.emplace_back(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  torch::Library& library = made.back();
  std::unordered_set<std::string> own = {"copy_", "native_dropout", "_fused_sdp_choice"};
  std::vector<std::string> names = CHOOSE_BY_DEVICE;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0))
      continue;
    std::string base = name.name.substr(6);
    if (!NATIVE.count(base) && !own.count(base))
      names.push_back(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  }
  for (const std::string& name : names)
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&emulate>());
  library.impl("copy_", copy);
  library.impl("native_dropout", native_dropout);
  library.impl("_fused_sdp_choice", choose_attention);
  at::globalContext().setUserEnabledCuDNN(false);
  return made;
}

const std::vector<torch::Library> libraries = register_all();

} // namespace

extern "C" void emulator_observe(Observer function) {
  observer = function;
}
