// The one seam between a GPU and the tests' emulator of one. Under nvcc these functions are instructions and
// launches; under a C++ compiler emulator.h (in tests/plugins/cuda/emulator) defines the same names and the
// few words of CUDA that kernels use (threadIdx, __syncthreads, __shfl_xor_sync, ...).
//
// Kernels call the typed wrappers: launch.cuh, load_store.cuh, mma.cuh, async_copy.cuh.
#pragma once

#include <cstdint>

#if !defined(__CUDACC__)
#include "emulator.h"
#else
#include <cuda_runtime.h>

namespace aft::cuda::machine {

constexpr float kLog2E = 1.44269504f;

// 2^x, off by 2 units in the last place at most. Numbers below 2^-126 count as 0, as x and as the result.
__device__ __forceinline__ float fast_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// e^x, off by 2 + 1.2 |x| units in the last place at most; 0 where that is below 2^-126. Where x is a difference
// from a number that stays the same, fast_exp2(fmaf(x, kLog2E, -number * kLog2E)) takes one instruction less.
__device__ __forceinline__ float fast_exp(float x) { return fast_exp2(x * kLog2E); }

// x / y, off by 2 units in the last place at most; 0 where |y| is above 2^126.
__device__ __forceinline__ float fast_divide(float x, float y) { return __fdividef(x, y); }

// One instruction's worth of bytes, at an address that is a multiple of their number.
template <class Words>
__device__ __forceinline__ Words load(const void* p) {
  return *static_cast<const Words*>(p);
}
template <class Words>
__device__ __forceinline__ void store(void* p, const Words& words) {
  *static_cast<Words*>(p) = words;
}

__device__ __forceinline__ float half_to_float(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// Two numbers in a word, the first in its low half.
__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ uint32_t pack_bfloat(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
  return word;
}

// clang-format off: PTX, with one list of operands a line.
#define AFT_MMA_16_8_16(name, type)                                                              \
  __device__ __forceinline__ void name(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                  \
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                         \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));            \
  }
AFT_MMA_16_8_16(mma_half, "f16")
AFT_MMA_16_8_16(mma_bfloat, "bf16")
#undef AFT_MMA_16_8_16

__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

template <bool transposed>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

__device__ __forceinline__ void async_copy(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(shared)), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
}
// clang-format on

// The shared memory that a block may have by default, and that the compiler's report includes.
constexpr size_t kStaticShared = 48 * 1024;

template <class T>
__device__ __forceinline__ T& shared_memory() {
  if constexpr (sizeof(T) <= kStaticShared) {
    __shared__ T memory;
    return memory;
  } else {
    extern __shared__ __align__(16) unsigned char dynamic_memory[];
    return *reinterpret_cast<T*>(dynamic_memory);
  }
}

}  // namespace aft::cuda::machine
#endif

namespace aft::cuda::machine {

template <class Shared, class Kernel>
cudaError_t launch(Kernel* kernel, dim3 grid, unsigned threads, cudaStream_t stream, void** arguments) {
  const size_t dynamic = sizeof(Shared) <= kStaticShared ? 0 : sizeof(Shared);
  if (dynamic > 0) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dynamic));
    if (status != cudaSuccess) return status;
  }
  return cudaLaunchKernel(kernel, grid, dim3(threads), arguments, dynamic, stream);
}

}  // namespace aft::cuda::machine
