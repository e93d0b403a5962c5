// The memory that kernels work on: a GPU's where nvcc compiles the tests, else that of the emulated one.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace device {

// What is under way, for the message where a kernel breaks down.
inline std::string doing;

}  // namespace device

#if defined(__CUDACC__)
#include <cuda_runtime.h>

namespace device {

constexpr bool kEmulated = false;

inline void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("FAILED: %s %s\n", doing.c_str(), cudaGetErrorString(status));
  std::exit(EXIT_FAILURE);
}

// A multiple of 256.
inline void* allocate(size_t bytes) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, bytes));
  return memory;
}
inline void release(void* memory) { require(cudaFree(memory)); }
inline void write(void* to, const void* from, size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}
// Waits for the kernels before.
inline void read(void* to, const void* from, size_t bytes) {
  require(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

// What a kernel must not touch, where that can be seen at once.
inline void poison(void*, size_t) {}
inline void unpoison(void*, size_t) {}

inline void order_threads(unsigned) {}

}  // namespace device

#else
#include "emulator.h"

extern "C" [[gnu::weak]] void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" [[gnu::weak]] void __asan_unpoison_memory_region(const volatile void*, size_t);

namespace device {

constexpr bool kEmulated = true;

inline void* allocate(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes) != 0) std::abort();
  return memory;
}
inline void release(void* memory) { std::free(memory); }
inline void write(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void read(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

inline void poison(void* memory, size_t bytes) {
  if (__asan_poison_memory_region) __asan_poison_memory_region(memory, bytes);
}
inline void unpoison(void* memory, size_t bytes) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(memory, bytes);
}

inline void order_threads(unsigned seed) { emulator::seed(seed); }

}  // namespace device
#endif
