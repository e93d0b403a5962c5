// Launches of kernels, with the errors of a GPU's.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

typedef struct CUstream_st* cudaStream_t;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

namespace emulator {

struct Launch {
  const void* kernel;
  dim3 grid, block;
  size_t dynamic_shared, parameter_bytes;
  void (*call)(void*);  // runs the kernel as one thread
  void* arguments;      // of `call`
};

cudaError_t launch(const Launch& launch);
cudaError_t allow_dynamic_shared(const void* kernel, int bytes);
void run(const Launch& launch);

// From now on launches return their errors, but kernels do not run.
void only_check_launches(bool only);
bool only_checks_launches();

template <class... P>
constexpr size_t parameter_bytes() {
  size_t bytes = 0;
  ((bytes = (bytes + alignof(P) - 1) / alignof(P) * alignof(P) + sizeof(P)), ...);
  return bytes;
}

template <class... P, size_t... index>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<index...>) {
  kernel(*static_cast<std::remove_reference_t<P>*>(arguments[index])...);
}

}  // namespace emulator

template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int value) {
  return emulator::allow_dynamic_shared(reinterpret_cast<const void*>(kernel), value);
}

template <class... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments, size_t dynamic_shared,
                             cudaStream_t) {
  auto thread = [&] { emulator::call(kernel, arguments, std::index_sequence_for<P...>{}); };
  return emulator::launch({reinterpret_cast<const void*>(kernel), grid, block, dynamic_shared,
                           emulator::parameter_bytes<P...>(),
                           [](void* thread_) { (*static_cast<decltype(thread)*>(thread_))(); }, &thread});
}
