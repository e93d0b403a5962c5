// layer_norm(x) = (x - mean) / sqrt(variance + epsilon) * weight + bias over one row.
#pragma once

#include "encoder.h"
#include "simd/load_store.h"

namespace aft::AFT_ISA {

// Far from zero, E[x^2] - mean^2 cancels and even the sum of a row loses digits. Hence all is taken relative to
// the row's first value, and the variance from the deviations themselves; the sweeps this takes run in the
// first-level cache. `normalized` has room for whole vectors and may be `row`.
inline void normalize_row(const float* row, int64_t width, const LayerNorm& norm, float* normalized) {
  const int64_t whole = width / kLanes * kLanes;
  const float first = row[0];
  Vec sums{};
  for (int64_t c = 0; c < whole; c += kLanes) sums += load(row + c) - first;
  float sum = sum_lanes(sums);
  for (int64_t c = whole; c < width; ++c) sum += row[c] - first;

  const float mean = sum / width;
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
    const Vec scale = load(norm.weight + c, count) * inverse;
    store(normalized + c, (load(row + c, count) - first - mean) * scale + load(norm.bias + c, count));
  }
}

}  // namespace aft::AFT_ISA
