// A GPU for tests: lets a C++ compiler build a .cu file as it is and runs its kernels on the CPU.
//
// Every CUDA thread is a fiber. Several blocks run at once, and the seed decides the order of blocks and threads:
// whenever a thread has to wait, any other that can run may be next. A kernel that is correct only for some orders
// fails for some seed. ThreadSanitizer names missing barriers, because it sees only barriers order the fibers.
//
// Undefined behavior of a GPU ends the program with a message: a barrier that not all threads reach, a vector at the
// wrong alignment, an asynchronous copy left under way, an access to memory of the host or outside of every
// allocation (memory.h). Launches beyond a limit return a GPU's errors (launch.h).
//
// Shared memory starts as NaN. The target of an asynchronous copy is NaN until the copy is waited for. Numbers are as
// rough as a GPU's: products of matrices are summed as tensor cores do, and approximate instructions are off within
// their bounds (approximate.h). Bank conflicts and sectors can be counted (access_counts.h).
//
// Not emulated: divergence within a warp (shuffles take all lanes), a weak order of memory, and time.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "access_counts.h"
#include "approximate.h"
#include "float16.h"
#include "launch.h"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace emulator {

// A copy under way, part of the group-th group of its thread.
struct AsyncCopy {
  uint32_t* shared;
  const void* global;
  int bytes, group;
};
struct AsyncCopies {
  std::vector<AsyncCopy> pending;
  int group = 0;  // not yet committed
};

void seed(unsigned order);  // of launches from now on: 0 ascending, 1 descending, else shuffled

// How tensor cores add from now on.
enum class TensorCores { kSm80, kFiner };
void choose_tensor_cores(TensorCores choice);

[[noreturn]] void fail(const char* what);
AsyncCopies& async_copies();  // of the thread that is running
void* static_shared_memory(size_t bytes, size_t alignment);
void* dynamic_shared_memory(size_t bytes);

// Each fails where the running thread may not access so many bytes at once: of device or shared memory, of a row for
// ldmatrix, and of a copy's two sides.
void check_access(const void* p, size_t bytes);
void check_matrix_row(const void* row);
void check_copy(const void* shared, const void* global, size_t bytes);

// Waits for the other lanes of the warp; the last to come calls combine on what all 32 passed.
using Combine = void(void* const (&lanes)[32]);
void warp_collective(Combine* combine, void* lane);

struct Shuffle {
  uint32_t value, result;
  int source;
};
struct Product {
  float* c;
  const uint32_t *a, *b;
};
struct MatrixRow {
  uint16_t elements[8];
  uint32_t* result;
};
Combine shuffle, multiply_half, multiply_bfloat, multiply_tf32, distribute_rows, distribute_rows_transposed;

// The value that lane `source` passes.
template <class T>
T shuffled(T value, int source) {
  static_assert(sizeof(T) == 4, "shuffles move 32 bits");
  Shuffle lane{0, 0, source};
  std::memcpy(&lane.value, &value, 4);
  warp_collective(shuffle, &lane);
  std::memcpy(&value, &lane.result, 4);
  return value;
}
inline int lane() { return static_cast<int>(threadIdx.x % 32); }
inline void check_mask(unsigned mask) {
  if (mask != ~0u) fail("a shuffle or __syncwarp of part of a warp is not emulated");
}

}  // namespace emulator

void __syncthreads();
void __syncwarp(unsigned mask = ~0u);

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  emulator::check_mask(mask);
  return emulator::shuffled(value, source & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  emulator::check_mask(mask);
  return emulator::shuffled(value, (emulator::lane() ^ distance) & 31);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  emulator::check_mask(mask);
  const int source = emulator::lane() - static_cast<int>(distance);
  return emulator::shuffled(value, source < 0 ? emulator::lane() : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  emulator::check_mask(mask);
  const int source = emulator::lane() + static_cast<int>(distance);
  return emulator::shuffled(value, source > 31 ? emulator::lane() : source);
}

inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

namespace aft::cuda::machine {

constexpr float kLog2E = 1.44269504f;

inline float fast_exp2(float x) { return emulator::approximate_exp2(x); }
inline float fast_exp(float x) { return fast_exp2(x * kLog2E); }
inline float fast_divide(float x, float y) { return emulator::approximate_quotient(x, y); }

template <class Words>
__forceinline__ Words load(const void* p) {
  emulator::check_access(p, sizeof(Words));
  emulator::Unrecorded access;
  return *static_cast<const Words*>(p);
}
template <class Words>
__forceinline__ void store(void* p, const Words& words) {
  emulator::check_access(p, sizeof(Words));
  emulator::Unrecorded access;
  *static_cast<Words*>(p) = words;
}

inline float half_to_float(uint16_t bits) { return emulator::half_to_float(bits); }
inline uint32_t pack_half(float low, float high) {
  return emulator::float_to_half(low) | static_cast<uint32_t>(emulator::float_to_half(high)) << 16;
}
inline uint32_t pack_bfloat(float low, float high) {
  return emulator::float_to_bfloat(low) | static_cast<uint32_t>(emulator::float_to_bfloat(high)) << 16;
}
// To nearest, ties away from zero.
inline uint32_t to_tf32(float x) {
  return std::isnan(x) ? 0x7fffffffu : (__float_as_uint(x) + 0x1000u) & ~0x1fffu;
}

inline void mma_half(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::Product lane{c, a, b};
  emulator::warp_collective(emulator::multiply_half, &lane);
}
inline void mma_bfloat(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::Product lane{c, a, b};
  emulator::warp_collective(emulator::multiply_bfloat, &lane);
}
inline void mma_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::Product lane{c, a, b};
  emulator::warp_collective(emulator::multiply_tf32, &lane);
}

// Each lane reads the row it points to, so that sanitizers see whose read it is.
template <bool transposed>
inline void ldmatrix(uint32_t (&r)[4], const void* row) {
  emulator::check_matrix_row(row);
  emulator::MatrixRow lane;
  {
    emulator::Unrecorded access;
    for (int i = 0; i < 8; ++i) lane.elements[i] = static_cast<const uint16_t*>(row)[i];
  }
  lane.result = r;
  emulator::warp_collective(transposed ? emulator::distribute_rows_transposed : emulator::distribute_rows, &lane);
}

// Plain stores of words, here and on delivery: ThreadSanitizer sees them as this thread's.
inline void async_copy(void* shared, const void* global, int bytes) {
  emulator::check_copy(shared, global, static_cast<size_t>(bytes));
  emulator::Unrecorded access;
  auto* words = static_cast<uint32_t*>(shared);
  for (int i = 0; i < 4; ++i) words[i] = ~0u;
  emulator::AsyncCopies& copies = emulator::async_copies();
  copies.pending.push_back({words, global, bytes, copies.group});
}
inline void async_commit() { ++emulator::async_copies().group; }
template <int pending>
inline void async_wait() {
  emulator::Unrecorded access;
  emulator::AsyncCopies& copies = emulator::async_copies();
  size_t kept = 0;
  for (const emulator::AsyncCopy& copy : copies.pending) {
    if (copy.group + pending >= copies.group) {
      copies.pending[kept++] = copy;
      continue;
    }
    uint32_t words[4] = {};
    std::memcpy(words, copy.global, copy.bytes);
    for (int i = 0; i < 4; ++i) copy.shared[i] = words[i];
  }
  copies.pending.resize(kept);
}

// The shared memory that a block may have by default.
constexpr size_t kStaticShared = 48 * 1024;

template <class T>
T& shared_memory() {
  return *static_cast<T*>(sizeof(T) <= kStaticShared ? emulator::static_shared_memory(sizeof(T), alignof(T))
                                                     : emulator::dynamic_shared_memory(sizeof(T)));
}

}  // namespace aft::cuda::machine
