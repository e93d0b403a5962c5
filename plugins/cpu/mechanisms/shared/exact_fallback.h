// The weighted sums of one row and one vector of channels by the definition: for the rare cells where the products of
// separate exponentials underflowed.
#pragma once

#include "mechanisms/shared/running_softmax.h"
#include "simd/math.h"

namespace aft::AFT_ISA {

// Below this a denominator may have lost terms to underflow: weights are relative to the largest key and the
// largest bias, which need not meet. Above it the lost terms, at most 2^-126 per key, are below rounding.
constexpr float kTrustedDenominator = 1e-25f;

// logit(u) and value(u) are vectors of channels. Where denominator < kTrustedDenominator, replaces it and the
// numerator by sums over keys [0, keys) relative to the largest logit.
template <class Logit, class Value>
__attribute__((noinline)) void exact_sums(int64_t keys, const Logit& logit, const Value& value, Vec& numerator,
                                          Vec& denominator) {
  Vec m = splat(kNoKey), n{}, d{};
  for (int64_t u = 0; u < keys; ++u) m = maximum_of(logit(u), m);
  for (int64_t u = 0; u < keys; ++u) {
    const Vec weight = exp(logit(u) - m);
    n += weight * value(u);
    d += weight;
  }
  const IntVec untrusted = (IntVec)(denominator < kTrustedDenominator);
  numerator = untrusted ? n : numerator;
  denominator = untrusted ? d : denominator;
}

}  // namespace aft::AFT_ISA
