// Logits K + w of one row and channel relative to the largest of them, for the rare cells where products of separate
// exponentials underflowed. Keys and biases are taken relative to those of the largest logit before they are added:
// beside 1e38 the smaller of the two has no digits. Halves of them do not overflow.
#pragma once

#include "sums/running_softmax.cuh"

namespace aft::cuda {

// Relative to 0 and 0 until a key that counts is added.
struct LargestLogit {
  float half, half_key, half_bias;

  __device__ __forceinline__ LargestLogit() : half(kNoKey), half_key(0.0f), half_bias(0.0f) {}

  __device__ __forceinline__ void add(float key, float bias) {
    const float k = key * 0.5f, w = bias * 0.5f;
    if (k + w > half) half = k + w, half_key = k, half_bias = w;
  }

  __device__ __forceinline__ float relative(float key, float bias) const {
    return 2.0f * ((key * 0.5f - half_key) + (bias * 0.5f - half_bias));
  }
};

// Returns the mean over the keys [begin, end) and over the keys of bias 0, whose sums are `others`.
template <class Key, class Bias, class Value>
__device__ __forceinline__ float exact_mean_with(RunningSum others, int64_t begin, int64_t end, const Key& key,
                                                 const Bias& bias, const Value& value) {
  LargestLogit largest;
  if (others.denominator != 0.0f) largest.add(others.maximum, 0.0f);
  for (int64_t u = begin; u < end; ++u) largest.add(key(u), bias(u));
  others.maximum = fmaxf(largest.relative(others.maximum, 0.0f), kNoKey);
  for (int64_t u = begin; u < end; ++u) others.add(largest.relative(key(u), bias(u)), value(u));
  return others.mean();
}

}  // namespace aft::cuda
