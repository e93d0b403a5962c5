// Fastformer (Wu et al., arXiv 2108.09084), h heads of width d.
//
// Computes: g_q = mean of Q by softmax_T(Q Wa / sqrt(d)),  P = K * g_q,
//           g_k = mean of P by softmax_T(P Wb / sqrt(d)),  Y = V * g_k                  causal: means up to the token
// Cost:     floor: 4BTD elements moved and 4BTDh FLOPs for the logits, which read whole rows; bound by memory. Taken:
//           4BTD, since a tile of rows stays in shared memory for logits and sums; every 8 heads more read the rows
//           once more, from the second-level cache. Rows that are unaligned, or of more than 768 channels (512 in
//           float32), are read for their logits and again, from the caches, for their sums. Causal 10BTD, 7 from
//           memory: the running mean of queries is computed again wherever it is needed rather than kept.
// Method:   five launches: pool, merge, pool, merge, output. In the second pooling P is only formed where it is needed:
//           g_q is a factor of its weight's rows, and of the pooled keys. Causal, g_q differs from token to token, P is
//           formed in registers, and one more launch for each pooling turns logits into shares. Merges of many chunks
//           take two launches.
// Numerics: weights are relative to the largest logit of their head.
// Rejected: a dot product for each token and head, a warp a token, reads Wa from the cache for every token, which
//           bounds it by that from 4 heads on; tensor cores take the tile's logits for 8 heads at once.
// See:      fastformer_pool.cuh, sums/pool_tile.cuh, sums/head_softmax_pool.cuh, sums/pool_merge.cuh

#include "mechanisms/fastformer_pool.cuh"
#include "sums/head_context.cuh"
#include "sums/head_softmax_pool.cuh"
#include "sums/pool_merge.cuh"
#include "sums/pool_tile.cuh"

namespace aft::cuda {
namespace {

constexpr int kMostBlocks = 512;  // of tile_kernel; a chunk is a record to merge

// The logits of a chunk for kTileHeads heads, and its sums for their channels, of rows that are read once. A chunk has
// tiles of kTokens tokens. `factor`, if any, multiplies the weight's channels.
template <class T, int kTokens>
__global__ void __launch_bounds__(kThreads, 2) tile_kernel(const PoolParams p, const StridedTensor tensor,
                                                           const void* weight, const float* factor, const Pool pool) {
  const StridedSequence& s = p.sequence;
  const int channels = static_cast<int>(s.channels), groups = ceil_div(p.heads, kTileHeads);
  const int first_head = blockIdx.x % groups * kTileHeads, part = blockIdx.x / groups;
  const int chunk = part % p.chunks, batch = part / p.chunks, begin = chunk * p.chunk;
  const int end = begin + at_most(static_cast<int>(length_of(s, batch)) - begin, p.chunk);
  const float* const factors = factor ? factor + static_cast<int64_t>(batch) * channels : nullptr;
  PoolTile<T, kTokens> tile(
      shared_memory<PoolTileShared<T, kTokens>>(), tensor, batch, channels, {}, [&](int channel, int head) {
        if (first_head + head >= p.heads) return 0.0f;
        const float x = to_float(static_cast<const T*>(weight)[channel * p.heads + first_head + head]);
        return factors ? x * factors[channel] : x;
      });
  tile.pool(begin, end, 1.0f / sqrtf(static_cast<float>(p.width)));

  const int64_t record = static_cast<int64_t>(batch) * p.chunks + chunk;
  tile.for_each_sum([&](int channel, int head, float sum) {
    const unsigned inside = channel - (first_head + head) * p.width;  // the head's channel, if it is one
    if (inside < static_cast<unsigned>(p.width)) pool.chunks.sums[record * channels + channel] = sum;
  });
  const int head = first_head + tile.warp;
  if (tile.lane != 0 || head >= p.heads) return;
  pool.chunks.maxima[record * p.heads + head] = tile.maximum;
  pool.chunks.denominators[record * p.heads + head] = tile.denominator;
}

__global__ void __launch_bounds__(kMergeThreads, 4) group_kernel(const PoolParams p, const Pool pool) {
  merge_group(p, pool);
}

__global__ void __launch_bounds__(kMergeThreads, 4)
    merge_kernel(const PoolParams p, const PoolRecords records, int count, float* means, const float* factor) {
  merge_all(p, records, count, means, factor);
}

__global__ void __launch_bounds__(kMergeThreads, 3) scan_kernel(const PoolParams p, const Pool pool) {
  scan_group(p, pool);
}

__global__ void __launch_bounds__(kThreads, 4) share_kernel(const PoolParams p, const Pool pool) {
  share_logits(p, pool);
}

template <class T>
__device__ __forceinline__ void write_piece(const PoolParams& p, const PoolPlace& place, int channel,
                                            const PieceOfFloats& y) {
  const StridedSequence& s = p.sequence;
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

// A slab of a chunk: value times the pooled product up to each token.
template <class T>
__global__ void __launch_bounds__(kThreads, 2) causal_output_kernel(const PoolParams p) {
  const StridedSequence& s = p.sequence;
  const unsigned slabs = static_cast<unsigned>(ceil_div<int64_t>(s.channels, kSlab));
  const PoolPlace place(p, blockIdx.x / slabs);
  const int channel = static_cast<int>(blockIdx.x % slabs) * kSlab + place.column;
  PieceOfFloats value, pooled;
  load_piece<T>(value, p, s.value, place, channel);
  auto& shared = shared_memory<ScanShared>();
  load_pooled<T, true>(pooled, p, s.query, place, channel, shared);
  scan_means(pooled, p, p.product, place, channel, shared);
#pragma unroll
  for (int i = 0; i < kPieceTokens; ++i)
#pragma unroll
    for (int c = 0; c < kPiece; ++c) value[i][c] *= pooled[i][c];
  write_piece<T>(p, place, channel, value);
}

// kSlab channels of some tokens of a block of output_kernel: value times the pooled product of all tokens.
template <int N>
struct OutputSizes {
  static constexpr int kRowsApart = kThreads * N / kSlab, kMine = 4, kTokens = kRowsApart * kMine;
};

// A thread has N channels of kMine tokens.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, 6) output_kernel(const PoolParams p) {
  using Sizes = OutputSizes<N>;
  const StridedSequence& s = p.sequence;
  const int channels = static_cast<int>(s.channels), tokens = static_cast<int>(s.tokens);
  const unsigned slabs = ceil_div(channels, kSlab), blocks = ceil_div(tokens, Sizes::kTokens);
  const int channel = blockIdx.x % slabs * kSlab + threadIdx.x % (kSlab / N) * N;
  const int64_t batch = blockIdx.x / slabs / blocks;
  const int first = blockIdx.x / slabs % blocks * Sizes::kTokens + threadIdx.x / (kSlab / N);
  if (channel >= channels) return;

  const int length = static_cast<int>(length_of(s, batch));
  Raw<T, N> value[Sizes::kMine];
#pragma unroll
  for (int i = 0; i < Sizes::kMine; ++i) {
    const int token = first + i * Sizes::kRowsApart;
    value[i].words = {};
    if (token < length) value[i] = Raw<T, N>(row<T>(s.value, batch, token) + channel);
  }
  float mean[N];
  constexpr int kAtOnce = N < 4 ? N : 4;
#pragma unroll
  for (int c = 0; c < N; c += kAtOnce) {
    const Raw<float, kAtOnce> part(p.product.means + batch * channels + channel + c);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) mean[c + k] = part[k];
  }
  T* const output = static_cast<T*>(s.output) + batch * tokens * channels + channel;
#pragma unroll
  for (int i = 0; i < Sizes::kMine; ++i) {
    const int token = first + i * Sizes::kRowsApart;
    if (token >= tokens) break;
    float y[N];
#pragma unroll
    for (int c = 0; c < N; ++c) y[c] = value[i][c] * mean[c];
    store(output + static_cast<int64_t>(token) * channels, y);
  }
}

// The floats of one pooling, and its parts in memory that begins at `memory`.
int64_t lay_out(const Sequence& s, int64_t heads, float* memory, Pool& pool) {
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

// Cuts documents into chunks of whole tiles for tile_kernel: some kMostBlocks blocks in all, no chunk shorter than
// those that the workspace has room for.
void cut_into_tiles(PoolParams& p, int tile) {
  const StridedSequence& s = p.sequence;
  const int64_t tiles = ceil_div<int64_t>(s.tokens, tile), documents = s.batch * ceil_div(p.heads, kTileHeads);
  const int64_t least = ceil_div(kPoolTokens, tile), wanted = ceil_div<int64_t>(tiles * documents, kMostBlocks);
  p.chunk = static_cast<int>(wanted < least ? least : wanted) * tile;
  p.chunks = static_cast<int>(ceil_div<int64_t>(s.tokens, p.chunk));
}

dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

// The launches of a call: its parameters, and the pools in the workspace.
template <class T>
struct Run {
  const Strided<Fastformer>& call;
  cudaStream_t stream;
  PoolParams p;
  const StridedSequence& s = call.sequence;

  Run(const Strided<Fastformer>& fastformer, void* workspace, cudaStream_t on) : call(fastformer), stream(on), p{} {
    p.sequence = s;
    p.heads = static_cast<int>(call.heads);
    p.width = static_cast<int>(s.channels / call.heads);
    p.chunk = kPoolTokens;
    p.chunks = static_cast<int>(ceil_div<int64_t>(s.tokens, kPoolTokens));
    p.vectors = all_aligned<T>(s);
    float* memory = static_cast<float*>(workspace);
    memory += lay_out(call, p.heads, memory, p.query);
    lay_out(call, p.heads, memory, p.product);
  }

  int64_t merges() const { return ceil_div<int64_t>(s.batch * s.channels, kMergeWarps); }
  int64_t slabs() const { return ceil_div<int64_t>(s.channels, kSlab); }

  int merge_groups_of_chunks(const Pool& to) const {
    const int groups = merge_groups(p.chunks);
    return groups > 1 ? launch(group_kernel, grid_of(merges() * groups), kMergeThreads, stream, p, to) : 0;
  }

  // Pools rows of any width and alignment, in chunks of kPoolTokens.
  template <bool kProduct>
  int pool_chunks(const StridedTensor& tensor, const void* weight, const float* factor, const Pool& to) const {
    const dim3 grid = grid_of(s.batch * p.chunks * ceil_div(p.heads, kGroup));
    const int status =
        launch<PoolShared>(pool_kernel<T, kProduct>, grid, kThreads, stream, p, tensor, weight, factor, to);
    return status ? status : merge_groups_of_chunks(to);
  }

  // Means of all tokens, times `factor` of the channel if there is one.
  int pool_all(const StridedTensor& tensor, const void* weight, const float* factor, const Pool& to) {
    const int groups = merge_groups(p.chunks);
    const PoolRecords* records = groups > 1 ? &to.groups : &to.chunks;
    int count = groups > 1 ? groups : p.chunks;
    PoolParams tiles = p;
    const auto in_chunks = [&] { return pool_chunks<false>(tensor, weight, factor, to); };
    const auto in_tiles = [&](auto tokens) {
      cut_into_tiles(tiles, tokens);
      records = &to.chunks;
      count = tiles.chunks;
      const dim3 grid = grid_of(s.batch * tiles.chunks * ceil_div(p.heads, kTileHeads));
      return launch<PoolTileShared<T, tokens>>(tile_kernel<T, tokens>, grid, kThreads, stream, tiles, tensor, weight,
                                               factor, to);
    };
    const int status = p.vectors ? with_tile<T>(s.channels, in_tiles, in_chunks) : in_chunks();
    if (status) return status;
    return launch(merge_kernel, grid_of(merges()), kMergeThreads, stream, tiles, *records, count, to.means, factor);
  }

  // Prepares the mean up to each token: the mean before its chunk, and the shares of the tokens in the chunk.
  template <bool kProduct>
  int pool_before(const void* weight, const Pool& to) const {
    int status = pool_chunks<kProduct>(s.query, weight, nullptr, to);
    if (status) return status;
    status = launch(scan_kernel, grid_of(merges() * merge_groups(p.chunks)), kMergeThreads, stream, p, to);
    if (status) return status;
    const int64_t warps = s.batch * p.chunks * p.heads;
    return launch(share_kernel, grid_of(ceil_div<int64_t>(warps, kThreads / kWarp)), kThreads, stream, p, to);
  }

  template <int N>
  int write() const {
    const int64_t blocks = s.batch * ceil_div<int64_t>(s.tokens, OutputSizes<N>::kTokens) * slabs();
    return launch(output_kernel<T, N>, grid_of(blocks), kThreads, stream, p);
  }

  int all() {
    if (const int status = pool_all(s.query, call.alpha_weight, nullptr, p.query)) return status;
    if (const int status = pool_all(s.key, call.beta_weight, p.query.means, p.product)) return status;
    return p.vectors ? write<kVector<T>>() : write<1>();
  }

  int causal() const {
    if (const int status = pool_before<false>(call.alpha_weight, p.query)) return status;
    if (const int status = pool_before<true>(call.beta_weight, p.product)) return status;
    return launch<ScanShared>(causal_output_kernel<T>, grid_of(s.batch * p.chunks * slabs()), kThreads, stream, p);
  }
};

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_fastformer_workspace(const aft::Fastformer* params) {
  using namespace aft::cuda;
  Pool pool;
  return 2 * sizeof(float) * lay_out(*params, params->heads, nullptr, pool);
}

int aft_cuda_fastformer(const aft::Fastformer* params, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (is_empty(*params)) return 0;
  const auto call = strided(*params);
  return with_element(call.element, [&](auto element) {
    Run<decltype(element)> run(call, workspace, stream);
    return call.causal ? run.causal() : run.all();
  });
}
