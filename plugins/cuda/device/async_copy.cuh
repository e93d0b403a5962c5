// Copies from global to shared memory that go on while the thread computes.
#pragma once

#include "device/device.cuh"

namespace aft::cuda {

// 16 bytes, both addresses multiples of 16; only the first `bytes` (0 to 16) are read, the others become 0.
__device__ __forceinline__ void async_copy(void* shared, const void* global, int bytes = 16) {
  machine::async_copy(shared, global, bytes);
}

// Makes a group of this thread's copies since the last call.
__device__ __forceinline__ void async_commit() { machine::async_commit(); }

// Waits until at most the newest `pending` groups of this thread are under way. Copies of other threads
// are there after a barrier that follows their wait.
template <int pending>
__device__ __forceinline__ void async_wait() {
  machine::async_wait<pending>();
}

}  // namespace aft::cuda
