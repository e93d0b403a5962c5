#include "scratch.h"

#include <memory>
#include <new>

namespace aft {

namespace {
constexpr std::align_val_t kAlignment{64};

float* allocate(size_t floats) { return static_cast<float*>(::operator new(floats * sizeof(float), kAlignment)); }
}  // namespace

Scratch::Scratch(size_t floats) : data_(allocate(floats)) {}
Scratch::~Scratch() { ::operator delete(data_, kAlignment); }

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
