// Products of tiles in shared memory, cut among the warps of a block.
//
// Computes: sum_k a[row, k] b[k, column], a [kRows, kColumns] tile.
// Method:   tensor cores with tf32 operands and float32 sums. For float32 tensors each operand is split into two tf32
//           numbers, and three products are taken. A row of a left operand is 4 floats longer than a multiple of 32,
//           and a row of a right (or transposed left) one 8: then the 32 lanes of each fragment read from 32 banks.
// Numerics: a split product has a relative error of about 2^-21; operands that are not split are rounded to tf32, which
//           holds every float16 and bfloat16 number exactly.
#pragma once

#include "device/mma.cuh"
#include "device/tile_rows.cuh"

namespace aft::cuda {

// A [kRows, kColumns] product, cut among the block's warps and held in their registers. Where there are fewer
// fragments of 16 x 8 than warps, the last warps have none.
template <int kRows, int kColumns>
struct Product {
  // Rows of warps: those with the fewest reads from shared memory for each multiplication.
  static constexpr int best_rows() {
    int best = 1, fewest = 1 << 30;
    for (int rows = 1; rows <= kBlockWarps && rows <= kRows / 16; rows *= 2) {
      const int columns = kBlockWarps / rows < kColumns / 8 ? kBlockWarps / rows : kColumns / 8;
      const int reads = 4 * (kRows / 16 / rows) + 2 * (kColumns / 8 / columns);
      if (reads < fewest) best = rows, fewest = reads;
    }
    return best;
  }
  static constexpr int kWarpRows = best_rows();
  static constexpr int kWarpColumns = kBlockWarps / kWarpRows < kColumns / 8 ? kBlockWarps / kWarpRows : kColumns / 8;
  static constexpr int kHigh = kRows / 16 / kWarpRows, kWide = kColumns / 8 / kWarpColumns;

  float sums[kHigh][kWide][4];
  int row, column;  // of this lane's first sum
  bool active;

  __device__ __forceinline__ Product() {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    row = warp / kWarpColumns * kHigh * 16 + lane / 4;
    column = warp % kWarpColumns * kWide * 8 + lane % 4 * 2;
    active = warp < kWarpRows * kWarpColumns;
  }

  __device__ __forceinline__ void clear() {
    for_each([](int, int, float& sum) { sum = 0.0f; });
  }

  // Calls f(row, column, sum) for every sum of this lane.
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
    for_each_pair([&](int r, int c, float* sums) {
      f(r, c, sums[0]);
      f(r, c + 1, sums[1]);
    });
  }

  // Calls f(row, column, sums) for every two sums that lie side by side.
  template <class F>
  __device__ __forceinline__ void for_each_pair(const F& f) {
    if (!active) return;
#pragma unroll
    for (int i = 0; i < kHigh; ++i)
#pragma unroll
      for (int j = 0; j < kWide; ++j)
#pragma unroll
        for (int k = 0; k < 4; k += 2) f(row + 16 * i + k * 4, column + 8 * j, &sums[i][j][k]);
  }

  // Adds sum_k a(row, k) b(k, column), k below depth, a multiple of 8. An operand that is not split is rounded to
  // tf32. Tensor cores cut sums off where others round, so that in many steps all that is lost has one sign: with
  // kRounded, which float32 needs for more than some hundred steps, they only sum the products of one step.
  template <bool kSplitA, bool kSplitB, bool kRounded = kSplitA || kSplitB, class A, class B>
  __device__ __forceinline__ void add(int depth, const A& a, const B& b) {
    if (!active) return;
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int b_column = column - 2 * t + g;
#pragma unroll kSplitA || kSplitB ? 1 : 2
    for (int k = 0; k < depth; k += 8) {
      uint32_t high_b[kWide][2], low_b[kWide][2];
#pragma unroll
      for (int j = 0; j < kWide; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) split<kSplitB>(b(k + t + 4 * i, b_column + 8 * j), high_b[j][i], low_b[j][i]);
#pragma unroll
      for (int i = 0; i < kHigh; ++i) {
        uint32_t high_a[4], low_a[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) split<kSplitA>(a(row + 16 * i + r % 2 * 8, k + t + r / 2 * 4), high_a[r], low_a[r]);
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
          float step[4] = {};
          float (&to)[4] = kRounded ? step : sums[i][j];
          if constexpr (kSplitA) multiply_add_tf32(to, low_a, high_b[j]);
          if constexpr (kSplitB) multiply_add_tf32(to, high_a, low_b[j]);
          multiply_add_tf32(to, high_a, high_b[j]);
          if constexpr (kRounded)
#pragma unroll
            for (int r = 0; r < 4; ++r) sums[i][j][r] += step[r];
        }
      }
    }
  }

 private:
  template <bool wanted>
  static __device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
    high = to_tf32(x);
    if constexpr (wanted) low = to_tf32(x - __uint_as_float(high));
  }
};

}  // namespace aft::cuda
