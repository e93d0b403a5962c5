// The second level of AFT-full's float32 sums.
//
// Cost:     128 KiB of traffic for each segment of a tile, 1% of the time that its multiply-adds take.
// Method:   sums start again at 0 every kSegmentKeys keys, and the sums of whole segments are added up. Segments start
//           at multiples of kSegmentKeys for all shapes, so that the bits of a document do not depend on its padding.
//           One level is enough: the bias of 64 segments, 131,072 keys, takes 64 GiB in float32.
// Numerics: equal terms that are added one by one to a float32 sum all round to the same side: 16,384 of them were off
//           by 1.7e-4. In segments they are off by 2.6e-5 at most at 2,048 keys, and no more at 16,384.
#pragma once

#include "device/load_store.cuh"

namespace aft::cuda {

constexpr int kSegmentKeys = 2048;

// A thread's sums of the present segment. Its totals of earlier segments are in the workspace, in its own order: every
// place is a constant offset from one address, as the loop around has no register left.
template <int rows, int channels>
struct SegmentSums {
  static constexpr int kCount = 2 * rows * channels;

  float numerators[rows][channels], denominators[rows][channels];

  // Adds these sums to the totals, which the first segment sets, and starts again at 0. Row by row: more loads at once
  // would take more registers.
  __device__ __forceinline__ void end_segment(float* totals, bool first) {
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      if (!first) add_row(totals, i);
      store(totals + 2 * i * channels, numerators[i]);
      store(totals + (2 * i + 1) * channels, denominators[i]);
#pragma unroll
      for (int c = 0; c < channels; ++c) numerators[i][c] = denominators[i][c] = 0.0f;
    }
  }

  __device__ __forceinline__ void add(const float* totals) {
#pragma unroll
    for (int i = 0; i < rows; ++i) add_row(totals, i);
  }

 private:
  __device__ __forceinline__ void add_row(const float* totals, int i) {
    const Raw<float, channels> numerator(totals + 2 * i * channels), denominator(totals + (2 * i + 1) * channels);
#pragma unroll
    for (int c = 0; c < channels; ++c) {
      numerators[i][c] += numerator[c];
      denominators[i][c] += denominator[c];
    }
  }
};

}  // namespace aft::cuda
