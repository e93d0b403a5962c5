// Softmax pooling of rows that are read once: a tile of whole rows stays in shared memory for logits and sums.
//
// Computes: for each of a block's kTileHeads heads, the sums of a chunk of rows weighted by exp(logit - maximum), where
//           the logit is the product of the whole row and the head's weights.
// Cost:     bytes of one read; in 16 bits some 15 instructions for 256 elements, beside those of the softmax.
// Method:   tiles of kTokens rows go through two stages of shared memory, one copied while the other is used. Each warp
//           has slices of 16 channels of every row: it multiplies them with the heads' weights, which stay in
//           registers, and later with the exponentials, into sums that stay in registers until the chunk ends. Between
//           the two the warps' shares of a logit meet in shared memory, where warp h takes the exponentials of head h.
//           Tensor cores multiply in tf32. Their k-th operands may be any channels or tokens, the same in both: slot t
//           is element 2t and slot t + 4 is element 2t + 1, which lie side by side in memory.
// Numerics: 16-bit elements are exact in tf32. Other operands are split in two, but for normalized 16-bit rows, which
//           are rounded for sums. A split product has a relative error of about 2^-20. Sums of tiles are added in
//           float32.
#pragma once

#include <algorithm>

#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "device/tile_rows.cuh"
#include "sums/running_softmax.cuh"

namespace aft::cuda {

constexpr int kTileHeads = 8;  // a head for each warp
static_assert(kTileHeads == kBlockWarps, "");
constexpr int kSlice = 16;  // channels
constexpr int kTileBytes = 32 * 1024;

template <class T, int kTokens>
constexpr int kTileChannels = kTileBytes / kTokens / static_cast<int>(sizeof(T));

// Slices of a warp. Weights and sums of more than 6 take more registers than two blocks of a multiprocessor have.
template <class T, int kTokens>
constexpr int kWarpSlices = std::min(kTileChannels<T, kTokens> / kSlice / kBlockWarps, 6);
template <class T, int kTokens>
constexpr int kMostChannels = kWarpSlices<T, kTokens> * kBlockWarps * kSlice;

// Calls f with a constant, the rows of a tile of that many channels; returns the result of f, or that of otherwise()
// where a row has too many channels.
template <class T, class F, class Otherwise>
int with_tile(int64_t channels, const F& f, const Otherwise& otherwise) {
  if (channels <= kMostChannels<T, 64>) return f(std::integral_constant<int, 64>{});
  if (channels <= kMostChannels<T, 32>) return f(std::integral_constant<int, 32>{});
  if (channels <= kMostChannels<T, 16>) return f(std::integral_constant<int, 16>{});
  return otherwise();
}

template <class T, int kTokens>
struct PoolTileShared {
  alignas(16) T rows[2][kTokens][kTileChannels<T, kTokens> + kVector<T>];
  alignas(16) float partial[kBlockWarps][kTileHeads][kTokens + 4];  // logits
  alignas(16) float weights[kTileHeads][kTokens + 8];               // exponentials
  alignas(16) float factors[kTileHeads];
};

// Pools the rows as they are. Another such struct changes them: all threads call its prepare when a tile has arrived.
struct PlainRows {
  static constexpr bool kChanges = false;
  struct Row {
    __device__ float operator()(float x) const { return x; }
  };
  __device__ Row operator[](int) const { return {}; }
  template <class Tile>
  __device__ void prepare(const Tile&, int, int) const {}
};

// A number in tf32: it fits, it is rounded, or it is split in two. Splitting cuts bits off, which takes one instruction
// where rounding takes three. Tensor cores cut the lower part again.
enum class Operand { kExact, kRounded, kSplit };

template <Operand operand>
__device__ __forceinline__ void to_operand(float x, uint32_t& high, uint32_t& low) {
  constexpr uint32_t kUpperBits = ~0x1fffu;
  high = operand == Operand::kRounded ? to_tf32(x) : __float_as_uint(x);
  if constexpr (operand == Operand::kSplit) {
    high &= kUpperBits;
    low = __float_as_uint(x - __uint_as_float(high));
  }
}

template <Operand left, Operand right>
__device__ __forceinline__ void multiply_add_slots(float (&sums)[4], const float (&a)[4], const float (&b)[2]) {
  uint32_t high_a[4], low_a[4], high_b[2], low_b[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) to_operand<left>(a[i], high_a[i], low_a[i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) to_operand<right>(b[i], high_b[i], low_b[i]);
  if constexpr (left == Operand::kSplit) multiply_add_tf32(sums, low_a, high_b);
  if constexpr (right == Operand::kSplit) multiply_add_tf32(sums, high_a, low_b);
  multiply_add_tf32(sums, high_a, high_b);
}

// The left operands of two steps, [16, 8] each, from elements of which two lie side by side in a word. Words 2i and
// 2i + 1 belong to step i, for the upper and the lower eight rows.
template <class T>
__device__ __forceinline__ void unpack(float (&a)[2][4], const uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i / 2][i % 2] = to_float(T{static_cast<uint16_t>(words[i])});
    a[i / 2][i % 2 + 2] = to_float(T{static_cast<uint16_t>(words[i] >> 16)});
  }
}

// 16 rows x 16 channels at `tile`, as left operands.
template <class T>
__device__ __forceinline__ void load_slots(float (&a)[2][4], const T* tile, int stride) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  if constexpr (sizeof(T) == 2) {
    uint32_t words[4];
    load_matrices(words, tile + lane % 16 * stride + lane / 16 * 8);
    unpack<T>(a, words);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Raw<T, 2> pair(tile + (g + i % 2 * 8) * stride + i / 2 * 8 + 2 * t);
      a[i / 2][i % 2] = pair[0];
      a[i / 2][i % 2 + 2] = pair[1];
    }
  }
}

// The same transposed: 16 channels x 16 rows.
template <class T>
__device__ __forceinline__ void load_slots_transposed(float (&a)[2][4], const T* tile, int stride) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  if constexpr (sizeof(T) == 2) {
    uint32_t words[4];
    load_matrices_transposed(words, tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
    unpack<T>(a, words);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = tile[(i / 4 * 8 + 2 * t + i % 4 / 2) * stride + g + i % 2 * 8];
  }
}

// The pooling of a block: what a thread holds of it.
template <class T, int kTokens, class Rows = PlainRows>
struct PoolTile {
  static constexpr int kChannels = kTileChannels<T, kTokens>, kSlices = kWarpSlices<T, kTokens>;
  static constexpr int kStride = kChannels + kVector<T>;
  static constexpr bool kFloat = sizeof(T) == 4;

  PoolTileShared<T, kTokens>& shared;
  const StridedTensor& tensor;
  const int batch;
  const int channels;
  Rows rows;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  float weights[kSlices][2][2];                // of head g, for slots t and t + 4 of two steps
  float sums[kSlices][4] = {};                 // of channels g and g + 8, heads 2t and 2t + 1
  float maximum = kNoKey, denominator = 0.0f;  // of head `warp`; a lane's part of the denominator

  // weight(channel, head) for channels of the tensor.
  template <class Weight>
  __device__ __forceinline__ PoolTile(PoolTileShared<T, kTokens>& memory, const StridedTensor& of, int document,
                                      int width, const Rows& row_functions, const Weight& weight)
      : shared(memory), tensor(of), batch(document), channels(width), rows(row_functions) {
#pragma unroll
    for (int i = 0; i < kSlices * 4; ++i) {
      const int channel = slice(i / 4) + i / 2 % 2 * 8 + 2 * t + i % 2;
      weights[i / 4][i / 2 % 2][i % 2] = channel < channels ? weight(channel, g) : 0.0f;
    }
  }

  // The first channel of the warp's slice i.
  __device__ __forceinline__ int slice(int i) const { return (i * kBlockWarps + warp) * kSlice; }

  // Copies rows first to first + count. Other rows, and columns past the last channel, become 0.
  __device__ __forceinline__ void copy(int stage, int first, int count) const {
    constexpr int kPerRow = kChannels / kVector<T>, kRowsApart = kBlockThreads / kPerRow;
    const int column = threadIdx.x % kPerRow * kVector<T>;
    if (column < round_up(channels, kSlice)) {
      int r = threadIdx.x / kPerRow;
      T* to = &shared.rows[stage][r][column];
      const T* from = row<T>(tensor, batch, first + r) + column;
      if (column >= channels) count = 0;
#pragma unroll
      for (int i = 0; i < kTokens / kRowsApart; ++i) {
        async_copy(to, r < count ? from : tensor.data, r < count ? 16 : 0);
        r += kRowsApart;
        to += kRowsApart * kStride;
        from += kRowsApart * tensor.token_stride;
      }
    }
    async_commit();
  }

  // Computes the warp's share of the logits of a stage.
  __device__ __forceinline__ void multiply_rows(int stage) {
    constexpr Operand kLeft = kFloat || Rows::kChanges ? Operand::kSplit : Operand::kExact;
    float logits[kTokens / 16][4] = {};
#pragma unroll
    for (int j = 0; j < kSlices; ++j) {
      if (slice(j) >= channels) break;
#pragma unroll
      for (int i = 0; i < kTokens / 16; ++i) {
        float a[2][4];
        load_slots(a, &shared.rows[stage][16 * i][slice(j)], kStride);
#pragma unroll
        for (int k = 0; k < 8; ++k) a[k / 4][k % 4] = rows[16 * i + g + k % 2 * 8](a[k / 4][k % 4]);
#pragma unroll
        for (int k = 0; k < 2; ++k) multiply_add_slots<kLeft, Operand::kSplit>(logits[i], a[k], weights[j][k]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i)
#pragma unroll
      for (int k = 0; k < 4; ++k) shared.partial[warp][2 * t + k % 2][16 * i + g + k / 2 * 8] = logits[i][k];
  }

  // Computes the exponentials of head `warp`, relative to the largest logit so far.
  __device__ __forceinline__ void exponentiate(int count, float scale) {
    constexpr int kMine = ceil_div(kTokens, kWarp);
    float logits[kMine];
    const float before = maximum;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int token = (lane + i * kWarp) % kTokens;
      float logit = 0.0f;
#pragma unroll
      for (int k = 0; k < kBlockWarps; ++k) logit += shared.partial[k][warp][token];
      logits[i] = logit * scale;
      if (token < count) maximum = fmaxf(maximum, logits[i]);
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
    const float factor = machine::fast_exp(before - maximum);
    denominator *= factor;
    if (lane == 0) shared.factors[warp] = factor;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int token = lane + i * kWarp;
      if (token >= kTokens) break;
      const float share = token < count ? machine::fast_exp(logits[i] - maximum) : 0.0f;
      shared.weights[warp][token] = share;
      denominator += share;
    }
  }

  // Adds the rows of a stage, weighted.
  __device__ __forceinline__ void add_rows(int stage) {
    constexpr Operand kLeft = kFloat ? Operand::kSplit : Rows::kChanges ? Operand::kRounded : Operand::kExact;
    float b[kTokens / 8][2];
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) {
      const Raw<float, 2> pair(&shared.weights[g][8 * i + 2 * t]);
      b[i][0] = pair[0];
      b[i][1] = pair[1];
    }
    const Raw<float, 2> factors(&shared.factors[2 * t]);
#pragma unroll
    for (int j = 0; j < kSlices; ++j) {
      if (slice(j) >= channels) break;
      float step[4] = {};
#pragma unroll
      for (int i = 0; i < kTokens / 16; ++i) {
        float a[2][4];
        load_slots_transposed(a, &shared.rows[stage][16 * i][slice(j)], kStride);
#pragma unroll
        for (int k = 0; k < 8; ++k) a[k / 4][k % 4] = rows[16 * i + k / 4 * 8 + 2 * t + k % 4 / 2](a[k / 4][k % 4]);
#pragma unroll
        for (int k = 0; k < 2; ++k) multiply_add_slots<kLeft, Operand::kSplit>(step, a[k], b[2 * i + k]);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[j][k] = sums[j][k] * factors[k % 2] + step[k];
    }
  }

  // Pools the rows begin to end.
  __device__ __forceinline__ void pool(int begin, int end, float scale) {
    if (begin < end) copy(0, begin, end - begin);
    int stage = 0;
    for (int first = begin; first < end; first += kTokens, stage ^= 1) {
      async_wait<0>();
      __syncthreads();  // the tile is there, and the other stage is free
      const int next = first + kTokens;
      if (next < end) copy(stage ^ 1, next, end - next);
      const int count = at_most(end - first, kTokens);
      if constexpr (Rows::kChanges) {
        rows.prepare(shared.rows[stage], first, count);
        __syncthreads();
      }
      multiply_rows(stage);
      __syncthreads();
      exponentiate(count, scale);
      __syncthreads();
      add_rows(stage);
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) denominator += __shfl_xor_sync(~0u, denominator, distance);
  }

  // Calls f(channel, head, sum) for all sums of this thread.
  template <class F>
  __device__ __forceinline__ void for_each_sum(const F& f) const {
#pragma unroll
    for (int i = 0; i < kSlices * 4; ++i) {
      const int channel = slice(i / 4) + g + i % 4 / 2 * 8;
      if (channel < channels) f(channel, 2 * t + i % 2, sums[i / 4][i % 4]);
    }
  }
};

}  // namespace aft::cuda
