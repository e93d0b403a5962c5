// AFT-local's weights exp(band - the row's largest bias) of all rows, which tiles copy.
#pragma once

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "kernels.h"
#include "mechanisms/aft_local_product.cuh"
#include "sums/running_softmax.cuh"

namespace aft::cuda {

// A row of the band, of which entries [first, last) belong to tokens of the sequence that the row may see.
template <class T>
struct BandRow {
  const T* entries;
  int64_t first, last;

  __device__ __forceinline__ BandRow(const Strided<AftLocal>& call, int64_t t) {
    const int64_t left = call.window - 1, right = call.sequence.causal ? 0 : left, width = left + right + 1;
    const int64_t end = call.sequence.tokens - t + left;
    entries = static_cast<const T*>(call.band) + (call.band_rows == 1 ? 0 : t * width);
    first = left > t ? left - t : 0;
    last = end < width ? end : width;
  }
};

// The logarithm to base 2 of exp(-maximum). It is finite: of numbers below -2e38, all weights become 0.
__device__ __forceinline__ float reference_of(float maximum) { return -fmaxf(maximum, -2e38f) * machine::kLog2E; }

struct RowScale {
  float reference;  // of the row's largest bias, less the weights' scale
  float outside;    // the weight of keys outside the window, 0 where the row sees none
};

// exp(band - the row's largest bias) in chunks of kVector keys, which begin at multiples of it. The first chunk of a
// row has the first key of its window. Where the band has one row, all rows apart from the sequence's ends are equal
// but for the place of the window in its chunks: they share kVector rows.
template <class T>
struct LocalWeights {
  int64_t left, right, tokens, edge, rows, pitch;
  RowScale* scales;  // [rows]
  T* weights;        // [rows, pitch]
  bool shared;

  LocalWeights(const Strided<AftLocal>& call, void* memory)
      : left(call.window - 1),
        right(call.sequence.causal ? 0 : left),
        tokens(call.sequence.tokens),
        edge(round_up<int64_t>(call.window, kVector<T>)),
        pitch(round_up<int64_t>(left + right + kVector<T>, kVector<T>)) {
    const int64_t different = edge + kVector<T> + right;
    shared = call.band_rows == 1 && different <= tokens;
    rows = shared ? different : tokens;
    weights = static_cast<T*>(memory);
    scales = reinterpret_cast<RowScale*>(weights + rows * pitch);
  }

  size_t bytes() const { return rows * (pitch * sizeof(T) + sizeof(RowScale)); }

  __device__ __forceinline__ int64_t row_of(int64_t t) const {
    if (!shared || t < edge) return t;
    return t < tokens - right ? edge + t % kVector<T> : t - (tokens - right) + edge + kVector<T>;
  }
  __device__ __forceinline__ int64_t token_of(int64_t row) const {
    return !shared || row < edge + kVector<T> ? row : row - edge - kVector<T> + tokens - right;
  }
  __device__ __forceinline__ int first_chunk(int64_t t) const {
    return static_cast<int>((t - left + edge) / kVector<T> - edge / kVector<T>);
  }
};

// A warp prepares one row of weights.
template <class T>
struct PrepareWeights {
  Strided<AftLocal> call;
  LocalWeights<T> to;
  int64_t items;

  __device__ __forceinline__ void operator()(int64_t item) const {
    const int64_t t = to.token_of(item), left = to.left;
    const BandRow<T> row(call, t);
    const int lane = threadIdx.x % kWarp;
    const bool sees_outside = t > left || (!call.sequence.causal && t + left + 1 < call.sequence.tokens);
    float maximum = sees_outside ? 0.0f : kNoKey;
    for (int64_t j = row.first + lane; j < row.last; j += kWarp) maximum = fmaxf(maximum, to_float(row.entries[j]));
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
    const float reference = reference_of(maximum - LocalProduct<T>::kLogScale);
    const float outside = sees_outside ? machine::fast_exp2(reference) : 0.0f;
    const int64_t skipped = to.first_chunk(t) * kVector<T> - (t - left);  // zero or negative
    for (int64_t i = lane; i < to.pitch; i += kWarp) {
      const int64_t j = i + skipped;
      float weight = j >= 0 && call.sequence.causal && j > left ? 0.0f : outside;
      if (j >= row.first && j < row.last)
        weight = machine::fast_exp2(fmaf(to_float(row.entries[j]), machine::kLog2E, reference));
      store(to.weights + item * to.pitch + i, {weight});
    }
    if (lane == 0) to.scales[item] = {reference, outside};
  }
};

}  // namespace aft::cuda
