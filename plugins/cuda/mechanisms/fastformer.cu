// Fastformer (Wu et al., arXiv 2108.09084), h heads of width d.
//
// Computes: g_q = mean of Q by softmax_T(Q Wa / sqrt(d)),  P = K * g_q,
//           g_k = mean of P by softmax_T(P Wb / sqrt(d)),  Y = V * g_k                  causal: means up to the token
// Cost:     floor: 4BTD elements moved and 4BTDh FLOPs for the logits, which read whole rows; with 16 heads or fewer
//           bound by memory. Taken: 6BTD of which 4 from memory, since a chunk of 64 tokens is read for its logits and
//           again, from the caches, for its sums; every 16 heads more read the rows once more. Causal 10BTD, 7 from
//           memory: the running mean of queries is computed again wherever it is needed rather than kept.
// Method:   five launches: pool, merge, pool, merge, output. In the second pooling P is only formed where it is needed:
//           g_q is a factor of its weight's rows, and of the pooled keys. Causal, g_q differs from token to token, P is
//           formed in registers, and one more launch for each pooling turns logits into shares.
// Numerics: weights are relative to the largest logit of their head.
// Rejected: a dot product for each token and head, a warp a token, reads Wa from the cache for every token, which
// bounds
//           it by that from 4 heads on; tensor cores take the tile's logits for 16 heads at once. Rows kept in shared
//           memory between logits and sums would spare the second read and allow only one block a multiprocessor.
// See:      shared/head_softmax_pool.cuh

#include "mechanisms/shared/head_context.cuh"
#include "mechanisms/shared/head_softmax_pool.cuh"
#include "mechanisms/shared/pool_merge.cuh"

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
__device__ __forceinline__ void load_pooled(PieceOfFloats& x, const PoolParams& p, const AftCudaTensor& tensor,
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
__global__ void __launch_bounds__(kThreads, 2) pool_kernel(const PoolParams p, const AftCudaTensor tensor,
                                                           const void* weight, const float* factor, const Pool pool) {
  auto& shared = shared_memory<PoolShared>();
  const AftCudaSequence& s = p.sequence;
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

  // The rows again, from the caches.
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

__global__ void __launch_bounds__(kMergeThreads, 4) group_kernel(const PoolParams p, const Pool pool) {
  merge_group(p, pool);
}

__global__ void __launch_bounds__(kMergeThreads, 4)
    merge_kernel(const PoolParams p, const PoolRecords records, int count, float* means, const float* factor) {
  merge_all(p, records, count, means, factor);
}

__global__ void __launch_bounds__(kMergeThreads, 4) scan_kernel(const PoolParams p, const Pool pool) {
  scan_group(p, pool);
}

__global__ void __launch_bounds__(kThreads, 4) share_kernel(const PoolParams p, const Pool pool) {
  share_logits(p, pool);
}

template <class T>
__device__ __forceinline__ void write_piece(const PoolParams& p, const PoolPlace& place, int channel,
                                            const PieceOfFloats& y) {
  const AftCudaSequence& s = p.sequence;
#pragma unroll
  for (int i = 0; i < kPieceTokens; ++i) {
    if (place.token + i >= place.rows || channel >= s.channels) continue;
    T* to = static_cast<T*>(s.output) + (place.batch * s.tokens + place.first + place.token + i) * s.channels + channel;
    if (p.vectors) {
      store(to, y[i]);
    } else {
#pragma unroll
      for (int c = 0; c < kPiece; ++c)
        if (channel + c < s.channels) store(to + c, {y[i][c]});
    }
  }
}

// A slab of a chunk: value times the pooled product, of everything or up to each token.
template <class T, bool kCausal>
__global__ void __launch_bounds__(kThreads, 2) output_kernel(const PoolParams p) {
  const AftCudaSequence& s = p.sequence;
  const unsigned slabs = static_cast<unsigned>(ceil_div<int64_t>(s.channels, kSlab));
  const PoolPlace place(p, blockIdx.x / slabs);
  const int channel = static_cast<int>(blockIdx.x % slabs) * kSlab + place.column;
  PieceOfFloats value, pooled;
  load_piece<T>(value, p, s.value, place, channel);
  if constexpr (kCausal) {
    auto& shared = shared_memory<ScanShared>();
    load_pooled<T, true>(pooled, p, s.query, place, channel, shared);
    scan_means(pooled, p, p.product, place, channel, shared);
  }
#pragma unroll
  for (int i = 0; i < kPieceTokens; ++i)
#pragma unroll
    for (int c = 0; c < kPiece; ++c) {
      if constexpr (kCausal)
        value[i][c] *= pooled[i][c];
      else
        value[i][c] *= channel + c < s.channels ? p.product.means[place.batch * s.channels + channel + c] : 0.0f;
    }
  write_piece<T>(p, place, channel, value);
}

// The floats of one pooling, and its parts in memory that begins at `memory`.
int64_t lay_out(const AftCudaSequence& s, int64_t heads, float* memory, Pool& pool) {
  const int64_t chunks = s.batch * ceil_div<int64_t>(s.tokens, kPoolTokens);
  int64_t floats = 0;
  const auto take = [&](float*& part, int64_t count) {
    part = memory + floats;
    floats += round_up<int64_t>(count, 4);
  };
  const auto take_records = [&](PoolRecords& records, int64_t count) {
    take(records.sums, count * s.channels);
    take(records.denominators, count * heads);
    take(records.maxima, count * heads);
  };
  take_records(pool.chunks, chunks);
  const int groups = merge_groups(static_cast<int>(ceil_div<int64_t>(s.tokens, kPoolTokens)));
  take_records(pool.groups, groups > 1 ? s.batch * groups : 0);
  pool.before.sums = pool.chunks.sums;
  take(pool.before.denominators, s.causal ? chunks * heads : 0);
  take(pool.before.maxima, s.causal ? chunks * heads : 0);
  take(pool.means, s.batch * s.channels);
  take(pool.logits, s.causal ? s.batch * s.tokens * heads : 0);
  return floats;
}

template <class T>
int run(const AftCudaFastformer& call, void* workspace, cudaStream_t stream) {
  const AftCudaSequence& s = call.sequence;
  const int heads = static_cast<int>(call.heads);
  PoolParams p{s,
               heads,
               static_cast<int>(s.channels / heads),
               static_cast<int>(ceil_div<int64_t>(s.tokens, kPoolTokens)),
               all_aligned<T>(s),
               {},
               {}};
  float* memory = static_cast<float*>(workspace);
  memory += lay_out(s, heads, memory, p.query);
  lay_out(s, heads, memory, p.product);

  const int64_t chunks = s.batch * p.chunks;
  const dim3 pool_grid(static_cast<unsigned>(chunks * ceil_div(heads, kGroup)));
  const int groups = merge_groups(p.chunks);
  const int64_t merges = ceil_div<int64_t>(s.batch * s.channels, kMergeWarps);
  const dim3 merge_grid(static_cast<unsigned>(merges)), group_grid(static_cast<unsigned>(merges * groups));
  const dim3 share_grid(static_cast<unsigned>(ceil_div<int64_t>(chunks * heads, kThreads / kWarp)));
  const dim3 output_grid(static_cast<unsigned>(chunks * ceil_div<int64_t>(s.channels, kSlab)));
  const auto pool = [&](auto kernel, const AftCudaTensor& tensor, const void* weight, const float* factor,
                        const Pool& to) {
    if (const int status = launch<PoolShared>(kernel, pool_grid, kThreads, stream, p, tensor, weight, factor, to))
      return status;
    int status = groups > 1 ? launch(group_kernel, group_grid, kMergeThreads, stream, p, to) : 0;
    if (status) return status;
    if (!s.causal)
      return launch(merge_kernel, merge_grid, kMergeThreads, stream, p, groups > 1 ? to.groups : to.chunks,
                    groups > 1 ? groups : p.chunks, to.means, factor);
    status = launch(scan_kernel, group_grid, kMergeThreads, stream, p, to);
    return status ? status : launch(share_kernel, share_grid, kThreads, stream, p, to);
  };

  if (const int status = pool(pool_kernel<T, false>, s.query, call.alpha_weight, nullptr, p.query)) return status;
  if (s.causal) {
    if (const int status = pool(pool_kernel<T, true>, s.query, call.beta_weight, nullptr, p.product)) return status;
    return launch<ScanShared>(output_kernel<T, true>, output_grid, kThreads, stream, p);
  }
  if (const int status = pool(pool_kernel<T, false>, s.key, call.beta_weight, p.query.means, p.product)) return status;
  return launch(output_kernel<T, false>, output_grid, kThreads, stream, p);
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_fastformer_workspace(const AftCudaFastformer* call) {
  using namespace aft::cuda;
  Pool pool;
  return 2 * sizeof(float) * lay_out(call->sequence, call->heads, nullptr, pool);
}

int aft_cuda_fastformer(const AftCudaFastformer* call, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (call->sequence.batch * call->sequence.tokens * call->sequence.channels == 0) return 0;
  return with_element(call->sequence.element,
                      [&](auto element) { return run<decltype(element)>(*call, workspace, stream); });
}
