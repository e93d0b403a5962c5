// A block's share of AFT-full's fused kernels: kTileRows rows of kTileChannels channels, and the parts that do
// not depend on how the products are taken.
#pragma once

#include "aft_full_cell.cuh"
#include "aft_full_maxima.cuh"

namespace aft::cuda {

struct FullParams {
  AftCudaAftFull call;
  Maxima maxima;
};

struct FullTile {
  int64_t batch, first_row, first_channel, length;
  int64_t keys;     // that any of the rows sees
  int64_t blocks;   // of maxima, that those keys lie in

  // Blocks that differ in their rows alone come one after another: together they read w once, and their keys
  // and values stay in the cache. In causal form the last rows take longest and come first.
  __device__ explicit FullTile(const FullParams& p) {
    const AftCudaSequence& s = p.call.sequence;
    const int64_t row_block = p.maxima.blocks - 1 - blockIdx.x % p.maxima.blocks;
    const int64_t group = blockIdx.x / p.maxima.blocks, groups = ceil_div<int64_t>(s.channels, kTileChannels);
    first_row = row_block * kTileRows;
    first_channel = group % groups * kTileChannels;
    batch = group / groups;
    length = length_of(s, batch);
    const int64_t end = s.causal && first_row + kTileRows < length ? first_row + kTileRows : length;
    keys = first_row < length ? end : 0;
    blocks = ceil_div<int64_t>(keys, kTileRows);
  }

  // How many keys row t sees; 0 for padded rows.
  __device__ __forceinline__ int64_t visible(const AftCudaSequence& s, int64_t t) const {
    return t >= length ? 0 : s.causal ? t + 1 : length;
  }
};

inline int64_t full_tiles(const AftCudaSequence& s) {
  return s.batch * ceil_div<int64_t>(s.tokens, kTileRows) * ceil_div<int64_t>(s.channels, kTileChannels);
}

// A thread's share of `count` keys and their values, N channels each: read ahead as they are, later written to
// shared memory as entries[key] = (exp(K - m) V, exp(K - m)), kTileChannels of each.
template <class T, int N, int threads, int count>
struct KeyTile {
  static constexpr int kColumns = kTileChannels / N, kStep = threads / kColumns, kShare = count / kStep;
  static_assert(kShare * kStep == count, "threads share the keys evenly");

  int column = threadIdx.x % kColumns * N, first = threadIdx.x / kColumns;
  int64_t channel;
  bool active;
  float maximum[N];
  Raw<T, N> key[kShare], value[kShare];

  __device__ __forceinline__ KeyTile(const FullParams& p, const FullTile& tile) : channel(tile.first_channel + column) {
    active = channel < p.call.sequence.channels;
    p.maxima.load_keys(maximum, p.call.sequence, tile.batch, active ? tile.blocks : 0, channel);
  }

  __device__ __forceinline__ bool counts(const FullTile& tile, int64_t u) const { return active && u < tile.keys; }

  __device__ __forceinline__ void load(const FullParams& p, const FullTile& tile, int64_t first_key) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int64_t u = first_key + first + i * kStep;
      if (!counts(tile, u)) continue;
      key[i] = Raw<T, N>(row<T>(p.call.sequence.key, tile.batch, u) + channel);
      value[i] = Raw<T, N>(row<T>(p.call.sequence.value, tile.batch, u) + channel);
    }
  }

  // first_key as in the last load().
  template <class P, int pitch>
  __device__ __forceinline__ void write(P (*entries)[pitch], const FullTile& tile, int64_t first_key) const {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int k = first + i * kStep;
      const bool counted = counts(tile, first_key + k);
      float numerator[N], denominator[N];
#pragma unroll
      for (int c = 0; c < N; ++c) {
        denominator[c] = counted ? machine::fast_exp(key[i][c] - maximum[c]) : 0.0f;
        numerator[c] = counted ? denominator[c] * value[i][c] : 0.0f;
      }
      store(&entries[k][column], numerator);
      store(&entries[k][kTileChannels + column], denominator);
    }
  }
};

// Rows of means on the way from the threads that summed to those that write: 8 float2 of a half warp, in rows one
// apart, lie in different banks.
constexpr int kMeanPitch = kTileChannels + 8;

template <class T, int N, int threads>
__device__ __forceinline__ void write_tile(const float (*means)[kMeanPitch], const FullParams& p,
                                           const FullTile& tile) {
  constexpr int columns = kTileChannels / N;
  const AftCudaSequence& s = p.call.sequence;
  const int column = threadIdx.x % columns * N;
  const int64_t channel = tile.first_channel + column;
  if (channel >= s.channels) return;
#pragma unroll 1
  for (int r = threadIdx.x / columns; r < kTileRows; r += threads / columns) {
    const int64_t t = tile.first_row + r;
    if (t >= s.tokens) return;
    float mean[N];
#pragma unroll
    for (int c = 0; c < N; ++c) mean[c] = means[r][column + c];
    write_outputs<T>(mean, p.call, tile.batch, t, channel, tile.visible(s, t));
  }
}

}  // namespace aft::cuda
