// The maxima that AFT-full's exponentials are relative to, found before the sums.
//
// Computes: the maximum of every row of w (causal: of the keys the row sees), and per channel the largest key of every
//           kTileRows tokens.
// Cost:     one reading of w, which the sums read once for every 64 channels of the batch.
// Method:   at run time, so that w needs no preparation.
// Numerics: the maxima of w do not depend on lengths. A row whose largest weights all lie on keys that do not count
//           loses range, nothing else.
#pragma once

#include "device/launch.cuh"
#include "sums/running_softmax.cuh"

namespace aft::cuda {

constexpr int kTileRows = 128, kTileChannels = 64;

struct Maxima {
  float* rows;  // [tokens]
  float* keys;  // [batch, blocks, channels]
  int64_t blocks;

  Maxima(const Sequence& s, void* workspace)
      : rows(static_cast<float*>(workspace)),
        keys(rows + round_up<int64_t>(s.tokens, 4)),
        blocks(ceil_div<int64_t>(s.tokens, kTileRows)) {}

  static size_t bytes(const Sequence& s) {
    const int64_t blocks = ceil_div<int64_t>(s.tokens, kTileRows);
    return sizeof(float) * (round_up<int64_t>(s.tokens, 4) + s.batch * blocks * s.channels);
  }

  // Finds the maxima of N channels over the first `count` blocks of document b, of which it reads each step-th.
  template <int N>
  __device__ __forceinline__ void load_keys(float (&maximum)[N], const StridedSequence& s, int64_t b, int64_t count,
                                            int64_t channel, int first = 0, int step = 1) const {
#pragma unroll
    for (int c = 0; c < N; ++c) maximum[c] = kNoKey;
    for (int64_t i = first; i < count; i += step)
#pragma unroll
      for (int c = 0; c < N; ++c) maximum[c] = fmaxf(maximum[c], keys[(b * blocks + i) * s.channels + channel + c]);
  }
};

// A warp finds the maximum of row t of w.
template <class T>
__device__ __forceinline__ void find_row_maximum(const Strided<AftFull>& call, const Maxima& maxima, int64_t t) {
  const StridedSequence& s = call.sequence;
  const int lane = threadIdx.x % kWarp;
  const T* bias = static_cast<const T*>(call.position_bias) + t * call.position_bias_width;
  const int64_t count = s.causal ? t + 1 : s.tokens;
  const int64_t vectors = reinterpret_cast<uintptr_t>(bias) % 16 == 0 ? count / kVector<T> : 0;
  float maximum = kNoKey;
#pragma unroll 4
  for (int64_t i = lane; i < vectors; i += kWarp) {
    const Raw<T, kVector<T>> w(bias + i * kVector<T>);
#pragma unroll
    for (int k = 0; k < kVector<T>; ++k) maximum = fmaxf(maximum, w[k]);
  }
  for (int64_t u = vectors * kVector<T> + lane; u < count; u += kWarp) maximum = fmaxf(maximum, to_float(bias[u]));
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
  if (lane == 0) maxima.rows[t] = maximum;
}

// A block of `threads` finds the maxima of the keys of one tile of tokens and channels. Tiles count channels fastest.
template <int threads>
struct KeyMaximaShared {
  float maxima[threads][8];
};
template <class T, int N, int threads>
__device__ __forceinline__ void find_key_maxima(const StridedSequence& s, const Maxima& maxima, int64_t tile) {
  constexpr int columns = kTileChannels / N, rows = threads / columns;
  auto& shared = shared_memory<KeyMaximaShared<threads>>();
  float* maximum = &shared.maxima[0][0];  // [rows][kTileChannels]
  const int64_t groups = ceil_div<int64_t>(s.channels, kTileChannels);
  const int64_t first_channel = tile % groups * kTileChannels, block = tile / groups % maxima.blocks;
  const int64_t b = tile / groups / maxima.blocks, length = length_of(s, b);
  const int64_t end = (block + 1) * kTileRows < length ? (block + 1) * kTileRows : length;
  const int column = threadIdx.x % columns, first_row = threadIdx.x / columns;
  const int64_t channel = first_channel + column * N;
  float mine[N];
#pragma unroll
  for (int c = 0; c < N; ++c) mine[c] = kNoKey;
  if (channel < s.channels)
#pragma unroll 4
    for (int64_t u = block * kTileRows + first_row; u < end; u += rows) {
      const Raw<T, N> key(row<T>(s.key, b, u) + channel);
#pragma unroll
      for (int c = 0; c < N; ++c) mine[c] = fmaxf(mine[c], key[c]);
    }
#pragma unroll
  for (int c = 0; c < N; ++c) maximum[first_row * kTileChannels + column * N + c] = mine[c];
  __syncthreads();
  const int c = threadIdx.x;
  if (c >= kTileChannels || first_channel + c >= s.channels) return;
  float largest = maximum[c];
  for (int r = 1; r < rows; ++r) largest = fmaxf(largest, maximum[r * kTileChannels + c]);
  maxima.keys[(b * maxima.blocks + block) * s.channels + first_channel + c] = largest;
}

}  // namespace aft::cuda
