// One output of AFT-full.
//
// Computes: Y = gate(Q) * numerator / denominator
// Numerics: cells that lost too much in products of separate exponentials, exp(w - row maximum) and exp(K - channel
//           maximum), are summed again by the definition.
#pragma once

#include <type_traits>

#include "device/launch.cuh"
#include "mechanisms/aft_full/aft_full_segments.cuh"
#include "sums/exact_logit.cuh"
#include "sums/gate.cuh"
#include "sums/running_softmax.cuh"

namespace aft::cuda {

// exp(w - row maximum) is multiplied by 2^kLift, which cancels, to make use of P's range above 1.
template <class P>
constexpr float kLift = 0.0f;
template <>
constexpr float kLift<Half> = 15.0f;

// The most a key can lose to the exponents of P, over the error of the mean that is allowed for it: a denominator
// is trusted if it is more than this for every key. The smallest float16 is 2^-24, so that a factor is off by
// 2^-25; in products with the other factor, 1 at most, by that times 2^lift. That 2^-8 is allowed is all but
// never needed: losses are of either sign and few terms are as bad. The smallest normal float32 or bfloat16 is
// 2^-126, and 2^-24 is below the rounding of the sum.
template <class P>
constexpr float kTrustedPerKey = 1.9721523e-31f;  // 2^-126 / 2^-24
template <>
constexpr float kTrustedPerKey<Half> = 0.25f;                // 2^15 2^-25 / 2^-8
constexpr float kTrustedPerKeyUnlifted = 1.52587890625e-5f;  // float16 without lift on either side: 2 2^-25 / 2^-8

inline bool multiplies_float32(const AftFull& call) {
  return call.element == Element::kFloat32 || call.precision == Precision::kFloat32;
}

// Calls f with a value of the tensors' element type and one of the type of products: that of `precision`, or the next
// that holds as large a range where tensors of this element cannot have it.
template <class F>
int with_product(const AftFull& call, const F& f) {
  return with_element(call.element, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 2) {
      if (!multiplies_float32(call)) {
        if constexpr (std::is_same_v<T, Half>)
          if (call.precision == Precision::kFloat16) return f(element, Half{});
        return f(element, BFloat16{});
      }
    }
    return f(element, float{});
  });
}

// Marks a cell that has to be summed again.
__device__ __forceinline__ float untrusted() { return __uint_as_float(0x7fffffffu); }
__device__ __forceinline__ float trusted_mean(float numerator, float denominator, float least) {
  return denominator > least ? machine::fast_divide(numerator, denominator) : untrusted();
}
__device__ __forceinline__ bool is_trusted(float mean) { return mean == mean; }

// The means over `visible` keys of N channels as they are defined, where they are marked, and 0 where no key counts.
// Keys and biases are taken relative to those of the largest logit: see exact_logit.cuh.
template <class T, int N>
__device__ __forceinline__ void sum_exactly(float* mean, const Strided<AftFull>& call, int64_t b, int64_t t,
                                            int64_t channel, int64_t visible) {
  const StridedSequence& s = call.sequence;
  const T* bias = static_cast<const T*>(call.position_bias) + t * call.position_bias_width;
  float maximum[N], numerator[N], denominator[N];
  LargestLogit largest[N];
#pragma unroll
  for (int c = 0; c < N; ++c) {
    maximum[c] = kNoKey;
    numerator[c] = denominator[c] = 0.0f;
  }
#pragma unroll 4
  for (int64_t u = 0; u < visible; ++u) {
    const Raw<T, N> key(row<T>(s.key, b, u) + channel);
    const float w = to_float(bias[u]);
#pragma unroll
    for (int c = 0; c < N; ++c) largest[c].add(key[c], w);
  }
#pragma unroll 4
  for (int64_t u = 0; u < visible; ++u) {
    const Raw<T, N> key(row<T>(s.key, b, u) + channel);
    const float w = to_float(bias[u]);
#pragma unroll
    for (int c = 0; c < N; ++c) maximum[c] = fmaxf(maximum[c], largest[c].relative(key[c], w));
  }
  for (int64_t first = 0; first < visible; first += kSegmentKeys) {
    const int64_t end = first + kSegmentKeys < visible ? first + kSegmentKeys : visible;
    float numerators[N] = {}, denominators[N] = {};
#pragma unroll 2
    for (int64_t u = first; u < end; ++u) {
      const Raw<T, N> key(row<T>(s.key, b, u) + channel), value(row<T>(s.value, b, u) + channel);
      const float w = to_float(bias[u]);
#pragma unroll
      for (int c = 0; c < N; ++c) {
        const float weight = machine::fast_exp(largest[c].relative(key[c], w) - maximum[c]);
        numerators[c] += weight * value[c];
        denominators[c] += weight;
      }
    }
#pragma unroll
    for (int c = 0; c < N; ++c) {
      numerator[c] += numerators[c];
      denominator[c] += denominators[c];
    }
  }
#pragma unroll
  for (int c = 0; c < N; ++c)
    if (!is_trusted(mean[c])) mean[c] = denominator[c] == 0.0f ? 0.0f : numerator[c] / denominator[c];
}

// Means over `visible` keys become outputs: those of row t that are marked are summed again, padded rows' are 0.
template <class T, int N>
__device__ __forceinline__ void complete_means(float (&mean)[N], const Strided<AftFull>& call, int64_t b, int64_t t,
                                               int64_t channel, int64_t visible) {
  bool all_trusted = true;
#pragma unroll
  for (int c = 0; c < N; ++c) {
    if (visible == 0) mean[c] = 0.0f;
    all_trusted = all_trusted && is_trusted(mean[c]);
  }
  if (!all_trusted) {
    constexpr int together = N < 4 ? N : 4;  // more take too many registers
#pragma unroll
    for (int c = 0; c < N; c += together) sum_exactly<T, together>(mean + c, call, b, t, channel + c, visible);
  }
}

// Writes N outputs of row t from their means.
template <Gate gate, class T, int N>
__device__ __forceinline__ void write_gated(const float (&mean)[N], const StridedSequence& s, int64_t b, int64_t t,
                                            int64_t channel) {
  float y[N];
  const Raw<T, N> query(row<T>(s.query, b, t) + channel);
#pragma unroll
  for (int c = 0; c < N; ++c) y[c] = gated<gate>(query[c], mean[c]);
  store(static_cast<T*>(s.output) + (b * s.tokens + t) * s.channels + channel, y);
}

}  // namespace aft::cuda
