// The tile of a block in AFT-full's fused kernels: kTileRows rows of kTileChannels channels, and the parts that do not
// depend on the precision of the products.
#pragma once

#include "mechanisms/aft_full/aft_full_cell.cuh"
#include "mechanisms/aft_full/aft_full_maxima.cuh"

namespace aft::cuda {

struct FullParams {
  Strided<AftFull> call;
  Maxima maxima;
  float* totals;  // of segments in float32 products
};

// Counts of tokens are int here: T x T of more would fit no memory.
struct FullTile {
  int tokens, batch, first_row, first_channel, length;
  int keys;    // that any of the rows sees
  int blocks;  // of maxima, that those keys lie in
  bool causal;

  // Blocks that differ only in their channels come one after another: together they read their rows of w from memory
  // once, and blocks at work at the same time read the same keys and values. In causal form the last rows take longest
  // and come first.
  __device__ explicit FullTile(const FullParams& p) {
    const StridedSequence& s = p.call.sequence;
    const int groups = static_cast<int>(ceil_div<int64_t>(s.channels, kTileChannels));
    const int row_blocks = static_cast<int>(p.maxima.blocks), row_block = blockIdx.x / groups % row_blocks;
    tokens = static_cast<int>(s.tokens);
    causal = s.causal;
    batch = blockIdx.x / groups / row_blocks;
    first_row = (row_blocks - 1 - row_block) * kTileRows;
    first_channel = blockIdx.x % groups * kTileChannels;
    length = static_cast<int>(length_of(s, batch));
    const int end = causal && first_row + kTileRows < length ? first_row + kTileRows : length;
    keys = first_row < length ? end : 0;
    blocks = ceil_div(keys, kTileRows);
  }

  // The number of keys that row t sees; 0 for padded rows.
  __device__ __forceinline__ int visible(int t) const { return t >= length ? 0 : causal ? t + 1 : length; }
};

inline int64_t full_tiles(const Sequence& s) {
  return s.batch * ceil_div<int64_t>(s.tokens, kTileRows) * ceil_div<int64_t>(s.channels, kTileChannels);
}

// Rows of means on the way from the threads that summed to those that write: 8 float2 of a half warp, in rows one
// apart, lie in different banks.
constexpr int kMeanPitch = kTileChannels + 8;

// A thread's share of `count` keys and their values, N channels each: read ahead as they are, later written to
// shared memory as entries[key] = (exp(K - m) V, exp(K - m)), kTileChannels of each.
template <class T, int N, int threads, int count>
struct KeyTile {
  static constexpr int kColumns = kTileChannels / N, kStep = threads / kColumns, kShare = count / kStep;
  static_assert(kShare * kStep == count, "threads share the keys evenly");

  const T *key_row, *value_row;  // of the thread's next key and channel
  int column = threadIdx.x % kColumns * N, first = threadIdx.x / kColumns;
  int keys;  // that count: none for threads without channels
  float reference[N];
  Raw<T, N> key[kShare], value[kShare];

  // Threads of the same channels share the maxima of blocks. `scratch` may be overwritten after a barrier.
  __device__ __forceinline__ KeyTile(const FullParams& p, const FullTile& tile, float (*scratch)[kMeanPitch]) {
    const StridedSequence& s = p.call.sequence;
    const int64_t channel = tile.first_channel + column;
    keys = channel < s.channels ? tile.keys : 0;
    key_row = row<T>(s.key, tile.batch, first) + channel;
    value_row = row<T>(s.value, tile.batch, first) + channel;
    float maximum[N];
    p.maxima.load_keys(maximum, s, tile.batch, keys > 0 ? tile.blocks : 0, channel, first, kStep);
#pragma unroll
    for (int c = 0; c < N; ++c) scratch[first][column + c] = maximum[c];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < N; ++c) {
      for (int r = 0; r < kStep; ++r) maximum[c] = fmaxf(maximum[c], scratch[r][column + c]);
      reference[c] = raised(kNoKey, maximum[c]);
    }
  }

  // Loads the next keys from first_key on. A key that does not count becomes minus infinity, with value 0.
  __device__ __forceinline__ void load(const FullParams& p, int first_key) {
    const StridedSequence& s = p.call.sequence;
    const int64_t key_step = kStep * s.key.token_stride, value_step = kStep * s.value.token_stride;
    if (first_key + count <= keys) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        key[i] = Raw<T, N>(key_row + i * key_step);
        value[i] = Raw<T, N>(value_row + i * value_step);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kShare; ++i)
        if (first_key + first + i * kStep < keys) {
          key[i] = Raw<T, N>(key_row + i * key_step);
          value[i] = Raw<T, N>(value_row + i * value_step);
        } else {
#pragma unroll
          for (int c = 0; c < N; ++c) {
            key[i].elements[c] = minus_infinity<T>();
            value[i].elements[c] = T{};
          }
        }
    }
    key_row += kShare * key_step;
    value_row += kShare * value_step;
  }

  template <class P, int pitch>
  __device__ __forceinline__ void write(P (*entries)[pitch]) const {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      float numerator[N], denominator[N];
#pragma unroll
      for (int c = 0; c < N; ++c) {
        denominator[c] = weight_of(key[i][c], reference[c]);
        numerator[c] = denominator[c] * value[i][c];
      }
      P* entry = &entries[first + i * kStep][column];
      store(entry, numerator);
      store(entry + kTileChannels, denominator);
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
      reference[i] = visible[i] > 0 ? raised(kNoKey, p.maxima.rows[t]) : 0.0f;
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
            first_key + column + k < visible[i] ? weight_of(raw[i][k], reference[i]) : 0.0f;
  }
};

// The gate is chosen for every vector of outputs: a kernel for each gate would hold the same loop over keys.
template <class T, int N, int threads>
__device__ __forceinline__ void write_tile(const float (*means)[kMeanPitch], const FullParams& p,
                                           const FullTile& tile) {
  constexpr int columns = kTileChannels / N;
  const StridedSequence& s = p.call.sequence;
  const int column = threadIdx.x % columns * N;
  const int64_t channel = tile.first_channel + column;
  if (channel >= s.channels) return;
#pragma unroll 1
  for (int r = threadIdx.x / columns; r < kTileRows; r += threads / columns) {
    const int t = tile.first_row + r;
    if (t >= tile.tokens) return;
    float mean[N];
#pragma unroll
    for (int c = 0; c < N; ++c) mean[c] = means[r][column + c];
    complete_means<T>(mean, p.call, tile.batch, t, channel, tile.visible(t));
    switch (p.call.gate) {
      case Gate::kSigmoid: write_gated<Gate::kSigmoid, T>(mean, s, tile.batch, t, channel); break;
      case Gate::kTanh: write_gated<Gate::kTanh, T>(mean, s, tile.batch, t, channel); break;
      case Gate::kNone: write_gated<Gate::kNone, T>(mean, s, tile.batch, t, channel); break;
      case Gate::kRelu: break;  // refused by the caller
    }
  }
}

}  // namespace aft::cuda
