// AFT-local's product of a block: kLocalRows rows of weights with the entries of kLocalChannels channels.
#pragma once

#include "device/load_store.cuh"
#include "device/mma.cuh"
#include "sums/window_sums.cuh"

namespace aft::cuda {

constexpr int kLocalThreads = 256;
constexpr int kLocalRows = kWindowRows, kLocalChannels = 64;

// Weights [rows, keys] with entries [keys, channels] twice, exp(K - m) V and exp(K - m).
// T is the tensors' element. Weights may be exp(kLogScale) at most.
template <class T>
struct LocalProduct {
  static constexpr int kKeys = 32;
  // Float16 keeps 2^-25 of the largest entry, of a key whose weight may be 2^15: by that and by the number of
  // keys the denominator may be off, of which 2^-9 is half an ulp of bfloat16.
  static constexpr float kLogScale = sizeof(T) == 2 ? 10.397207f : 0.0f;
  struct Stage {  // read and written 16 bytes at a time
    alignas(16) T weights[kLocalRows][kKeys + 8];
    alignas(16) T entries[2][kKeys][kLocalChannels + 8];
  };

  float sums[2][2][4][4] = {};
  int row = threadIdx.x / kWarp / 2 * 32, column = threadIdx.x / kWarp % 2 * 32, lane = threadIdx.x % kWarp;

  __device__ __forceinline__ void add(const Stage& stage) {
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      uint32_t weights[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        load_matrices(weights[m], &stage.weights[row + m * 16 + lane % 16][key + lane / 16 * 8]);
#pragma unroll
      for (int what = 0; what < 2; ++what)
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          uint32_t entries[4];
          load_matrices_transposed(entries, &stage.entries[what][key + lane % 16][column + n * 8 + lane / 16 * 8]);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply_add<T>(sums[what][m][n], weights[m], {entries[0], entries[1]});
            multiply_add<T>(sums[what][m][n + 1], weights[m], {entries[2], entries[3]});
          }
        }
    }
  }

  // The sums of the thread's rows and columns. Two columns of a pair lie side by side.
  static constexpr int kRows = 4, kColumns = 8;
  __device__ __forceinline__ float& sum(int what, int r, int c) { return sums[what][r / 2][c / 2][r % 2 * 2 + c % 2]; }
  __device__ __forceinline__ int row_of(int r) const { return row + r / 2 * 16 + r % 2 * 8 + lane / 4; }
  __device__ __forceinline__ int column_of(int c) const { return column + c / 2 * 8 + lane % 4 * 2 + c % 2; }
};

template <>
struct LocalProduct<float> {
  static constexpr int kKeys = 16;
  static constexpr float kLogScale = 0.0f;
  struct Stage {
    alignas(16) float weights[kLocalRows][kKeys + 4];
    alignas(16) float entries[2][kKeys][kLocalChannels];
  };

  float sums[2][8][4] = {};
  int row = threadIdx.x / 16 * 8, column = threadIdx.x % 16 * 4;

  __device__ __forceinline__ void add(const Stage& stage) {
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 2) {
      Raw<float, 2> weights[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) weights[r] = Raw<float, 2>(&stage.weights[row + r][key]);
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int what = 0; what < 2; ++what) {
          const Raw<float, 4> entries(&stage.entries[what][key + k][column]);
#pragma unroll
          for (int r = 0; r < 8; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) sums[what][r][c] += weights[r][k] * entries[c];
        }
    }
  }

  static constexpr int kRows = 8, kColumns = 4;
  __device__ __forceinline__ float& sum(int what, int r, int c) { return sums[what][r][c]; }
  __device__ __forceinline__ int row_of(int r) const { return row + r; }
  __device__ __forceinline__ int column_of(int c) const { return column + c; }
};

// The least denominator to be trusted of a product over that many keys.
template <class T>
__device__ __forceinline__ float least_trusted(int) {
  return kTrustedDenominator;
}
template <>
__device__ __forceinline__ float least_trusted<Half>(int keys) {
  return 0.5f * static_cast<float>(keys);
}

}  // namespace aft::cuda
