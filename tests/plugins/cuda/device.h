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
inline void use_finer_tensor_cores(bool) {}
inline void only_check_launches(bool) {}
inline bool only_checks_launches() { return false; }
inline void print_accesses(bool) {}

}  // namespace device

#else
#include <dlfcn.h>

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
inline void use_finer_tensor_cores(bool finer) {
  emulator::choose_tensor_cores(finer ? emulator::TensorCores::kFiner : emulator::TensorCores::kSm80);
}
inline void only_check_launches(bool only) { emulator::only_check_launches(only); }
inline bool only_checks_launches() { return emulator::only_checks_launches(); }

// A line for each launch: the kernel's place in the program, and its passes and sectors with the fewest of each.
inline void print_accesses(const emulator::AccessCounts& counts) {
  Dl_info program;
  if (!dladdr(counts.kernel, &program)) std::abort();
  std::printf("%tx %lld %lld %lld %lld\n", static_cast<const char*>(counts.kernel) - static_cast<char*>(program.dli_fbase),
              static_cast<long long>(counts.passes), static_cast<long long>(counts.fewest_passes),
              static_cast<long long>(counts.sectors), static_cast<long long>(counts.fewest_sectors));
}
inline void print_accesses(bool wanted) {
  emulator::count_accesses(wanted ? static_cast<void (*)(const emulator::AccessCounts&)>(print_accesses) : nullptr);
}

}  // namespace device
#endif
