// What products of integers share.
//
// A row of the left side is cut into steps, and its words hold whole numbers of them: encode() rounds, and put() stores
// the numbers of one vector at place i. The step and the offset of the row follow right after the words of a whole
// chunk. Weights are divided by the scales of their columns, so pack_weights() gets whole numbers.
#pragma once

#include "simd/load_store.h"

namespace aft::AFT_ISA {

// x = smallest + step q, q from 0 to the number of steps.
struct RowScale {
  float smallest, step;
};

// Of a row that is cut into `steps`. The numbers of a row hold no NaN: where a value is one, the step is. A row of one
// value has a step too small to be seen.
inline RowScale scale_of_row(const float* values, int64_t count, float steps) {
  const Vec first = splat(values[0]);
  Vec low = first, high = first, sums{};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    low = minimum_of(low, load(values + i));
    high = maximum_of(high, load(values + i));
    sums += load(values + i);
  }
  float sum = sum_lanes(sums), smallest = -max_lanes(-low), largest = max_lanes(high);
  for (int64_t i = whole; i < count; ++i) {
    smallest = values[i] < smallest ? values[i] : smallest;
    largest = values[i] > largest ? values[i] : largest;
    sum += values[i];
  }
  const float range = largest - smallest;
  return {smallest, sum != sum ? sum : range > steps * __FLT_MIN__ ? range / steps : 1e-30f};
}

}  // namespace aft::AFT_ISA
