// From the C interface to kernels: launching, shared memory, choosing template arguments, workspace.
#pragma once

#include "device/device.cuh"
#include "device/load_store.cuh"
#include "kernels.h"

namespace aft::cuda {

using std::int64_t;

constexpr int kWarp = 32;
constexpr int64_t kGridLimit = 65535;  // of grid.y and grid.z; grid.x may be 2^31 - 1

// The most one block can have on every architecture we compile for (sm_86, 89 and 120 have least).
constexpr size_t kMostShared = 99 * 1024;

struct NoShared {};

template <class T>
struct Same {
  using type = T;
};

// The block's shared memory, a trivial struct; the kernel's launch names the same struct.
template <class T>
__device__ __forceinline__ T& shared_memory() {
  return machine::shared_memory<T>();
}

// Enqueues kernel(arguments...) with a T& shared_memory<T>() for every block, T being `Shared`.
template <class Shared = NoShared, class... P>
int launch(void (*kernel)(P...), dim3 grid, int threads, cudaStream_t stream, typename Same<P>::type... arguments) {
  static_assert(sizeof(Shared) <= kMostShared, "more shared memory than sm_86, sm_89 and sm_120 have");
  void* pointers[] = {&arguments...};
  return machine::launch<Shared>(kernel, grid, static_cast<unsigned>(threads), stream, pointers);
}

// Calls f with a value of the tensors' element type; returns the result of f.
template <class F>
int with_element(AftCudaElement element, const F& f) {
  switch (element) {
    case AFT_CUDA_FLOAT32: return f(float{});
    case AFT_CUDA_FLOAT16: return f(Half{});
    case AFT_CUDA_BFLOAT16: return f(BFloat16{});
  }
  return 1;  // cudaErrorInvalidValue
}

// Valid keys of document b.
__device__ __forceinline__ int64_t length_of(const AftCudaSequence& s, int64_t b) {
  const int64_t length = s.lengths[b];
  return length < 0 ? 0 : length < s.tokens ? length : s.tokens;
}

// Row t of document b.
template <class T>
__host__ __device__ __forceinline__ const T* row(const AftCudaTensor& tensor, int64_t b, int64_t t) {
  return static_cast<const T*>(tensor.data) + b * tensor.batch_stride + t * tensor.token_stride;
}

// Whether every row of the tensor starts at a multiple of 16 bytes.
template <class T>
bool rows_aligned(const AftCudaTensor& tensor) {
  constexpr int64_t unit = 16 / sizeof(T);
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.batch_stride % unit == 0 &&
         tensor.token_stride % unit == 0;
}

// Whether query, key, value and output can all be read and written 16 bytes at a time.
template <class T>
bool all_aligned(const AftCudaSequence& s) {
  return rows_aligned<T>(s.query) && rows_aligned<T>(s.key) && rows_aligned<T>(s.value) &&
         rows_aligned<T>({s.output, s.tokens * s.channels, s.channels});
}

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <class T>
__host__ __device__ constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace aft::cuda
