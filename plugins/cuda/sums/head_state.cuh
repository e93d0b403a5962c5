// S = sum_u w[u] v[u]^T and z = sum_u w[u] of the keys that a block has seen, in its registers: a part of S in each
// warp's fragments of sums.
// See: head_tiles.cuh
#pragma once

#include "sums/head_tiles.cuh"

namespace aft::cuda {

// S as operands; z as two further columns, z rounded to bfloat16 and what that leaves. The products with
// further columns are not used.
template <int kWidth>
using HeadOperands = BFloat16[kWidth][HeadSizes<kWidth>::kValues + 8];

// z in the form of these columns.
__device__ __forceinline__ uint32_t split_key_sum(float sum) {
  const float high = __uint_as_float(pack<BFloat16>(0.0f, sum) & 0xffff0000u);
  return pack<BFloat16>(sum, sum - high);
}

template <int kWidth>
struct HeadState {
  static constexpr int kValues = HeadSizes<kWidth>::kValues;
  static constexpr int kWarpRows = kWidth / 16 < kTensorWarps ? kWidth / 16 : kTensorWarps;
  static constexpr int kWarpColumns = kTensorWarps / kWarpRows;
  static constexpr int kHigh = kWidth / 16 / kWarpRows, kWide = kValues / 8 / kWarpColumns;

  float sums[kHigh][kWide][4], key_sums[kHigh][4];  // key_sums: column 0 of a fragment
  int row = threadIdx.x / kWarp / kWarpColumns * kHigh * 16, column = threadIdx.x / kWarp % kWarpColumns * kWide * 8;

  __device__ __forceinline__ void clear() {
    for_each_pair([](int, int, float* pair) { pair[0] = pair[1] = 0.0f; });
#pragma unroll
    for (int i = 0; i < kHigh; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) key_sums[i][k] = 0.0f;
  }

  // Adds a tile of weighted keys and values.
  __device__ __forceinline__ void add(const HeadTile<kWidth>& keys, const HeadTile<kValues>& values) {
#pragma unroll
    for (int k = 0; k < kTileTokens; k += 16) {
      uint32_t a[kHigh][4];
#pragma unroll
      for (int i = 0; i < kHigh; ++i) {
        load_left_transposed(a[i], keys, row + 16 * i, k);
        add_row_sums(key_sums[i], a[i]);
      }
#pragma unroll
      for (int j = 0; j < kWide; j += 2) {
        uint32_t b[4];
        load_right(b, values, k, column + 8 * j);
#pragma unroll
        for (int i = 0; i < kHigh; ++i) multiply_add_two(sums[i][j], sums[i][j + 1], a[i], b);
      }
    }
  }

  // Multiplies the rows by their factors.
  __device__ __forceinline__ void scale(const float (&factor)[kWidth]) {
    for_each_pair([&](int r, int, float* pair) {
      pair[0] *= factor[r];
      pair[1] *= factor[r];
    });
    for_each_key_sum([&](int r, float& sum) { sum *= factor[r]; });
  }

  // These two load the state from the workspace and store it there.
  __device__ __forceinline__ void load(const float* state, int first_value) {
    for_each_pair([&](int r, int c, float* pair) {
      const Raw<float, 2> raw(state + r * kWidth + first_value + c);
      pair[0] = raw[0];
      pair[1] = raw[1];
    });
    for_each_key_sum([&](int r, float& sum) { sum = state[kWidth * kWidth + r]; });
  }
  __device__ __forceinline__ void write(float* state, int first_value) {
    for_each_pair(
        [&](int r, int c, const float* pair) { store(state + r * kWidth + first_value + c, {pair[0], pair[1]}); });
    if (first_value == 0 && column == 0) for_each_key_sum([&](int r, float sum) { state[kWidth * kWidth + r] = sum; });
  }

  // Copies S to shared memory as operands of products, and z without rounding.
  __device__ __forceinline__ void publish(HeadOperands<kWidth>& context, float (&shared_sums)[kWidth]) {
    for_each_pair(
        [&](int r, int c, const float* pair) { machine::store(&context[r][c], pack<BFloat16>(pair[0], pair[1])); });
    if (column != 0) return;
    for_each_key_sum([&](int r, float sum) {
      machine::store(&context[r][kValues], split_key_sum(sum));
      shared_sums[r] = sum;
    });
  }

 private:
  // Calls f(row, column, sums) for every two sums of this lane that lie side by side.
  template <class F>
  __device__ __forceinline__ void for_each_pair(const F& f) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kHigh; ++i)
#pragma unroll
      for (int j = 0; j < kWide; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          f(row + 16 * i + lane / 4 + 8 * half, column + 8 * j + lane % 4 * 2, &sums[i][j][2 * half]);
  }

  // Calls f(row, sum) for every sum of weights of this lane.
  template <class F>
  __device__ __forceinline__ void for_each_key_sum(const F& f) {
    const int lane = threadIdx.x % kWarp;
    if (lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < kHigh; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) f(row + 16 * i + lane / 4 + 8 * half, key_sums[i][2 * half]);
  }
};

}  // namespace aft::cuda
