// AFT-conv's filters as tables of weights, and its definition for single cells.
#pragma once

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "kernels.h"
#include "sums/exact_logit.cuh"
#include "sums/window_sums.cuh"

namespace aft::cuda {

constexpr int kConvBlock = 8;         // rows of a thread, keys it takes at a time
constexpr int kConvProductKeys = 32;  // of a step of the product on tensor cores

// The weights of a head by the distance of a key from the first key of the row's window, from -before on. In pairs,
// entry i holds the weights of two distances that follow each other.
struct ConvTable {
  int64_t left, right, taps, pitch;
  int before;
  bool pairs;
  float *weights, *largest_bias;  // [heads, pitch], relative to the largest bias, and [heads], that

  ConvTable(const Strided<AftConv>& call, bool pairs, void* memory)
      : left(call.sequence.causal ? call.taps - 1 : (call.taps - 1) / 2),
        right(call.taps - 1 - left),
        taps(call.taps),
        pitch(pairs ? 2 * (kWindowRows + round_up<int64_t>(kWindowRows + taps, kConvProductKeys))
                    : last_block() * kConvBlock + 2 * kConvBlock),
        before(pairs ? kWindowRows : kConvBlock - 1),
        pairs(pairs),
        weights(static_cast<float*>(memory)),
        largest_bias(weights + call.heads * pitch) {}

  size_t bytes(int64_t heads) const { return round_up<size_t>(sizeof(float) * heads * (pitch + 1), 16); }

  // The last block of keys, counted from the thread's own, that the windows of its rows reach.
  __host__ __device__ __forceinline__ int last_block() const {
    return static_cast<int>(taps + kConvBlock - 2) / kConvBlock;
  }
};

// A warp fills the table of a head.
template <class T>
struct FillTable {
  Strided<AftConv> call;
  ConvTable table;
  int64_t items;

  __device__ __forceinline__ void operator()(int64_t head) const {
    const T* filter = static_cast<const T*>(call.filter) + head * table.taps;
    const int lane = threadIdx.x % kWarp;
    float maximum = 0.0f;
    for (int64_t j = lane; j < table.taps; j += kWarp) maximum = fmaxf(maximum, to_float(filter[j]));
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
    for (int64_t i = lane; i < table.pitch; i += kWarp) {
      const int64_t j = (table.pairs ? i / 2 + i % 2 : i) - table.before;
      const float bias = j >= 0 && j < table.taps ? to_float(filter[j]) : 0.0f;
      const bool counts = !(call.sequence.causal && j >= table.taps);
      table.weights[head * table.pitch + i] = counts ? machine::fast_exp(bias - maximum) : 0.0f;
    }
    if (lane == 0) table.largest_bias[head] = maximum;
  }
};

struct ConvParams {
  Strided<AftConv> call;
  WindowSums sums;
  ConvTable table;
  int64_t width;      // channels of a head
  int groups, tiles;  // of channels and of rows
};

// The mean of one cell as it is defined, over keys [begin, end) of the span and those that `outside` is the sum of.
template <class T>
__device__ __forceinline__ float exact_conv_mean(const ConvParams& p, int64_t b, int64_t head, int64_t begin,
                                                 int64_t end, int64_t t, int64_t channel, const RunningSum& outside) {
  const StridedSequence& s = p.call.sequence;
  const T* filter = static_cast<const T*>(p.call.filter) + head * p.table.taps;
  return exact_mean_with(
      outside, begin < 0 ? 0 : begin, s.causal && t + 1 < end ? t + 1 : end,
      [&](int64_t u) { return to_float(row<T>(s.key, b, u)[head]); },
      [&](int64_t u) {
        const int64_t j = u - t + p.table.left;
        return j >= 0 && j < p.table.taps ? to_float(filter[j]) : 0.0f;
      },
      [&](int64_t u) { return to_float(row<T>(s.value, b, u)[channel]); });
}

}  // namespace aft::cuda
