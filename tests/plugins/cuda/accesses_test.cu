// Counts of bank conflicts and sectors, for kernels whose counts are known.
#include <cstdio>
#include <cstdlib>

#include "array.h"
#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "device/mma.cuh"

namespace {

using namespace aft::cuda;

struct Shared {
  alignas(16) float numbers[32 * 32];
};

// Lane i writes word stride * i: by stride words of each bank.
__global__ void shared_kernel(int stride) { shared_memory<Shared>().numbers[threadIdx.x * stride] = 1.0f; }
__global__ void half_kernel() { reinterpret_cast<uint16_t*>(shared_memory<Shared>().numbers)[threadIdx.x] = 1; }
__global__ void broadcast_kernel(float* to) {
  auto& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) shared.numbers[0] = 1.0f;
  __syncwarp();
  to[threadIdx.x] = shared.numbers[0];
}

// 16 bytes a lane, `pitch` floats from one lane's to the next one's.
__global__ void vector_kernel(int pitch) {
  machine::store(&shared_memory<Shared>().numbers[threadIdx.x % 8 * pitch + threadIdx.x / 8 * 4], uint4{});
}
__global__ void matrix_kernel(int pitch) {
  uint32_t words[4];
  load_matrices(words, &shared_memory<Shared>().numbers[threadIdx.x % 8 * pitch + threadIdx.x / 8 * 4]);
}

__global__ void global_kernel(float* to, int stride) { to[threadIdx.x * stride] = 1.0f; }
__global__ void copy_kernel(const float* from) {
  async_copy(&shared_memory<Shared>().numbers[threadIdx.x * 4], from + threadIdx.x * 4);
  async_commit();
  async_wait<0>();
}
__global__ void divergent_kernel(float* to) {
  if (threadIdx.x % 2 == 0)
    to[threadIdx.x] = 1.0f;
  else
    to[32 + threadIdx.x] = 1.0f;
}

emulator::AccessCounts last;

template <class... P, class... A>
void expect_counts(const char* what, emulator::AccessCounts expected, void (*kernel)(P...), A... arguments) {
  launch<Shared>(kernel, 1, 32, nullptr, arguments...);
  const bool same = last.passes == expected.passes && last.fewest_passes == expected.fewest_passes &&
                    last.sectors == expected.sectors && last.fewest_sectors == expected.fewest_sectors;
  expect(same, what);
  if (!same)
    std::printf("  %d of %d passes, %d of %d sectors\n", static_cast<int>(last.passes),
                static_cast<int>(last.fewest_passes), static_cast<int>(last.sectors),
                static_cast<int>(last.fewest_sectors));
}

}  // namespace

int main() {
  Array<float, 32 * 32> memory;
  emulator::count_accesses([](const emulator::AccessCounts& counts) { last = counts; });
  expect_counts("words in turn", {nullptr, 1, 1, 0, 0}, shared_kernel, 1);
  expect_counts("every second word", {nullptr, 2, 1, 0, 0}, shared_kernel, 2);
  expect_counts("words of one bank", {nullptr, 32, 1, 0, 0}, shared_kernel, 32);
  expect_counts("an odd stride", {nullptr, 1, 1, 0, 0}, shared_kernel, 31);
  expect_counts("two numbers of a word", {nullptr, 1, 1, 0, 0}, half_kernel);
  expect_counts("one word for all", {nullptr, 2, 2, 4, 4}, broadcast_kernel, memory.device);
  expect_counts("vectors in turn", {nullptr, 4, 4, 0, 0}, vector_kernel, 4 * 4 + 4);
  expect_counts("vectors of the same banks", {nullptr, 32, 4, 0, 0}, vector_kernel, 32);
  expect_counts("rows of matrices", {nullptr, 4, 4, 0, 0}, matrix_kernel, 4 * 4 + 4);
  expect_counts("rows of the same banks", {nullptr, 32, 4, 0, 0}, matrix_kernel, 32);
  expect_counts("coalesced words", {nullptr, 0, 0, 4, 4}, global_kernel, memory.device, 1);
  expect_counts("words of different sectors", {nullptr, 0, 0, 32, 4}, global_kernel, memory.device, 8);
  expect_counts("copies", {nullptr, 4, 4, 16, 16}, copy_kernel, memory.device);
  expect_counts("halves of the lanes", {nullptr, 0, 0, 8, 4}, divergent_kernel, memory.device);
  std::printf("%d failures\n", failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
