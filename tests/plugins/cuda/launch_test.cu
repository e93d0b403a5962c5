// Launches, and the order of threads and blocks, on the emulated GPU or a real one.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "array.h"
#include "device/launch.cuh"

namespace {

using namespace aft::cuda;

// Without the barrier this holds only in ascending order of threads.
__global__ void order_kernel(int* seen, bool barrier) {
  struct Flags {
    int set[64];
  };
  auto& shared = shared_memory<Flags>();
  shared.set[threadIdx.x] = 1;
  if (barrier) __syncthreads();
  seen[threadIdx.x] = threadIdx.x == 0 || shared.set[threadIdx.x - 1] == 1;
}

bool order_holds(unsigned order, bool barrier) {
  Array<int, 64> seen;
  device::order_threads(order);
  struct Flags {
    int set[64];
  };
  launch<Flags>(order_kernel, 1, 64, nullptr, seen.device, barrier);
  seen.read();
  for (int holds : seen.host)
    if (!holds) return false;
  return true;
}

// What each block finds of the one before, which a launch of blocks in any order does not define.
__global__ void neighbour_kernel(int* written, int* seen) {
  if (threadIdx.x == 0) written[blockIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) seen[blockIdx.x] = blockIdx.x == 0 || written[blockIdx.x - 1] == 1;
}

int blocks_that_see_neighbours(unsigned order) {
  Array<int, 16> written, seen;
  device::order_threads(order);
  launch(neighbour_kernel, 16, 32, nullptr, written.device, seen.device);
  seen.read();
  return static_cast<int>(std::count(seen.host, seen.host + 16, 1));
}

// A scratch that all blocks share holds for blocks that run one after the other.
__global__ void scratch_kernel(int* scratch, int* seen) {
  if (threadIdx.x == 0) *scratch = blockIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) seen[blockIdx.x] = *scratch == static_cast<int>(blockIdx.x);
}

bool blocks_share_scratch(unsigned order) {
  Array<int, 1> scratch;
  Array<int, 16> seen;
  device::order_threads(order);
  launch(scratch_kernel, 16, 32, nullptr, scratch.device, seen.device);
  seen.read();
  return std::count(seen.host, seen.host + 16, 1) == 16;
}

struct LargeShared {
  unsigned char bytes[60 * 1024];
};
__global__ void large_shared_kernel(int* seen) {
  auto& shared = shared_memory<LargeShared>();
  shared.bytes[sizeof shared.bytes - 1] = 1;
  *seen = 1;
}
#if !defined(__CUDACC__)
struct LargeParameter {
  unsigned char bytes[5000];
};
__global__ void large_parameter_kernel(LargeParameter) {}
#endif
__global__ void empty_kernel() {}

void launch_errors() {
  const auto launched = [](dim3 grid, unsigned threads) { return launch(empty_kernel, grid, threads, nullptr); };
  expect(launched(1, 1024) == 0 && launched(dim3(1, 2, 3), 32) == 0, "launches");
  for (dim3 grid : {dim3(0), dim3(0x80000000), dim3(1, 65536), dim3(1, 1, 65536)})
    expect(launched(grid, 32) == cudaErrorInvalidConfiguration, "a grid beyond its limits");
  expect(launched(1, 1056) == cudaErrorInvalidConfiguration && launched(1, 0) == cudaErrorInvalidConfiguration,
         "a block beyond its limits");
  Array<int, 1> seen;
  void* arguments[] = {&seen.device};
  expect(cudaLaunchKernel(large_shared_kernel, dim3(1), dim3(32), arguments, sizeof(LargeShared), nullptr) ==
             cudaErrorInvalidValue,
         "large shared memory that no attribute allows");
  expect(launch<LargeShared>(large_shared_kernel, 1, 32, nullptr, seen.device) == 0, "large shared memory");
  expect(cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 300 << 10) ==
             cudaErrorInvalidValue,
         "more shared memory than there is");
#if !defined(__CUDACC__)  // which refuses to compile it
  expect(launch(large_parameter_kernel, 1, 32, nullptr, LargeParameter{}) == cudaErrorInvalidValue,
         "parameters of more than 4 KiB");
#endif
#if defined(__CUDACC__)
  cudaGetLastError();
#endif
}

}  // namespace

int main() {
  launch_errors();
  for (unsigned order : {0, 1, 2, 3}) expect(order_holds(order, true), "a barrier orders");
#if !defined(__SANITIZE_THREAD__)  // the race is there to be found
  if (device::kEmulated) {
    expect(!order_holds(1, false) && !order_holds(2, false), "a missing barrier shows");
    for (unsigned order : {1, 2, 3, 4})
      expect(blocks_that_see_neighbours(order) < 16, "a dependence on an earlier block shows");
    for (unsigned order : {2, 3, 4}) expect(!blocks_share_scratch(order), "a scratch shared by blocks shows");
  }
#endif
  std::printf("%d failures\n", failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
