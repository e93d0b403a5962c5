// The memory that kernels work on: a GPU's where nvcc compiles the tests, else that of the emulated one.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
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

// Whether no bytes next to the memory were written, where that is known.
inline bool is_intact(const void*) { return true; }

template <class T>
using HostAllocator = std::allocator<T>;

inline void order_threads(unsigned) {}
inline void only_check_launches(bool) {}
inline bool only_checks_launches() { return false; }

}  // namespace device

#else
#include "emulator.h"
#include "memory.h"

namespace device {

constexpr bool kEmulated = true;

inline void* allocate(size_t bytes) { return emulator::allocate_device(bytes); }
inline void release(void* memory) { emulator::release_device(memory); }
inline void write(void* to, const void* from, size_t bytes) { emulator::copy_to_device(to, from, bytes); }
inline void read(void* to, const void* from, size_t bytes) { emulator::copy_from_device(to, from, bytes); }
inline bool is_intact(const void* memory) { return emulator::is_intact(memory); }

// For memory of the host that a kernel could be given in error.
template <class T>
using HostAllocator = emulator::HostAllocator<T>;

inline void order_threads(unsigned seed) { emulator::seed(seed); }
inline void only_check_launches(bool only) { emulator::only_check_launches(only); }
inline bool only_checks_launches() { return emulator::only_checks_launches(); }

}  // namespace device
#endif
