// Softmax-weighted sums over tokens that can be built piece by piece.
//
// Computes: (sum exp(K - m) V, sum exp(K - m), m = max K)
// Method:   merging two such triples is associative, so the tokens may be cut anywhere.
#pragma once

#include "device/device.cuh"

namespace aft::cuda {

// Stands for "no key yet": lower than every finite key, but differences with it are no NaN.
constexpr float kNoKey = -3.402823466e38f;

struct RunningSum {
  float maximum, numerator, denominator;

  static __device__ __forceinline__ RunningSum empty() { return {kNoKey, 0.0f, 0.0f}; }

  // One exponential: of the two factors exp(m1 - m) and exp(m2 - m) one is 1.
  __device__ __forceinline__ void merge(const RunningSum& other) {
    const float difference = maximum - other.maximum;
    const float factor = machine::fast_exp(-fabsf(difference));
    const float mine = difference < 0.0f ? factor : 1.0f, theirs = difference < 0.0f ? 1.0f : factor;
    numerator = numerator * mine + other.numerator * theirs;
    denominator = denominator * mine + other.denominator * theirs;
    maximum = fmaxf(maximum, other.maximum);
  }

  __device__ __forceinline__ void add(float key, float value) { merge({key, value, 1.0f}); }

  // 0 where no key was counted.
  __device__ __forceinline__ float mean() const { return denominator == 0.0f ? 0.0f : numerator / denominator; }
};

// Of the lane that lies `distance` lanes away in the sense of shuffles.
__device__ __forceinline__ RunningSum shuffle_xor(const RunningSum& sum, int distance) {
  return {__shfl_xor_sync(~0u, sum.maximum, distance), __shfl_xor_sync(~0u, sum.numerator, distance),
          __shfl_xor_sync(~0u, sum.denominator, distance)};
}
__device__ __forceinline__ RunningSum shuffle_up(const RunningSum& sum, int distance) {
  return {__shfl_up_sync(~0u, sum.maximum, distance), __shfl_up_sync(~0u, sum.numerator, distance),
          __shfl_up_sync(~0u, sum.denominator, distance)};
}

}  // namespace aft::cuda
