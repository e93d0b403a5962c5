// The memories of the emulated GPU and of its host, which are separate as soon as a test allocates device memory.
//
// Device memory can be touched by a running kernel and by the copies declared here, host memory of this kind by all but
// a running kernel. Any other access ends the program with a message. A page that nothing may touch lies behind each
// device allocation. Plain accesses to other memory of the host, such as its stack and its constants, are not noticed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

void* allocate_device(size_t bytes);  // a multiple of 256, filled with NaN
void release_device(void* memory);    // fails if bytes next to the allocation were written
void copy_to_device(void* to, const void* from, size_t bytes);
void copy_from_device(void* to, const void* from, size_t bytes);
bool is_intact(const void* memory);  // whether no bytes next to the allocation were written

void* allocate_host(size_t bytes);
void release_host(void* memory, size_t bytes);

// For vectors of the host that a kernel must not touch.
template <class T>
struct HostAllocator {
  using value_type = T;
  HostAllocator() = default;
  template <class U>
  HostAllocator(const HostAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(allocate_host(count * sizeof(T))); }
  void deallocate(T* memory, size_t count) { release_host(memory, count * sizeof(T)); }
  template <class U>
  bool operator==(const HostAllocator<U>&) const {
    return true;
  }
  template <class U>
  bool operator!=(const HostAllocator<U>&) const {
    return false;
  }
};

// From one to the other a kernel runs.
void open_device_memory();
void close_device_memory();

// Fails unless the bytes lie within one device allocation; where there is none, memories are not separate.
void check_global(const void* p, size_t bytes);
bool is_device_memory(const void* p);

// A region for the shared memory of a block, with a page behind it that nothing may touch.
class SharedRegion {
 public:
  // Places as many bytes at the region's end, filled with NaN and aligned to `alignment`, at most 16, and no more.
  char* place(size_t bytes, size_t alignment);
  bool contains(const void* p, size_t count) const {
    const auto begin = reinterpret_cast<uintptr_t>(p);
    return begin >= reinterpret_cast<uintptr_t>(memory_) && begin + count <= reinterpret_cast<uintptr_t>(memory_ + bytes_);
  }
  void clear() { memory_ = nullptr, bytes_ = 0; }
  char* memory() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  char *region_ = nullptr, *memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace emulator
