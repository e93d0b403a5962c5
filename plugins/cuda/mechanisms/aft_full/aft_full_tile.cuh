// The tile of a block in AFT-full's fused kernels: kTileRows rows of kTileChannels channels, and the parts that do not
// depend on the precision of the products.
#pragma once

#include "mechanisms/aft_full/aft_full_cell.cuh"
#include "mechanisms/aft_full/aft_full_maxima.cuh"

namespace aft::cuda {

struct FullParams {
  AftCudaAftFull call;
  Maxima maxima;
  float* totals;  // of segments in float32 products
};

// Counts of tokens are int here: T x T of more would fit no memory.
struct FullTile {
  int tokens, batch, first_row, first_channel, length;
  int keys;    // that any of the rows sees
  int blocks;  // of maxima, that those keys lie in
  bool causal;

  // Blocks that differ only in their rows come one after another: together they read w once, and their keys
  // and values stay in the cache. In causal form the last rows take longest and come first.
  __device__ explicit FullTile(const FullParams& p) {
    const AftCudaSequence& s = p.call.sequence;
    const int row_blocks = static_cast<int>(p.maxima.blocks), group = blockIdx.x / row_blocks;
    const int groups = static_cast<int>(ceil_div<int64_t>(s.channels, kTileChannels));
    tokens = static_cast<int>(s.tokens);
    causal = s.causal;
    batch = group / groups;
    first_row = (row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks) * kTileRows;
    first_channel = group % groups * kTileChannels;
    length = static_cast<int>(length_of(s, batch));
    const int end = causal && first_row + kTileRows < length ? first_row + kTileRows : length;
    keys = first_row < length ? end : 0;
    blocks = ceil_div(keys, kTileRows);
  }

  // How many keys row t sees; 0 for padded rows.
  __device__ __forceinline__ int visible(int t) const { return t >= length ? 0 : causal ? t + 1 : length; }
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

  const T *key_row, *value_row;  // of the thread's first key and channel
  int column = threadIdx.x % kColumns * N, first = threadIdx.x / kColumns;
  int keys;  // that count: none for threads without channels
  float maximum[N];
  Raw<T, N> key[kShare], value[kShare];

  __device__ __forceinline__ KeyTile(const FullParams& p, const FullTile& tile) {
    const AftCudaSequence& s = p.call.sequence;
    const int64_t channel = tile.first_channel + column;
    keys = channel < s.channels ? tile.keys : 0;
    key_row = row<T>(s.key, tile.batch, first) + channel;
    value_row = row<T>(s.value, tile.batch, first) + channel;
    p.maxima.load_keys(maximum, s, tile.batch, keys > 0 ? tile.blocks : 0, channel);
  }

  // Keys [first_key, first_key + count) of those that count.
  __device__ __forceinline__ void load(const FullParams& p, int first_key) {
    const AftCudaSequence& s = p.call.sequence;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int u = first_key + i * kStep;
      if (u + first >= keys) continue;
      key[i] = Raw<T, N>(key_row + u * s.key.token_stride);
      value[i] = Raw<T, N>(value_row + u * s.value.token_stride);
    }
  }

  // first_key as in the last load().
  template <class P, int pitch>
  __device__ __forceinline__ void write(P (*entries)[pitch], int first_key) const {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int k = first + i * kStep;
      const bool counted = first_key + k < keys;
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

// exp(w - r) in shared memory by key, so that a thread reads consecutive rows' in vectors.
constexpr int kWeightPitch = kTileRows + 4;

// A thread's share of that for `count` keys: 4 keys of kShare rows, read ahead as they are.
template <class T, int threads, int count>
struct WeightTile {
  static constexpr int kStep = threads / (count / 4), kShare = kTileRows / kStep;

  int column = threadIdx.x % (count / 4) * 4, first = threadIdx.x / (count / 4);
  const T* row;  // of w, the thread's first
  float reference[kShare];
  int visible[kShare];
  Raw<T, 4> raw[kShare];

  __device__ __forceinline__ WeightTile(const FullParams& p, const FullTile& tile) {
    row = static_cast<const T*>(p.call.position_bias) + (tile.first_row + first) * p.call.position_bias_width;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int t = tile.first_row + first + i * kStep;
      visible[i] = tile.visible(t);
      reference[i] = visible[i] > 0 ? p.maxima.rows[t] : 0.0f;
    }
  }

  __device__ __forceinline__ void load(const FullParams& p, int first_key, bool aligned) {
    const int u = first_key + column;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const T* bias = row + i * kStep * p.call.position_bias_width + u;
      if (aligned && u + 4 <= visible[i]) {
        raw[i] = Raw<T, 4>(bias);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
          if (u + k < visible[i]) raw[i].elements[k] = bias[k];
      }
    }
  }

  __device__ __forceinline__ void write(float (*weights)[kWeightPitch], int first_key) const {
#pragma unroll
    for (int i = 0; i < kShare; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k)
        weights[column + k][first + i * kStep] =
            first_key + column + k < visible[i] ? machine::fast_exp(raw[i][k] - reference[i]) : 0.0f;
  }
};

// Rows of means on the way from the threads that summed to those that write: 8 float2 of a half warp, in rows one
// apart, lie in different banks.
constexpr int kMeanPitch = kTileChannels + 8;

template <class T, int N, int threads>
__device__ __forceinline__ void write_tile(const float (*means)[kMeanPitch], const FullParams& p,
                                           const FullTile& tile) {
  constexpr int columns = kTileChannels / N;
  const int column = threadIdx.x % columns * N;
  const int64_t channel = tile.first_channel + column;
  if (channel >= p.call.sequence.channels) return;
#pragma unroll 1
  for (int r = threadIdx.x / columns; r < kTileRows; r += threads / columns) {
    const int t = tile.first_row + r;
    if (t >= tile.tokens) return;
    float mean[N];
#pragma unroll
    for (int c = 0; c < N; ++c) mean[c] = means[r][column + c];
    write_outputs<T>(mean, p.call, tile.batch, t, channel, tile.visible(t));
  }
}

}  // namespace aft::cuda
