// The weighted sums of one row and one vector of channels by the definition: for the rare cells where the products of
// separate exponentials underflowed.
#pragma once

#include "sums/running_softmax.h"
#include "simd/math.h"

namespace aft::AFT_ISA {

// Below this a denominator may have lost terms to underflow: weights are relative to the largest key and the
// largest bias, which need not meet. Above it the lost terms, at most 2^-126 per key, are below rounding.
constexpr float kTrustedDenominator = 1e-25f;

// Returns the threshold from which a sum of weights is the denominator. Smaller sums take up eps first. With eps the
// threshold is infinite; a call without eps only tests whether its sums can be trusted.
inline float complete_denominator(float eps) { return eps > 0.0f ? __builtin_inff() : kTrustedDenominator; }

// key(u), bias(u) and value(u) are vectors of channels. Where denominator < kTrustedDenominator, replaces it and the
// numerator by sums over keys [0, keys) relative to the largest logit. Keys and biases are taken relative to those of
// that logit before they are added: beside 1e38 the smaller of the two has no digits. Key and bias are halved first, so
// that the sum of two large numbers does not overflow.
// log_eps is the logarithm of the eps that the denominator holds, -inf for 0.
template <class Key, class Bias, class Value>
__attribute__((noinline)) void exact_sums(int64_t keys, const Key& key, const Bias& bias, const Value& value,
                                          float log_eps, Vec& numerator, Vec& denominator) {
  Vec highest = splat(-__builtin_inff()), highest_key{}, highest_bias{};
  for (int64_t u = 0; u < keys; ++u) {
    const Vec half_key = key(u) * 0.5f, half_bias = bias(u) * 0.5f, logit = half_key + half_bias;
    const IntVec higher = (IntVec)(logit > highest);
    highest = higher ? logit : highest;
    highest_key = higher ? half_key : highest_key;
    highest_bias = higher ? half_bias : highest_bias;
  }
  const auto relative = [&](int64_t u) AFT_LAMBDA_INLINE {
    return (key(u) * 0.5f - highest_key) + (bias(u) * 0.5f - highest_bias);
  };
  Vec m = splat(kNoKey), n{}, d{};
  for (int64_t u = 0; u < keys; ++u) m = raised_by(m, relative(u));
  for (int64_t u = 0; u < keys; ++u) {
    const Vec weight = exp((relative(u) - m) * 2.0f);
    n += weight * value(u);
    d += weight;
  }
  d += eps_beside(log_eps, at_least(splat(kNoKey), (highest_key + highest_bias + m) * 2.0f));
  const IntVec untrusted = (IntVec)(denominator < kTrustedDenominator);
  numerator = untrusted ? n : numerator;
  denominator = untrusted ? d : denominator;
}

}  // namespace aft::AFT_ISA
