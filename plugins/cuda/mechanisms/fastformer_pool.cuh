// Fastformer's pooling of rows that do not fit a tile, or are formed from running means: slabs of channels, whose rows
// are read for the logits and again for the sums.
#pragma once

#include "sums/head_context.cuh"
#include "sums/head_softmax_pool.cuh"

namespace aft::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads == kPoolThreads && kThreads == kBlockThreads, "");
constexpr int kGroup = 16;  // heads of a block

struct PoolShared {
  alignas(16) float slab[kPoolTokens][kSlab + 4];
  alignas(16) float weights[kSlab][kGroup + 8];
  float logits[kPoolTokens][kGroup + 1];  // then the weights
  ScanShared scan;
};

// The pooled rows: the tensor itself, or the product of the running mean of queries and the keys.
template <class T, bool kProduct>
__device__ __forceinline__ void load_pooled(PieceOfFloats& x, const PoolParams& p, const StridedTensor& tensor,
                                            const PoolPlace& place, int channel, ScanShared& shared) {
  load_piece<T>(x, p, tensor, place, channel);
  if constexpr (kProduct) {
    PieceOfFloats key;
    load_piece<T>(key, p, p.sequence.key, place, channel);
    scan_means(x, p, p.query, place, channel, shared);
#pragma unroll
    for (int i = 0; i < kPieceTokens; ++i)
#pragma unroll
      for (int c = 0; c < kPiece; ++c) x[i][c] *= key[i][c];
  }
}

// The logits of a chunk for kGroup heads, and its sums for their channels. `factor`, if any, multiplies the
// weight's channels.
template <class T, bool kProduct>
__global__ void __launch_bounds__(kThreads, 2) pool_kernel(const PoolParams p, const StridedTensor tensor,
                                                           const void* weight, const float* factor, const Pool pool) {
  auto& shared = shared_memory<PoolShared>();
  const StridedSequence& s = p.sequence;
  const int groups = ceil_div(p.heads, kGroup);
  const PoolPlace place(p, blockIdx.x / groups);
  const int first_head = blockIdx.x % groups * kGroup;
  const int heads = p.heads - first_head < kGroup ? p.heads - first_head : kGroup;
  const float scale = 1.0f / sqrtf(static_cast<float>(p.width));

  Product<kPoolTokens, kGroup> product;
  product.clear();
  for (int channel = 0; channel < s.channels; channel += kSlab) {
    PieceOfFloats x;
    load_pooled<T, kProduct>(x, p, tensor, place, channel + place.column, shared.scan);
#pragma unroll
    for (int i = 0; i < kPieceTokens; ++i) store(&shared.slab[place.token + i][place.column], x[i]);
#pragma unroll
    for (int i = 0; i < kSlab * kGroup / kThreads; ++i) {
      const int at = threadIdx.x + i * kThreads, c = at / kGroup, head = at % kGroup;
      float value = 0.0f;
      if (channel + c < s.channels && head < heads) {
        value = to_float(static_cast<const T*>(weight)[(channel + c) * p.heads + first_head + head]);
        if (factor) value *= factor[place.batch * s.channels + channel + c];
      }
      shared.weights[c][head] = value;
    }
    __syncthreads();
    product.template add<kProduct || sizeof(T) == 4, true>(
        kSlab, [&](int r, int k) { return shared.slab[r][k]; }, [&](int k, int c) { return shared.weights[k][c]; });
    __syncthreads();
  }
  product.for_each([&](int r, int c, float& sum) { shared.logits[r][c] = sum * scale; });
  __syncthreads();

  // One warp a head: logits to the workspace, weights in their place.
  const int lane = threadIdx.x % kWarp;
  for (int head = threadIdx.x / kWarp; head < heads; head += kBlockWarps) {
    float logit[2], maximum = kNoKey, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = lane + i * kWarp;
      logit[i] = shared.logits[t][head];
      if (t >= place.counted) continue;
      maximum = fmaxf(maximum, logit[i]);
      if (s.causal) pool.logits[(place.batch * s.tokens + place.first + t) * p.heads + first_head + head] = logit[i];
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = lane + i * kWarp;
      const float share = t < place.counted ? machine::fast_exp(logit[i] - maximum) : 0.0f;
      shared.logits[t][head] = share;
      sum += share;
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) {
      const int64_t at = (place.batch * p.chunks + place.chunk) * p.heads + first_head + head;
      pool.chunks.denominators[at] = sum;
      pool.chunks.maxima[at] = maximum;
    }
  }
  __syncthreads();

  // Read the rows a second time, now from the caches.
  const int begin = first_head * p.width, end = begin + heads * p.width;
  for (int channel = begin / kPiece * kPiece; channel < end; channel += kSlab) {
    PieceOfFloats x;
    load_pooled<T, kProduct>(x, p, tensor, place, channel + place.column, shared.scan);
#pragma unroll
    for (int c = 0; c < kPiece; ++c) {
      const int head = head_of(p, channel + place.column + c) - first_head;
      const int inside = head < 0 ? 0 : head < heads ? head : heads - 1;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieceTokens; ++i) sum += shared.logits[place.token + i][inside] * x[i][c];
      shared.slab[place.segment][place.column + c] = sum;
    }
    __syncthreads();
    const int mine = channel + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kSlab && mine >= begin && mine < end) {
      float sum = 0.0f;
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) sum += shared.slab[segment][threadIdx.x];
      pool.chunks.sums[(place.batch * p.chunks + place.chunk) * s.channels + mine] = sum;
    }
    __syncthreads();
  }
}

}  // namespace
}  // namespace aft::cuda
