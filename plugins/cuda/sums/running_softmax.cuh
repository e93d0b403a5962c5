// Softmax-weighted sums over tokens that can be built piece by piece.
//
// Computes: (sum exp(K - m) V, sum exp(K - m), m = max K)
// Method:   merging two such triples is associative, so the tokens may be cut anywhere. BinarySum holds log2(e) m in
//           place of m: an exponential relative to it is one multiply-add and one instruction of base 2.
// Numerics: BinarySum rounds its reference: all weights relative to it have the same factor, which cancels in the mean
//           and in merges. A key of 2^29 is the largest whose rounding leaves its own weight within float32. Beyond,
//           weights vanish, and sums of such keys only have a mean of 0.
#pragma once

#include "device/load_store.cuh"

namespace aft::cuda {

// Stands for "no key yet": lower than every finite key, but differences with it are no NaN.
constexpr float kNoKey = -3.402823466e38f;

// Adds sums that are relative to another reference. `factor` brings the sums of the lower reference to the higher one.
template <class Sum>
__device__ __forceinline__ void merge_sums(Sum& sum, const Sum& other, bool is_lower, float factor) {
  const float mine = is_lower ? factor : 1.0f, theirs = is_lower ? 1.0f : factor;
  sum.numerator = sum.numerator * mine + other.numerator * theirs;
  sum.denominator = sum.denominator * mine + other.denominator * theirs;
}

struct RunningSum {
  float maximum, numerator, denominator;

  static __device__ __forceinline__ RunningSum empty() { return {kNoKey, 0.0f, 0.0f}; }

  // One exponential: of the two factors exp(m1 - m) and exp(m2 - m) one is 1.
  __device__ __forceinline__ void merge(const RunningSum& other) {
    const float difference = maximum - other.maximum;
    merge_sums(*this, other, difference < 0.0f, machine::fast_exp(-fabsf(difference)));
    maximum = fmaxf(maximum, other.maximum);
  }

  __device__ __forceinline__ void add(float key, float value) { merge({key, value, 1.0f}); }

  // Returns 0 where no key was counted.
  __device__ __forceinline__ float mean() const { return denominator == 0.0f ? 0.0f : numerator / denominator; }
};

// log2(e) key, rounded up, or `reference` where that is larger. Weights relative to it are 1 at most: they cannot
// overflow, however far the product is rounded. A key of minus infinity changes nothing.
__device__ __forceinline__ float raised(float reference, float key) {
  const float product = key * machine::kLog2E;
  return fmaxf(reference, fmaf(fabsf(product), 1.1920929e-7f, product));
}

// The key that has weight 0.
template <class T>
__device__ __forceinline__ T minus_infinity();
template <>
__device__ __forceinline__ float minus_infinity<float>() {
  return __uint_as_float(0xff800000u);
}
template <>
__device__ __forceinline__ Half minus_infinity<Half>() {
  return {0xfc00};
}
template <>
__device__ __forceinline__ BFloat16 minus_infinity<BFloat16>() {
  return {0xff80};
}

// Returns exp(key) / 2^reference.
__device__ __forceinline__ float weight_of(float key, float reference) {
  return machine::fast_exp2(fmaf(key, machine::kLog2E, -reference));
}

// Sums relative to 2^reference.
struct BinarySum {
  float reference, numerator, denominator;

  static __device__ __forceinline__ BinarySum empty() { return {kNoKey, 0.0f, 0.0f}; }

  // Raises the reference to that of a larger key.
  __device__ __forceinline__ void raise(float key) {
    const float larger = raised(reference, key), rescale = machine::fast_exp2(reference - larger);
    numerator *= rescale;
    denominator *= rescale;
    reference = larger;
  }

  // Adds a key for which the reference has been raised.
  __device__ __forceinline__ void add_below(float key, float value) {
    const float weight = weight_of(key, reference);
    numerator = fmaf(weight, value, numerator);
    denominator += weight;
  }

  // One exponential: one of the two factors is 1.
  __device__ __forceinline__ void merge(const BinarySum& other) {
    const float difference = reference - other.reference;
    merge_sums(*this, other, difference < 0.0f, machine::fast_exp2(-fabsf(difference)));
    reference = fmaxf(reference, other.reference);
  }

  // Returns 0 where no key was counted, because the numerator is 0.
  __device__ __forceinline__ float mean() const {
    return machine::fast_divide(numerator, denominator == 0.0f ? 1.0f : denominator);
  }
};

// Returns the sums of the lane `distance` lanes away, counted as by shuffles.
template <class Sum>
__device__ __forceinline__ Sum shuffle_xor(const Sum& sum, int distance) {
  const auto& [reference, numerator, denominator] = sum;
  return {__shfl_xor_sync(~0u, reference, distance), __shfl_xor_sync(~0u, numerator, distance),
          __shfl_xor_sync(~0u, denominator, distance)};
}
template <class Sum>
__device__ __forceinline__ Sum shuffle_up(const Sum& sum, int distance) {
  const auto& [reference, numerator, denominator] = sum;
  return {__shfl_up_sync(~0u, reference, distance), __shfl_up_sync(~0u, numerator, distance),
          __shfl_up_sync(~0u, denominator, distance)};
}

}  // namespace aft::cuda
