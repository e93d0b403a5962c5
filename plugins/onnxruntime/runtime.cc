#include "runtime.h"

#include <sched.h>

#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace ort {

void check(const Api& api, Status* status) {
  if (!status) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw Error(message);
}

static Tensor read_tensor(const Api& api, const Value* value) {
  TensorShape* info = nullptr;
  check(api, api.GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  Status* status = api.GetDimensionsCount(info, &rank);
  Tensor tensor{Shape(rank), nullptr};
  if (!status) status = api.GetDimensions(info, tensor.shape.data(), rank);
  api.ReleaseTensorTypeAndShapeInfo(info);
  check(api, status);
  void* data = nullptr;
  check(api, api.GetTensorMutableData(const_cast<Value*>(value), &data));
  tensor.data = data;
  return tensor;
}

// The runtime says of both in words alone that there is no attribute and that it is of another type.
void Attributes::expect_absent(Status* status, const char* name, const char* expected) const {
  float number = 0;
  int64_t integer = 0;
  size_t size = 0;
  bool absent = true;
  for (Status* failed : {api_.KernelInfoGetAttribute_float(info_, name, &number),
                         api_.KernelInfoGetAttribute_int64(info_, name, &integer),
                         api_.KernelInfoGetAttribute_string(info_, name, static_cast<char*>(nullptr), &size)})
    if (failed)
      api_.ReleaseStatus(failed);
    else
      absent = false;
  api_.ReleaseStatus(status);
  if (!absent) throw Error(std::string(name) + " is of a wrong type, expected " + expected);
}

int64_t Attributes::integer(const char* name, int64_t otherwise) const {
  int64_t value = 0;
  Status* status = api_.KernelInfoGetAttribute_int64(info_, name, &value);
  if (!status) return value;
  expect_absent(status, name, "an integer");
  return otherwise;
}

float Attributes::number(const char* name, float otherwise) const {
  float value = 0;
  Status* status = api_.KernelInfoGetAttribute_float(info_, name, &value);
  if (!status) return value;
  expect_absent(status, name, "a float");
  return otherwise;
}

std::string Attributes::text(const char* name, const char* otherwise) const {
  size_t size = 0;  // with the final zero
  if (Status* status = api_.KernelInfoGetAttribute_string(info_, name, static_cast<char*>(nullptr), &size)) {
    expect_absent(status, name, "text");
    return otherwise;
  }
  std::string value(size, '\0');
  check(api_, api_.KernelInfoGetAttribute_string(info_, name, &value[0], &size));
  value.resize(size - 1);
  return value;
}

bool Attributes::constant(size_t input, Tensor& tensor) const {
  int is_constant = 0;
  const Value* value = nullptr;
  check(api_, api_.KernelInfoGetConstantInput_tensor(info_, input, &is_constant, &value));
  if (is_constant) tensor = read_tensor(api_, value);
  return is_constant;
}

Tensor Run::input(size_t index) const {
  const Value* value = nullptr;
  check(api_, api_.KernelContext_GetInput(context_, index, &value));
  return read_tensor(api_, value);
}

std::optional<Tensor> Run::optional_input(size_t index) const {
  const Value* value = nullptr;
  check(api_, api_.KernelContext_GetInput(context_, index, &value));
  if (!value) return std::nullopt;
  return read_tensor(api_, value);
}

static Value* find_output(const Api& api, KernelContext* context, size_t index, const Shape& shape) {
  Value* value = nullptr;
  check(api, api.KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
  return value;
}

static void* mutable_data(const Api& api, Value* value) {
  void* data = nullptr;
  check(api, api.GetTensorMutableData(value, &data));
  return data;
}

void* Run::output(size_t index, const Shape& shape) const {
  Value* const value = find_output(api_, context_, index, shape);
  if (!value) throw Error("output " + std::to_string(index) + " is absent, expected a name for it");
  return mutable_data(api_, value);
}

void* Run::optional_output(size_t index, const Shape& shape) const {
  Value* const value = find_output(api_, context_, index, shape);
  return value ? mutable_data(api_, value) : nullptr;
}

// The interface does not tell the size of the session's thread pool. The number of processors this
// process may use is its upper bound in practice, and only steers how the work is cut.
static int usable_processors() {
  static const int count = [] {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return static_cast<int>(std::thread::hardware_concurrency());
  }();
  return count > 0 ? count : 1;
}

namespace {

// The runtime's threads know of no exceptions: what a task throws (it may find no memory) is kept until all have ended.
// Through its frames it would leave tasks running on what is gone, or the caller waiting for ever.
struct Tasks {
  void (*body)(void*, size_t);
  void* context;
  std::mutex mutex;
  std::exception_ptr thrown;

  static void run(void* tasks, size_t task) noexcept {
    Tasks& self = *static_cast<Tasks*>(tasks);
    try {
      self.body(self.context, task);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(self.mutex);
      self.thrown = std::current_exception();
    }
  }
};

}  // namespace

aft::Parallel Run::parallel() const {
  const auto run = [](void* pool, size_t count, void (*body)(void*, size_t), void* context) {
    const Run& self = *static_cast<const Run*>(pool);
    Tasks tasks{body, context, {}, nullptr};
    check(self.api_,
          self.api_.KernelContext_ParallelFor(self.context_, Tasks::run, count, size_t{0}, static_cast<void*>(&tasks)));
    if (tasks.thrown) std::rethrow_exception(tasks.thrown);
  };
  return {run, const_cast<Run*>(this), usable_processors()};
}

void* Run::stream() const {
  void* stream = nullptr;
  check(api_, api_.KernelContext_GetGPUComputeStream(context_, &stream));
  return stream;
}

std::shared_ptr<void> Run::workspace(size_t bytes) const {
  constexpr uintptr_t kAlignment = 256;
  if (bytes == 0) return nullptr;
  const Value* input = nullptr;
  const MemoryInfo* place = nullptr;  // the input's
  Allocator* owned = nullptr;
  check(api_, api_.KernelContext_GetInput(context_, size_t{0}, &input));
  check(api_, api_.GetTensorMemoryInfo(input, &place));
  check(api_, api_.KernelContext_GetAllocator(context_, place, &owned));
  const Api& api = api_;
  const std::shared_ptr<Allocator> allocator(owned, [&api](Allocator* a) { api.ReleaseAllocator(a); });

  // What is allocated for a stream goes to another one only after they were synchronized: sessions run on several
  // streams at once. Without a stream that call would fail.
  void* memory = nullptr;
  const size_t size = bytes + kAlignment - 1;
  check(api_, stream() ? api_.KernelContext_GetScratchBuffer(context_, place, size, &memory)
                       : api_.AllocatorAlloc(allocator.get(), size, &memory));
  if (!memory) throw std::bad_alloc();
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + kAlignment - 1) & ~(kAlignment - 1));
  return {aligned, [&api, allocator, memory](void*) {
            if (Status* status = api.AllocatorFree(allocator.get(), memory)) api.ReleaseStatus(status);
          }};
}

}  // namespace ort
