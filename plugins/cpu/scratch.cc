#include "scratch.h"

#include <cstdint>
#include <memory>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace aft {

namespace {
constexpr size_t kAlignment = 64;

// Where the memory begins is kept before the aligned address. The aligned operator new is not used: glibc before 2.38
// looks for more than the size and so cannot take what it freed of the same size (bug 14581). Each call then took other
// memory: 24 MiB for a document in chunks that takes 12 MiB.
void*& begin_of(float* data) { return reinterpret_cast<void**>(data)[-1]; }

float* allocate(size_t floats) {
  static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= sizeof(void*), "begin_of has no room");
  const size_t size = floats * sizeof(float) + kAlignment;
  char* const memory = static_cast<char*>(::operator new(size));
  float* const data = reinterpret_cast<float*>(memory + kAlignment - reinterpret_cast<uintptr_t>(memory) % kAlignment);
  begin_of(data) = memory;
  ASAN_POISON_MEMORY_REGION(data + floats, memory + size - reinterpret_cast<char*>(data + floats));
  return data;
}
}  // namespace

Scratch::Scratch(size_t floats) : data_(allocate(floats)) {}
Scratch::~Scratch() { ::operator delete(begin_of(data_)); }

float* task_memory(size_t floats) {
  thread_local std::unique_ptr<Scratch> buffer;
  thread_local size_t capacity = 0;
  if (floats > capacity) {
    buffer.reset();
    capacity = 0;
    buffer = std::make_unique<Scratch>(floats);
    capacity = floats;
  }
  return buffer->data();
}

}  // namespace aft
