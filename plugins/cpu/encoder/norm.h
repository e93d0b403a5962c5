// The norms of a row, w and b being weight and bias:
//
//   layer   (x - mean) / sqrt(variance + epsilon) * w + b
//   rms     x / sqrt(mean square + epsilon) * w + b
#pragma once

#include "encoder.h"
#include "simd/load_store.h"

namespace aft::AFT_ISA {

// The mean of a row less `first`.
inline float mean_beyond(const float* row, int64_t width, float first) {
  const int64_t whole = width / kLanes * kLanes;
  Vec sums{};
  for (int64_t c = 0; c < whole; c += kLanes) sums += load(row + c) - first;
  float sum = sum_lanes(sums);
  for (int64_t c = whole; c < width; ++c) sum += row[c] - first;
  return sum / width;
}

// Returns the normalized row, or the row itself without a norm. Far from zero, E[x^2] - mean^2 cancels and even the sum
// of a row loses digits. Hence all is taken relative to the row's first value, and the variance from the deviations
// themselves; the sweeps this takes run in the first-level cache. `normalized` has room for whole vectors and may be
// `row`.
inline const float* normalize_row(const float* row, int64_t width, const Norm& norm, float* normalized) {
  if (!norm.weight) return row;
  const int64_t whole = width / kLanes * kLanes;
  const float first = norm.rms ? 0.0f : row[0];
  const float mean = norm.rms ? 0.0f : mean_beyond(row, width, first);
  Vec squares{};
  for (int64_t c = 0; c < whole; c += kLanes) {
    const Vec deviation = load(row + c) - first - mean;
    squares += deviation * deviation;
  }
  float square_sum = sum_lanes(squares);
  for (int64_t c = whole; c < width; ++c) square_sum += (row[c] - first - mean) * (row[c] - first - mean);

  const float inverse = 1.0f / __builtin_sqrtf(square_sum / width + norm.epsilon);
  for (int64_t c = 0; c < width; c += kLanes) {
    const int64_t count = width - c;
    Vec result = (load(row + c, count) - first - mean) * (load(norm.weight + c, count) * inverse);
    if (norm.bias) result += load(norm.bias + c, count);
    store(normalized + c, result);
  }
  return normalized;
}

}  // namespace aft::AFT_ISA
