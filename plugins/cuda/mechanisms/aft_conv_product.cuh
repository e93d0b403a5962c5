// AFT-conv in 16 bits on tensor cores.
//
// Computes: for a tile of 128 rows and up to 64 channels of a head, A V and A 1 with A[t, u] = exp(K[u] + w'[t, u])
//           over the keys of the tile's span, relative to the largest key and the largest bias.
// Method:   a warp has 32 rows. It forms its fragments of A in registers, a product of a weight by distance and the
//           exponential of a key, and multiplies them with values as they lie in memory, copied asynchronously. The
//           denominator is a product with ones, so that both sums round the same weights.
#pragma once

#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "mechanisms/aft_conv_table.cuh"
#include "sums/gate.cuh"

namespace aft::cuda {

constexpr int kConvThreads = 128;
constexpr int kConvChannels = 64;
// Weights may be 2^15, which float16 holds: it keeps those down to 2^-40 of the largest.
constexpr float kConvScale = 15.0f;
// By half of 2^-25 a key the denominator may be off, of which 2^-9 is half an ulp of bfloat16.
template <class T>
constexpr float kConvTrustedPerKey = 0.0f;
template <>
constexpr float kConvTrustedPerKey<Half> = 0.5f;

// No weight exceeds the range, which pack<Half> would check.
template <class T>
__device__ __forceinline__ uint32_t pack_weights(float low, float high) {
  return pack<T>(low, high);
}
template <>
__device__ __forceinline__ uint32_t pack_weights<Half>(float low, float high) {
  return machine::pack_half(low, high);
}

template <class T>
struct ConvShared {
  alignas(16) T values[2][kConvProductKeys][kConvChannels + 8];
  alignas(16) T rows[kWindowRows][kConvChannels + 8];  // query, then output
  alignas(16) float keys[2][kConvProductKeys];         // exp(K - m)
  RunningSum outside[kConvChannels];
  float reference;  // the logarithm to base 2 of the scale / exp(m)
};

// The block's rows and channels. Indexes of keys count from `origin`, which may be negative.
struct ConvTile {
  int64_t batch, first, channel, head, length, origin;
  int columns;     // that count
  int begin, end;  // of the span, the part that counts; begin is a multiple of a step

  __device__ __forceinline__ explicit ConvTile(const ConvParams& p) {
    const int slices = static_cast<int>(ceil_div<int64_t>(p.width, kConvChannels));
    const int group = static_cast<int>(blockIdx.x % p.groups), slice = group % slices;
    head = group / slices;
    channel = head * p.width + slice * kConvChannels;
    first = static_cast<int64_t>(blockIdx.x / p.groups % p.tiles) * kWindowRows;
    batch = blockIdx.x / p.groups / p.tiles;
    length = length_of(p.call.sequence, batch);
    const int64_t left = p.width - slice * kConvChannels;
    columns = static_cast<int>(left < kConvChannels ? left : kConvChannels);
    origin = first - p.table.left;
    const int64_t span = kWindowRows + p.table.taps - 1, last = length - origin;
    begin = origin < 0 ? static_cast<int>(-origin / kConvProductKeys * kConvProductKeys) : 0;
    end = static_cast<int>(last < span ? last : span);
  }

  __device__ __forceinline__ bool counts(int index) const { return index < end && origin + index >= 0; }
};

// A step's keys and values on their way to shared memory. A thread copies 16 bytes of some values.
template <class T>
struct ConvStep {
  static constexpr int kChunks = kConvChannels / kVector<T>, kApart = kConvThreads / kChunks;

  int chunk = threadIdx.x % kChunks * kVector<T>, line = threadIdx.x / kChunks;
  float key = 0.0f;

  __device__ __forceinline__ void load(ConvShared<T>& shared, int stage, const ConvParams& p, const ConvTile& tile,
                                       int index) {
    const StridedSequence& s = p.call.sequence;
    const T* values = row<T>(s.value, tile.batch, 0) + tile.channel + chunk;
#pragma unroll
    for (int i = line; i < line + kConvProductKeys; i += kApart) {
      const bool counts = tile.counts(index + i) && chunk < tile.columns;
      const T* from = counts ? values + (tile.origin + index + i) * s.value.token_stride : values;
      async_copy(&shared.values[stage][i][chunk], chunk < tile.columns ? from : row<T>(s.value, tile.batch, 0),
                 counts ? 16 : 0);
    }
    async_commit();
    if (threadIdx.x < kConvProductKeys && tile.counts(index + static_cast<int>(threadIdx.x)))
      key = to_float(row<T>(s.key, tile.batch, tile.origin + index + threadIdx.x)[tile.head]);
  }

  __device__ __forceinline__ void finish(ConvShared<T>& shared, int stage, const ConvTile& tile, int index) const {
    if (threadIdx.x < kConvProductKeys) {
      const bool counts = tile.counts(index + static_cast<int>(threadIdx.x));
      const float weight = machine::fast_exp2(fmaf(key, machine::kLog2E, shared.reference));
      shared.keys[stage][threadIdx.x] = counts ? weight : 0.0f;
    }
    async_wait<0>();
  }

  __device__ __forceinline__ void load_query(ConvShared<T>& shared, const ConvParams& p, const ConvTile& tile) const {
    const StridedSequence& s = p.call.sequence;
    for (int r = line; r < kWindowRows; r += kApart)
      if (tile.first + r < s.tokens && chunk < tile.columns)
        async_copy(&shared.rows[r][chunk], row<T>(s.query, tile.batch, tile.first + r) + tile.channel + chunk);
  }

  __device__ __forceinline__ void write_output(const ConvShared<T>& shared, const ConvParams& p,
                                               const ConvTile& tile) const {
    const StridedSequence& s = p.call.sequence;
    T* output = static_cast<T*>(s.output) + (tile.batch * s.tokens + tile.first) * s.channels + tile.channel + chunk;
    if (chunk >= tile.columns) return;
#pragma unroll 4
    for (int r = line; r < kWindowRows && tile.first + r < s.tokens; r += kApart)
      machine::store(output + r * s.channels, machine::load<uint4>(&shared.rows[r][chunk]));
  }
};

// The sums of a warp's rows.
template <class T>
struct ConvProduct {
  float numerators[2][kConvChannels / 8][4] = {}, denominators[2][4] = {};
  int lane = threadIdx.x % kWarp, first_row = threadIdx.x / kWarp * 32;

  // Adds a step; `table` has the pairs of weights of the thread's distances.
  __device__ __forceinline__ void add(const ConvShared<T>& shared, int stage, const float* table) {
    const uint32_t one = pack_weights<T>(1.0f, 1.0f);
#pragma unroll
    for (int key = 0; key < kConvProductKeys; key += 16) {
      const Raw<float, 2> near(&shared.keys[stage][key + lane % 4 * 2]);
      const Raw<float, 2> far(&shared.keys[stage][key + lane % 4 * 2 + 8]);
      Raw<float, 2> weights[5];  // of distances -24, -16, -8, 0, 8
#pragma unroll
      for (int i = 0; i < 5; ++i) weights[i] = Raw<float, 2>(table + 2 * (key + 8 * i - 24));
      const auto fragment = [&](int i, const Raw<float, 2>& keys) {
        return pack_weights<T>(weights[i][0] * keys[0], weights[i][1] * keys[1]);
      };
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int own = 3 - 2 * m;
        a[m][0] = fragment(own, near);
        a[m][1] = fragment(own - 1, near);
        a[m][2] = fragment(own + 1, far);
        a[m][3] = fragment(own, far);
        multiply_add<T>(denominators[m], a[m], {one, one});
      }
#pragma unroll
      for (int n = 0; n < kConvChannels / 8; n += 2) {
        uint32_t values[4];
        load_matrices_transposed(values, &shared.values[stage][key + lane % 16][n * 8 + lane / 16 * 8]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(numerators[m][n], a[m], {values[0], values[1]});
          multiply_add<T>(numerators[m][n + 1], a[m], {values[2], values[3]});
        }
      }
    }
  }

  __device__ __forceinline__ int row_of(int r) const { return first_row + r / 2 * 16 + r % 2 * 8 + lane / 4; }
  __device__ __forceinline__ int column_of(int n) const { return n * 8 + lane % 4 * 2; }
};

// Whether row r is free of later NaN and infinite values. They have weight 0, which does not clear them; the exact
// mean does not read them.
template <class T>
__device__ __forceinline__ bool reads_no_later_value(const ConvParams& p, const ConvProduct<T>& product, int r) {
  bool free = true;
  if (p.sums.causal)
#pragma unroll
    for (int n = 0; n < kConvChannels / 8; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float numerator = product.numerators[r / 2][n][r % 2 * 2 + k];
        free = free && numerator == numerator;
      }
  return free;
}

// Adds the sums outside the span and gates. The largest key, and so the factor of those sums, is a head's.
template <Gate gate, class T>
__device__ __forceinline__ void finish_rows(ConvShared<T>& shared, const ConvParams& p, const ConvTile& tile,
                                            const ConvProduct<T>& product) {
  const float largest_bias = p.table.largest_bias[tile.head];
  const float least = fmaxf(kTrustedDenominator, kConvTrustedPerKey<T> * static_cast<float>(tile.end - tile.begin));
  // Sums of the span do not matter where they are 2^-80 of those outside.
  const float reference = fmaf(shared.outside[0].maximum - largest_bias, machine::kLog2E, shared.reference);
  const float factor = machine::fast_exp2(fminf(reference, 80.0f));
  float outside[kConvChannels / 8][2];
#pragma unroll
  for (int n = 0; n < kConvChannels / 8; ++n)
#pragma unroll
    for (int k = 0; k < 2; ++k) outside[n][k] = shared.outside[product.column_of(n) + k].numerator * factor;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int64_t t = tile.first + product.row_of(r);
    const float denominator = fmaf(shared.outside[0].denominator, factor, product.denominators[r / 2][r % 2 * 2]);
    T* const to = &shared.rows[product.row_of(r)][product.column_of(0)];
    if (t >= tile.length) {
#pragma unroll
      for (int n = 0; n < kConvChannels / 8; ++n) store(to + n * 8, {0.0f, 0.0f});
    } else if (denominator >= least && reads_no_later_value(p, product, r)) {
      const float reciprocal = machine::fast_divide(1.0f, denominator);
#pragma unroll
      for (int n = 0; n < kConvChannels / 8; ++n) {
        const Raw<T, 2> query(to + n * 8);
        float y[2];
#pragma unroll
        for (int k = 0; k < 2; ++k)
          y[k] = gated<gate>(query[k], (product.numerators[r / 2][n][r % 2 * 2 + k] + outside[n][k]) * reciprocal);
        store(to + n * 8, y);
      }
    } else {
#pragma unroll 1
      for (int c = 0; c < kConvChannels / 4; ++c) {
        const int column = product.column_of(c / 2) + c % 2;
        T* const cell = &shared.rows[product.row_of(r)][column];
        if (column < tile.columns)
          store(cell, {gated<gate>(to_float(*cell),
                                   exact_conv_mean<T>(p, tile.batch, tile.head, tile.origin, tile.origin + tile.end, t,
                                                      tile.channel + column, shared.outside[column]))});
      }
    }
  }
}

template <class T, Gate gate>
__global__ void __launch_bounds__(kConvThreads, 3) product_kernel(const ConvParams p) {
  auto& shared = shared_memory<ConvShared<T>>();
  const ConvTile tile(p);
  ConvStep<T> step;
  step.load_query(shared, p, tile);
  if (threadIdx.x < kConvChannels) {
    RunningSum sum = RunningSum::empty();
    if (static_cast<int>(threadIdx.x) < tile.columns) {
      const Outside outside(p.sums, tile.batch, tile.first, tile.channel + threadIdx.x);
      sum = outside.sum;
      // The reference stays finite. Where all keys are below -2e38, their weights become 0.
      if (threadIdx.x == 0) shared.reference = kConvScale - fmaxf(outside.maximum, -2e38f) * machine::kLog2E;
    }
    shared.outside[threadIdx.x] = sum;
  }
  __syncthreads();

  ConvProduct<T> product;
  const int end = tile.length > tile.first ? tile.end : tile.begin;
  const float* table = p.table.weights + tile.head * p.table.pitch +
                       2 * (p.table.before - product.first_row + product.lane % 4 * 2 - product.lane / 4);
  int stage = 1;
  for (int index = tile.begin - kConvProductKeys; index < end; index += kConvProductKeys, stage ^= 1) {
    const int next = index + kConvProductKeys;
    if (next < end) step.load(shared, stage ^ 1, p, tile, next);
    if (index >= tile.begin) product.add(shared, stage, table + 2 * index);
    if (next < end) step.finish(shared, stage ^ 1, tile, next);
    __syncthreads();
  }
  async_commit();
  async_wait<0>();
  __syncthreads();
  finish_rows<gate>(shared, p, tile, product);
  __syncthreads();
  step.write_output(shared, p, tile);
}

}  // namespace aft::cuda
