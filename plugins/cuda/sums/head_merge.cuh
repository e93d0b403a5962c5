// Merges the states of a head's chunks (head_context.cuh).
//
// Computes: in state 0 the sum of all; as a scan, in each state the sum of the chunks before it.
// Method:   a block takes a row of S and its sum of weights. Groups of threads take some neighboring chunks each, 4 of
//           them loaded together; a tree over the groups gives the chunks before each. At most 32 chunks are merged in
//           a row.
#pragma once

#include "sums/head_context.cuh"

namespace aft::cuda {

constexpr int kMergeThreads = 256;

// A thread's cells of a state: four of the row, and the sum of the row's weights.
struct StateCells {
  float maximum, cells[5];

  static __device__ __forceinline__ StateCells empty() { return {kNoKey, {}}; }
  __device__ __forceinline__ void merge(const StateCells& other) {
    const float highest = fmaxf(maximum, other.maximum);
    const float mine = machine::fast_exp(maximum - highest), theirs = machine::fast_exp(other.maximum - highest);
#pragma unroll
    for (int i = 0; i < 5; ++i) cells[i] = cells[i] * mine + other.cells[i] * theirs;
    maximum = highest;
  }
};

struct MergeShared {
  float maxima[kMostChunks];
  StateCells totals[kMergeThreads];
};

__device__ __forceinline__ void merge_states(float* states, int width, int chunks, bool scan) {
  constexpr int kAtOnce = 4;
  auto& shared = shared_memory<MergeShared>();
  const int quads = width / 4, groups = kMergeThreads / quads;
  const int quad = threadIdx.x % quads, group = threadIdx.x / quads, row = blockIdx.x % width;
  const int size = static_cast<int>(state_floats(width));
  float* first = states + static_cast<int64_t>(blockIdx.x / width * chunks) * size;
  const int at = row * width + quad * 4, sum = width * width + row, maximum = sum + width;
  const int summed = scan ? chunks - 1 : chunks, each = ceil_div(summed, groups);
  const int begin = at_most(group * each, summed), end = at_most(begin + each, summed);
  for (int i = threadIdx.x; i < summed; i += kMergeThreads) shared.maxima[i] = first[i * size + maximum];
  __syncthreads();

  // Calls f(chunk, its cells) for the group's chunks.
  const auto for_each = [&](const auto& f) {
    for (int i = begin; i < end; i += kAtOnce) {
      Raw<float, 4> cells[kAtOnce];
      float sums[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (i + k >= end) continue;
        const float* state = first + (i + k) * size;
        cells[k] = Raw<float, 4>(state + at);
        sums[k] = quad == 0 ? state[sum] : 0.0f;  // which the others may find overwritten
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (i + k < end)
          f(i + k, StateCells{shared.maxima[i + k], {cells[k][0], cells[k][1], cells[k][2], cells[k][3], sums[k]}});
    }
  };
  const auto write = [&](int chunk, const StateCells& total) {
    float* state = first + chunk * size;
    store(state + at, {total.cells[0], total.cells[1], total.cells[2], total.cells[3]});
    if (quad != 0) return;
    state[sum] = total.cells[4];
    state[maximum] = total.maximum;
  };

  StateCells total = StateCells::empty();
  for_each([&](int, const StateCells& cells) { total.merge(cells); });
  shared.totals[threadIdx.x] = total;
  __syncthreads();  // every sum of weights has been read
  for (int distance = 1; distance < groups; distance *= 2) {
    StateCells upto = total;
    if (group >= distance) {
      upto = shared.totals[threadIdx.x - distance * quads];
      upto.merge(total);
    }
    total = upto;
    __syncthreads();
    shared.totals[threadIdx.x] = total;
    __syncthreads();
  }
  if (!scan) {
    if (group == groups - 1) write(0, total);
    return;
  }
  if (group == groups - 1) write(summed, total);
  StateCells before = group > 0 ? shared.totals[threadIdx.x - quads] : StateCells::empty();
  for_each([&](int chunk, const StateCells& cells) {
    write(chunk, before);
    before.merge(cells);
  });
}

}  // namespace aft::cuda
