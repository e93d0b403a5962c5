// The poolings of LayerNormFastformer (layer_norm_fastformer.cu).
//
// Computes: means of the normalized rows n = (X - mean) / deviation with one softmax per head. Its logits are products
//           of whole rows with a column for each head, and it weights whole rows.
// Method:   a block works on a chunk of a document. Rows that fit go through sums/pool_tile.cuh, which
//           reads them once. Others are taken for kGroup heads, in steps of kPoolTokens tokens by kSlab channels, once
//           for the logits and again for the sums. Chunks are merged as in any pooling
//           (sums/pool_merge.cuh), with rows as wide as all heads' sums.
// Numerics: the sums in the workspace are relative to the largest logit so far.
#pragma once

#include "sums/head_context.cuh"
#include "sums/head_softmax_pool.cuh"
#include "sums/pool_tile.cuh"

namespace aft::cuda {

constexpr int kGroup = 16;

// A row's mean and the inverse of its standard deviation.
struct Moments {
  float mean, scale;

  __device__ __forceinline__ float normalize(float x) const { return (x - mean) * scale; }
};

struct LayerParams {
  Strided<LayerNormFastformer> call;
  int channels, heads;
  int chunks, chunk;  // chunks of a document, tokens of a chunk
  bool vectors;       // every row of every matrix starts at a multiple of 16 bytes
  // In the workspace:
  Moments* moments;                         // [batch, tokens]
  float* query_offset;                      // [batch, channels]: norm_bias Wq + bq
  float *global_query, *global_key, *bias;  // [batch, channels]
  float* beta_weight;                       // [batch, channels, heads]: diag(norm_weight) Wk diag(g_q) B
  void* matrix;                             // [batch, channels, channels]: diag(norm_weight) F, of the tensors' element
  Pool pool;                                // means of n; a head's channels are all there are
};

// The moments of `count` rows, four lanes a row.
template <class T>
__device__ __forceinline__ void find_moments(Moments (&moments)[kPoolTokens], const LayerParams& p, int batch,
                                             int first, int count) {
  constexpr int kLanes = kBlockThreads / kPoolTokens, kUnit = kVector<T>;
  const int mine = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const T* const from = row<T>(p.call.sequence.query, batch, first + mine);
  const auto sum = [&](const auto& f) {
    float total = 0.0f;
    if (mine < count && p.vectors) {
#pragma unroll 4
      for (int c = lane * kUnit; c < p.channels; c += kLanes * kUnit) {
        const Raw<T, kUnit> x(from + c);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) total += f(x[i]);
      }
    } else if (mine < count) {
      for (int c = lane; c < p.channels; c += kLanes) total += f(to_float(from[c]));
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
    return total / static_cast<float>(p.channels);
  };
  const float mean = sum([](float x) { return x; });
  const float variance = sum([&](float x) { return (x - mean) * (x - mean); });
  if (lane == 0) moments[mine] = {mean, mine < count ? 1.0f / sqrtf(variance + p.call.epsilon) : 0.0f};
}

struct SlabShared {
  alignas(16) float rows[kPoolTokens][kSlab + 4];
  alignas(16) float weights[kSlab][kGroup + 8];
};

// Up to kPoolTokens rows of a matrix, a slab of channels after the other in shared memory as change(row, x).
// prepare(channel) stores the data of a slab, use(channel) takes it.
template <class T, class Change, class Prepare, class Use>
__device__ __forceinline__ void for_each_slab(SlabShared& shared, const LayerParams& p, const StridedTensor& matrix,
                                              int batch, int first, int count, const Change& change,
                                              const Prepare& prepare, const Use& use) {
  TileRows<T, kPoolTokens, kSlab> rows;
  rows.load(matrix, batch, first, count, 0, p.channels, p.vectors);
  for (int channel = 0; channel < p.channels; channel += kSlab) {
    rows.store_to(shared.rows, [&](int r, int, float x) { return change(r, x); });
    prepare(channel);
    __syncthreads();
    const int next = channel + kSlab;
    rows.load(matrix, batch, first, count, next, p.channels - next, p.vectors);
    use(channel);
    __syncthreads();
  }
}

// The rows times weight(channel, head), for up to kGroup heads.
using HeadProduct = Product<kPoolTokens, kGroup>;
template <class T, class Change, class Weight>
__device__ __forceinline__ void multiply_heads(HeadProduct& product, SlabShared& shared, const LayerParams& p,
                                               const StridedTensor& matrix, int batch, int first, int count, int heads,
                                               const Change& change, const Weight& weight) {
  product.clear();
  const auto prepare = [&](int channel) {
#pragma unroll
    for (int i = 0; i < kSlab * kGroup / kBlockThreads; ++i) {
      const int at = threadIdx.x + i * kBlockThreads, c = at / kGroup, head = at % kGroup;
      shared.weights[c][head] = channel + c < p.channels && head < heads ? weight(channel + c, head) : 0.0f;
    }
  };
  for_each_slab<T>(shared, p, matrix, batch, first, count, change, prepare, [&](int) {
    product.template add<true, true>(
        kSlab, [&](int r, int k) { return shared.rows[r][k]; }, [&](int k, int c) { return shared.weights[k][c]; });
  });
}

// Which heads the block has, and which of its launch's parts.
struct HeadGroup {
  int first, count;
  unsigned part;

  __device__ HeadGroup(const LayerParams& p, int size) {
    const unsigned groups = ceil_div(p.heads, size);
    first = blockIdx.x % groups * size;
    count = at_most(p.heads - first, size);
    part = blockIdx.x / groups;
  }
};

struct PoolShared {
  SlabShared slabs;
  float logits[kPoolTokens][kGroup + 1];  // then the weights
  float factors[kGroup];
  Moments moments[kPoolTokens];
};

// The chunk of a document that a block pools.
struct LayerChunk {
  int batch, begin, end;
  int64_t record;

  __device__ LayerChunk(const LayerParams& p, unsigned part) {
    const unsigned chunk = part % p.chunks;
    batch = part / p.chunks;
    begin = chunk * p.chunk;
    end = begin + at_most(static_cast<int>(length_of(p.call.sequence, batch)) - begin, p.chunk);
    record = (static_cast<int64_t>(batch) * p.chunks + chunk) * p.heads;
  }
};

// A weight of logits: of the first pooling alpha_weight, else beta_weight.
template <class T, bool kFirst>
__device__ __forceinline__ float logit_weight(const LayerParams& p, int batch, int channel, int head) {
  const int at = channel * p.heads + head;
  if constexpr (kFirst)
    return to_float(static_cast<const T*>(p.call.alpha_weight)[at]) *
           to_float(static_cast<const T*>(p.call.norm_weight)[channel]);
  else
    return p.beta_weight[static_cast<int64_t>(batch) * p.channels * p.heads + at];
}

// A chunk's sums of n for kGroup heads, weighted by the exponentials of logits. The first pooling finds the moments.
template <class T, bool kFirst>
__device__ __forceinline__ void pool_chunk(const LayerParams& p) {
  auto& shared = shared_memory<PoolShared>();
  const StridedSequence& s = p.call.sequence;
  const HeadGroup heads(p, kGroup);
  const LayerChunk chunk(p, heads.part);
  const int batch = chunk.batch, begin = chunk.begin, end = chunk.end;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t place = chunk.record + heads.first;
  const auto normalize = [&](int r, float x) { return shared.moments[r].normalize(x); };
  const auto weight = [&](int channel, int head) {
    return logit_weight<T, kFirst>(p, batch, channel, heads.first + head);
  };

  RunningSum running[kGroup / kBlockWarps];  // one warp a head; numerators are in the workspace
  for (RunningSum& sum : running) sum = RunningSum::empty();
  for (int t = begin; t == begin || t < end; t += kPoolTokens) {
    const int count = at_most(end - t, kPoolTokens);
    Moments* const known = p.moments + batch * s.tokens + t;
    if constexpr (kFirst)
      find_moments<T>(shared.moments, p, batch, t, count);
    else if (threadIdx.x < kPoolTokens)
      shared.moments[threadIdx.x] = static_cast<int>(threadIdx.x) < count ? known[threadIdx.x] : Moments{0.0f, 0.0f};
    __syncthreads();
    if (kFirst && heads.first == 0 && static_cast<int>(threadIdx.x) < count)
      known[threadIdx.x] = shared.moments[threadIdx.x];

    HeadProduct product;
    multiply_heads<T>(product, shared.slabs, p, s.query, batch, t, count, heads.count, normalize, weight);
    product.for_each([&](int r, int c, float& logit) { shared.logits[r][c] = logit; });
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kGroup / kBlockWarps; ++i) {
      const int head = warp + i * kBlockWarps;
      RunningSum& sum = running[i];
      const float before = sum.maximum;
      float logit[2], share = 0.0f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        logit[j] = shared.logits[lane + j * kWarp][head];
        if (lane + j * kWarp < count) sum.maximum = fmaxf(sum.maximum, logit[j]);
      }
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2)
        sum.maximum = fmaxf(sum.maximum, __shfl_xor_sync(~0u, sum.maximum, distance));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        logit[j] = lane + j * kWarp < count ? machine::fast_exp(logit[j] - sum.maximum) : 0.0f;
        shared.logits[lane + j * kWarp][head] = logit[j];
        share += logit[j];
      }
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) share += __shfl_xor_sync(~0u, share, distance);
      const float factor = machine::fast_exp(before - sum.maximum);
      sum.denominator = sum.denominator * factor + share;
      if (lane == 0) shared.factors[head] = factor;
    }
    for_each_slab<T>(
        shared.slabs, p, s.query, batch, t, count, normalize, [](int) {},
        [&](int channel) {
          Product<kGroup, kSlab> sums;
          sums.clear();
          sums.template add<sizeof(T) == 4, sizeof(T) == 4>(
              kPoolTokens, [&](int r, int k) { return shared.logits[k][r]; },
              [&](int k, int c) { return shared.slabs.rows[k][c]; });
          sums.for_each([&](int r, int c, float& sum) {
            if (r >= heads.count || channel + c >= p.channels) return;
            float& total = p.pool.chunks.sums[(place + r) * p.channels + channel + c];
            total = t == begin ? sum : total * shared.factors[r] + sum;
          });
        });
  }
#pragma unroll
  for (int i = 0; i < kGroup / kBlockWarps; ++i) {
    const int head = warp + i * kBlockWarps;
    if (lane != 0 || head >= heads.count) continue;
    p.pool.chunks.maxima[place + head] = running[i].maximum;
    p.pool.chunks.denominators[place + head] = running[i].denominator;
  }
}

// Rows that are normalized where they are read. The first pooling finds their moments in the tile.
template <bool kFirst>
struct NormalizedRows {
  static constexpr bool kChanges = true;
  struct Row {
    Moments moments;
    __device__ __forceinline__ float operator()(float x) const { return moments.normalize(x); }
  };

  Moments* moments;  // in shared memory, of the tile
  Moments* known;    // in the workspace, of the document
  int channels;
  float epsilon;
  bool keeps;  // writes known

  __device__ __forceinline__ Row operator[](int r) const { return {moments[r]}; }

  template <class T, int kTokens, int kStride>
  __device__ __forceinline__ void prepare(const T (&rows)[kTokens][kStride], int first, int count) const {
    constexpr int kLanes = kBlockThreads / kTokens;
    const int mine = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    if constexpr (kFirst) {
      const auto average = [&](const auto& f) {
        float total = 0.0f;
#pragma unroll 4
        for (int c = lane * kVector<T>; c < channels; c += kLanes * kVector<T>) {
          const Raw<T, kVector<T>> x(&rows[mine][c]);
#pragma unroll
          for (int i = 0; i < kVector<T>; ++i) total += f(x[i]);
        }
#pragma unroll
        for (int distance = 1; distance < kLanes; distance *= 2) total += __shfl_xor_sync(~0u, total, distance);
        return total / static_cast<float>(channels);
      };
      const float mean = average([](float x) { return x; });
      const float variance = average([&](float x) { return (x - mean) * (x - mean); });
      if (lane != 0) return;
      moments[mine] = {mean, mine < count ? 1.0f / sqrtf(variance + epsilon) : 0.0f};
      if (keeps && mine < count) known[first + mine] = moments[mine];
    } else {
      if (lane == 0) moments[mine] = mine < count ? known[first + mine] : Moments{0.0f, 0.0f};
    }
  }
};

template <class T, int kTokens>
struct LayerTileShared {
  PoolTileShared<T, kTokens> tile;
  alignas(16) Moments moments[kTokens];
};

// A chunk's sums of n for kTileHeads heads, of rows that are read once.
template <class T, int kTokens, bool kFirst>
__device__ __forceinline__ void pool_tiles(const LayerParams& p) {
  auto& shared = shared_memory<LayerTileShared<T, kTokens>>();
  const StridedSequence& s = p.call.sequence;
  const HeadGroup heads(p, kTileHeads);
  const LayerChunk chunk(p, heads.part);
  const NormalizedRows<kFirst> rows{shared.moments, p.moments + chunk.batch * s.tokens, p.channels, p.call.epsilon,
                                    heads.first == 0};
  PoolTile<T, kTokens, NormalizedRows<kFirst>> tile(
      shared.tile, s.query, chunk.batch, p.channels, rows, [&](int channel, int head) {
        return head < heads.count ? logit_weight<T, kFirst>(p, chunk.batch, channel, heads.first + head) : 0.0f;
      });
  tile.pool(chunk.begin, chunk.end, 1.0f);

  const int64_t place = chunk.record + heads.first;
  tile.for_each_sum([&](int channel, int head, float sum) {
    if (head < heads.count) p.pool.chunks.sums[(place + head) * p.channels + channel] = sum;
  });
  if (tile.lane != 0 || tile.warp >= heads.count) return;
  p.pool.chunks.maxima[place + tile.warp] = tile.maximum;
  p.pool.chunks.denominators[place + tile.warp] = tile.denominator;
}

}  // namespace aft::cuda
