// AFT-local's product of a block: kLocalRows rows of weights with the entries of kLocalChannels channels.
#pragma once

#include "device/load_store.cuh"
#include "device/mma.cuh"
#include "mechanisms/shared/window_sums.cuh"

namespace aft::cuda {

constexpr int kLocalThreads = 128;
constexpr int kLocalRows = 64, kLocalChannels = 64;

// Weights [rows, keys] with entries [keys, channels] twice, exp(K - m) V and exp(K - m).
// T is the tensors' element. Weights may be exp(kLogScale) at most.
template <class T>
struct LocalProduct {
  static constexpr int kKeys = 16;
  // Float16 keeps 2^-25 of the largest entry, of a key whose weight may be 2^15: by that and by the number of
  // keys the denominator may be off, of which 2^-9 is half an ulp of bfloat16.
  static constexpr float kLogScale = sizeof(T) == 2 ? 10.397207f : 0.0f;
  struct Stage {  // read and written 16 bytes at a time
    alignas(16) T weights[kLocalRows][kKeys + 8];
    alignas(16) T entries[2][kKeys][kLocalChannels + 8];
  };

  float sums[2][2][4][4] = {};
  int row = threadIdx.x / kWarp / 2 * 32, column = threadIdx.x / kWarp % 2 * 32, lane = threadIdx.x % kWarp;

  static __device__ __forceinline__ void set_weight(Stage& stage, int row, int key, float weight) {
    store(&stage.weights[row][key], {weight});
  }

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

  __device__ __forceinline__ float sum(int what, int cell) const {
    return sums[what][cell / 16][cell / 4 % 4][cell % 4];
  }
  __device__ __forceinline__ int row_of(int cell) const { return row + cell / 16 * 16 + cell / 2 % 2 * 8 + lane / 4; }
  __device__ __forceinline__ int column_of(int cell) const {
    return column + cell / 4 % 4 * 8 + lane % 4 * 2 + cell % 2;
  }
};

template <>
struct LocalProduct<float> {
  static constexpr int kKeys = 16;
  static constexpr float kLogScale = 0.0f;
  struct Stage {
    alignas(16) float weights[kKeys][kLocalRows + 4];
    alignas(16) float entries[2][kKeys][kLocalChannels];
  };

  float sums[2][8][4] = {};
  int row = threadIdx.x / 16 * 8, column = threadIdx.x % 16 * 4;

  static __device__ __forceinline__ void set_weight(Stage& stage, int row, int key, float weight) {
    stage.weights[key][row] = weight;
  }

  __device__ __forceinline__ void add(const Stage& stage) {
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const Raw<float, 4> weights[2] = {Raw<float, 4>(&stage.weights[key][row]),
                                        Raw<float, 4>(&stage.weights[key][row + 4])};
#pragma unroll
      for (int what = 0; what < 2; ++what) {
        const Raw<float, 4> entries(&stage.entries[what][key][column]);
#pragma unroll
        for (int r = 0; r < 8; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[what][r][c] += weights[r / 4][r % 4] * entries[c];
      }
    }
  }

  __device__ __forceinline__ float sum(int what, int cell) const { return sums[what][cell / 4][cell % 4]; }
  __device__ __forceinline__ int row_of(int cell) const { return row + cell / 4; }
  __device__ __forceinline__ int column_of(int cell) const { return column + cell % 4; }
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
