// Products of a tile of weights with entries (exp(K - m) V, exp(K - m)).
//
// Cost:     bound by multiply-adds: per key one broadcast for every row, two loads for the entry, two multiply-adds per
//           row.
// Method:   numerator and denominator of a few rows and one vector of channels stay in registers while the keys go by.
#pragma once

#include "simd/math.h"

namespace aft::AFT_ISA {

constexpr int kWeightRows = kRegisters == 32 ? 12 : 6;

// Keys of one product at most, and from one row of weights to the next: a constant, so that the rows are
// reached by fixed offsets, and no multiple of a page, so that they do not compete for the same cache lines.
constexpr int64_t kWeightKeys = 1024;
constexpr int64_t kWeightPitch = kWeightKeys + 16;

// results[row] += sum_k weights[row, k] entries[k], a result and an entry being two vectors.
AFT_INLINE void multiply_weights(const float* weights, const float* entries, int64_t keys, float* results) {
  Vec sum[kWeightRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kWeightRows; ++r)
    for (int v = 0; v < 2; ++v) sum[r][v] = load(results + (2 * r + v) * kLanes);
  for (int64_t k = 0; k < keys; ++k) {
    const Vec numerator = load(entries + 2 * k * kLanes), denominator = load(entries + (2 * k + 1) * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kWeightRows; ++r) {
      const Vec weight = splat(weights[r * kWeightPitch + k]);
      sum[r][0] += weight * numerator;
      sum[r][1] += weight * denominator;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kWeightRows; ++r)
    for (int v = 0; v < 2; ++v) store(results + (2 * r + v) * kLanes, sum[r][v]);
}

}  // namespace aft::AFT_ISA
