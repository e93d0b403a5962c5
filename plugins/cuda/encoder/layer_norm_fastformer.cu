// LayerNormFastformer, the attention half of a Fastformer layer (Wu et al., arXiv 2108.09084), h heads of width d, not
// causal.
//
// Computes: N = layer_norm(X)
//           alpha = softmax_t(N A),               g_q = (sum_t alpha_t N_t) Wq + bq
//           beta  = softmax_t(N Wk diag(g_q) B),  g_k = g_q * ((sum_t beta_t N_t) Wk + bk)
//           Y = X + N Wq (I + diag(g_k) W) + (bq * g_k) W + bq + b
//           In g_q and g_k each head has its own columns of Wq and Wk.
// Cost:     floor: 4BTD elements moved, since X is read three times, each time with the result of the sweep before, and
//           2BTD^2 + 8BTDh + 2BD^3 FLOPs: from D = 512 or so bound by the product, below by memory. Taken: every 8
//           heads more read the rows of a pooling once more. Unaligned rows, and those of more than 512 channels, are
//           read again for every 16 heads, and a second time from the caches for their sums. The sums of such a chunk,
//           4Dh bytes, go to the caches after every 64 tokens. Each tile of the product reads its rows again, D / 128
//           times in 16 bits, from the second-level cache. Documents of fewer than D tokens are bound by F.
// Method:   queries and keys are not computed for every token: two sweeps pool the rows of X for g_q and g_k, and one
//           product with a matrix per document, F = Wq (I + diag(g_k) W), remains. Ten launches; those between the
//           poolings and the products have a few blocks each. The weight and bias of the norm go into the small
//           matrices, so that a row is only shifted and scaled where it is read:
//           N W = n diag(norm_weight) W + norm_bias W, n = (X - mean) / deviation.
// Rejected: normalized rows in memory spare the products the subtraction and take 4BTD elements more. The norm applied
//           to the product, n F = (X F - mean 1 F) / deviation, cancels where the mean is large. Logits apart from sums
//           read X from memory twice for each pooling. Wq and W in turn, 4BTD^2, would spare short documents F; this is
//           not done.
// See:      layer_norm_softmax_pool.cuh, device/tile_product.cuh

#include "device/tile_product.cuh"
#include "encoder/layer_norm_softmax_pool.cuh"
#include "sums/pool_merge.cuh"

namespace aft::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads == kBlockThreads, "");
constexpr int kMostChunks = 256;  // of a document
constexpr int kColumns = 32;      // of a block where a vector is multiplied
constexpr int kColumnShare = kThreads / kColumns;

__host__ __device__ StridedTensor weight_matrix(const void* weight, const LayerParams& p) {
  return {weight, 0, p.channels};
}

template <class T, bool kFirst>
__global__ void __launch_bounds__(kThreads, 2) pool_kernel(const LayerParams p) {
  pool_chunk<T, kFirst>(p);
}

template <class T, int kTokens, bool kFirst>
__global__ void __launch_bounds__(kThreads, 2) tile_pool_kernel(const LayerParams p) {
  pool_tiles<T, kTokens, kFirst>(p);
}

// Launches the kernel that fits the rows.
template <class T, bool kFirst>
int pool(const LayerParams& p, cudaStream_t stream) {
  const int64_t chunks = p.call.sequence.batch * p.chunks;
  const auto grid = [&](int heads) { return dim3(static_cast<unsigned>(chunks * ceil_div(p.heads, heads))); };
  const auto in_slabs = [&] { return launch<PoolShared>(pool_kernel<T, kFirst>, grid(kGroup), kThreads, stream, p); };
  const auto in_tiles = [&](auto tokens) {
    if constexpr (sizeof(T) == 2 && decltype(tokens)::value == 16)
      return in_slabs();  // more than 512 channels would take too many registers on sm_80
    else
      return launch<LayerTileShared<T, tokens>>(tile_pool_kernel<T, tokens, kFirst>, grid(kTileHeads), kThreads, stream,
                                                p);
  };
  return p.vectors ? with_tile<T>(p.channels, in_tiles, in_slabs) : in_slabs();
}

__global__ void __launch_bounds__(kMergeThreads, 4) merge_kernel(const PoolParams p) {
  merge_all(p, p.query.chunks, p.chunks, p.query.means, nullptr);
}

struct VectorShared {
  float partial[kColumnShare][kColumns];
};

// Channel `channel` of the product of a vector, value(k), and a matrix; to the first kColumns threads, which have a
// channel each.
template <class T, class Value>
__device__ __forceinline__ float multiply_vector(const void* matrix, int channels, int channel, const Value& value) {
  auto& partial = shared_memory<VectorShared>().partial;
  const int share = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  const T* const from = static_cast<const T*>(matrix) + channel;
  float sum = 0.0f;
  if (channel < channels)
#pragma unroll 8
    for (int k = share; k < channels; k += kColumnShare)
      sum += value(k) * to_float(from[static_cast<int64_t>(k) * channels]);
  partial[share][column] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumnShare; ++i) sum += partial[i][column];
  __syncthreads();
  return sum;
}

// The document and the channel of this thread in such products.
struct VectorPlace {
  int batch, channel;
  bool writes;

  __device__ explicit VectorPlace(const LayerParams& p) {
    const unsigned blocks = ceil_div(p.channels, kColumns);
    batch = blockIdx.x / blocks;
    channel = blockIdx.x % blocks * kColumns + threadIdx.x % kColumns;
    writes = threadIdx.x < kColumns && channel < p.channels;
  }
};

// g_q, or g_k, from the pooled rows.
template <class T, bool kFirst>
__global__ void __launch_bounds__(kThreads, 4) global_kernel(const LayerParams p) {
  const VectorPlace place(p);
  const void* const weight = kFirst ? p.call.query_weight : p.call.key_weight;
  const T* const norm_weight = static_cast<const T*>(p.call.norm_weight);
  const T* const norm_bias = static_cast<const T*>(p.call.norm_bias);
  const int head = at_most(place.channel, p.channels - 1) / (p.channels / p.heads);
  const float* const mean = p.pool.means + (static_cast<int64_t>(place.batch) * p.heads + head) * p.channels;
  float pooled = multiply_vector<T>(weight, p.channels, place.channel,
                                    [&](int k) { return mean[k] * to_float(norm_weight[k]) + to_float(norm_bias[k]); });
  const int64_t at = static_cast<int64_t>(place.batch) * p.channels + place.channel;
  const T* const bias = static_cast<const T*>(kFirst ? p.call.query_bias : p.call.key_bias);
  if (place.writes) {
    pooled += to_float(bias[place.channel]);
    if constexpr (kFirst)
      p.global_query[at] = pooled;
    else
      p.global_key[at] = p.global_query[at] * pooled;
  }
  if constexpr (kFirst) {
    const float offset =
        multiply_vector<T>(weight, p.channels, place.channel, [&](int k) { return to_float(norm_bias[k]); });
    if (place.writes) p.query_offset[at] = offset + to_float(bias[place.channel]);
  }
}

// The part that does not depend on the token: (norm_bias Wq + bq) (I + diag(g_k) W) + b.
template <class T>
__global__ void __launch_bounds__(kThreads, 4) bias_kernel(const LayerParams p) {
  const VectorPlace place(p);
  const int64_t document = static_cast<int64_t>(place.batch) * p.channels;
  const float *const offset = p.query_offset + document, *const global_key = p.global_key + document;
  const float sum =
      multiply_vector<T>(p.call.weight, p.channels, place.channel, [&](int k) { return offset[k] * global_key[k]; });
  if (place.writes)
    p.bias[document + place.channel] =
        sum + offset[place.channel] + to_float(static_cast<const T*>(p.call.bias)[place.channel]);
}

// diag(norm_weight) Wk diag(g_q) B, for kPoolTokens rows and kGroup heads.
template <class T>
__global__ void __launch_bounds__(kThreads, 2) beta_kernel(const LayerParams p) {
  auto& shared = shared_memory<SlabShared>();
  const HeadGroup heads(p, kGroup);
  const int blocks = ceil_div(p.channels, kPoolTokens), batch = heads.part / blocks;
  const int first = heads.part % blocks * kPoolTokens;
  const int64_t document = static_cast<int64_t>(batch) * p.channels;
  HeadProduct product;
  multiply_heads<T>(
      product, shared, p, weight_matrix(p.call.key_weight, p), 0, first, at_most(p.channels - first, kPoolTokens),
      heads.count, [](int, float x) { return x; },
      [&](int channel, int head) {
        return p.global_query[document + channel] *
               to_float(static_cast<const T*>(p.call.beta_weight)[channel * p.heads + heads.first + head]);
      });
  product.for_each([&](int r, int c, float& sum) {
    if (first + r >= p.channels || c >= heads.count) return;
    p.beta_weight[(document + first + r) * p.heads + heads.first + c] =
        sum * to_float(static_cast<const T*>(p.call.norm_weight)[first + r]);
  });
}

template <class T>
struct ProductShared {
  TileOperands<T> operands;
  Moments moments[kTileHeight];
};

// X + n F and the bias in the tile of a block; or, before that, `matrix`, where Wq is in the place of X.
template <class T, bool kFold>
__global__ void __launch_bounds__(kThreads, 2) product_kernel(const LayerParams p) {
  auto& shared = shared_memory<ProductShared<T>>();
  const StridedSequence& s = p.call.sequence;
  const int extent = kFold ? p.channels : static_cast<int>(s.tokens);
  const unsigned across = ceil_div(p.channels, kTileWidth<T>), down = ceil_div(extent, kTileHeight);
  TileSource tile;
  tile.batch = blockIdx.x / across / down;
  tile.first_row = blockIdx.x / across % down * kTileHeight;
  tile.first_column = blockIdx.x % across * kTileWidth<T>;
  tile.rows = at_most((kFold ? extent : static_cast<int>(length_of(s, tile.batch))) - tile.first_row, kTileHeight);
  tile.columns = p.channels - tile.first_column;
  tile.depth = tile.rows > 0 ? p.channels : 0;
  tile.vectors = p.vectors;
  T* const matrix = static_cast<T*>(p.matrix);
  const int64_t size = static_cast<int64_t>(p.channels) * p.channels;
  tile.left = kFold ? weight_matrix(p.call.query_weight, p) : s.query;
  tile.right = kFold ? weight_matrix(p.call.weight, p) : StridedTensor{matrix, size, p.channels};

  const float* const global_key = p.global_key + static_cast<int64_t>(tile.batch) * p.channels;
  const float* const bias = p.bias + static_cast<int64_t>(tile.batch) * p.channels;
  if (!kFold && threadIdx.x < kTileHeight)
    shared.moments[threadIdx.x] = static_cast<int>(threadIdx.x) < tile.rows
                                      ? p.moments[tile.batch * s.tokens + tile.first_row + threadIdx.x]
                                      : Moments{0.0f, 0.0f};
  __syncthreads();
  TileSums<T> sums;
  sums.clear();
  multiply_tile<T>(sums, tile, shared.operands, [&](int r, int k, float x) {
    if constexpr (kFold)
      return k < p.channels ? x * global_key[k] : 0.0f;
    else
      return shared.moments[r].normalize(x);
  });

  const int rows = at_most(extent - tile.first_row, kTileHeight);
  T* const output = kFold ? matrix + tile.batch * size : static_cast<T*>(s.output) + tile.batch * s.tokens * s.channels;
  const auto epilogue = [&](int r, int c, float x, float sum) {
    if constexpr (kFold)
      return (x + sum) * to_float(static_cast<const T*>(p.call.norm_weight)[tile.first_row + r]);
    else
      return x + sum + bias[c];
  };
  sums.for_each_pair([&](int r, int column, const float* pair) {
    const int c = tile.first_column + column;
    if (r >= rows || c >= p.channels) return;
    const T* const from = row<T>(tile.left, tile.batch, tile.first_row + r) + c;
    T* const to = output + static_cast<int64_t>(tile.first_row + r) * p.channels + c;
    if (p.vectors) {
      Raw<T, 2> x;
      x.words = {};
      if (r < tile.rows) x = Raw<T, 2>(from);
      store(to, {epilogue(r, c, x[0], pair[0]), epilogue(r, c + 1, x[1], pair[1])});
    } else {
      for (int i = 0; i < 2 && c + i < p.channels; ++i)
        store(to + i, {epilogue(r, c + i, r < tile.rows ? to_float(from[i]) : 0.0f, pair[i])});
    }
  });
}

// Lays the parts of the workspace out from `memory` on; returns their bytes.
size_t lay_out(const LayerNormFastformer& s, void* memory, LayerParams& p) {
  const int64_t tiles = ceil_div<int64_t>(s.tokens, kPoolTokens), vectors = s.batch * s.channels;
  const int64_t chunks = s.batch * (tiles < kMostChunks ? tiles : kMostChunks) * s.heads;
  size_t bytes = 0;
  const auto take = [&](auto*& part, int64_t count, size_t size) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(static_cast<char*>(memory) + bytes);
    bytes += round_up<size_t>(count * size, 16);
  };
  take(p.moments, s.batch * s.tokens, sizeof(Moments));
  take(p.pool.chunks.sums, chunks * s.channels, sizeof(float));
  take(p.pool.chunks.denominators, chunks, sizeof(float));
  take(p.pool.chunks.maxima, chunks, sizeof(float));
  take(p.pool.means, vectors * s.heads, sizeof(float));
  take(p.beta_weight, vectors * s.heads, sizeof(float));
  for (float** vector : {&p.query_offset, &p.global_query, &p.global_key, &p.bias})
    take(*vector, vectors, sizeof(float));
  take(p.matrix, vectors * s.channels, s.element == Element::kFloat32 ? 4 : 2);
  return bytes;
}

template <class T>
int run(const Strided<LayerNormFastformer>& call, void* workspace, cudaStream_t stream) {
  const StridedSequence& s = call.sequence;
  LayerParams p{};
  p.call = call;
  p.channels = static_cast<int>(s.channels);
  p.heads = static_cast<int>(call.heads);
  const int tiles = static_cast<int>(ceil_div<int64_t>(s.tokens, kPoolTokens));
  const int chunk_tiles = ceil_div(tiles, kMostChunks);
  p.chunk = chunk_tiles * kPoolTokens;
  p.chunks = ceil_div(tiles, chunk_tiles);
  p.vectors = rows_aligned<T>(s.query);
  for (const void* matrix : {call.query_weight, call.key_weight, call.weight, static_cast<const void*>(s.output)})
    p.vectors = p.vectors && rows_aligned<T>(weight_matrix(matrix, p));
  lay_out(call, workspace, p);
  StridedSequence sums = s;
  sums.channels = s.channels * call.heads;
  const PoolParams merged{sums, p.heads, p.channels, p.chunks, p.chunk, false, p.pool, {}};

  const auto grid = [](int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); };
  const int64_t batch = s.batch, channels = s.channels, groups = ceil_div(p.heads, kGroup);
  const dim3 merge_grid = grid(ceil_div<int64_t>(batch * sums.channels, kMergeWarps));
  const dim3 vector_grid = grid(batch * ceil_div<int64_t>(channels, kColumns));
  const dim3 beta_grid = grid(batch * ceil_div<int64_t>(channels, kPoolTokens) * groups);
  const auto product_grid = [&](int64_t rows) {
    return grid(batch * ceil_div<int64_t>(rows, kTileHeight) * ceil_div<int64_t>(channels, kTileWidth<T>));
  };

  int status = pool<T, true>(p, stream);
  if (!status) status = launch(merge_kernel, merge_grid, kMergeThreads, stream, merged);
  if (!status) status = launch<VectorShared>(global_kernel<T, true>, vector_grid, kThreads, stream, p);
  if (!status) status = launch<SlabShared>(beta_kernel<T>, beta_grid, kThreads, stream, p);
  if (!status) status = pool<T, false>(p, stream);
  if (!status) status = launch(merge_kernel, merge_grid, kMergeThreads, stream, merged);
  if (!status) status = launch<VectorShared>(global_kernel<T, false>, vector_grid, kThreads, stream, p);
  if (!status) status = launch<VectorShared>(bias_kernel<T>, vector_grid, kThreads, stream, p);
  if (!status) status = launch<ProductShared<T>>(product_kernel<T, true>, product_grid(channels), kThreads, stream, p);
  if (!status) status = launch<ProductShared<T>>(product_kernel<T, false>, product_grid(s.tokens), kThreads, stream, p);
  return status;
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_layer_norm_fastformer_workspace(const aft::cuda::LayerNormFastformer* params) {
  aft::cuda::LayerParams p;
  return aft::cuda::lay_out(*params, nullptr, p);
}

int aft_cuda_layer_norm_fastformer(const aft::cuda::LayerNormFastformer* params, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (params->causal) return 1;  // cudaErrorInvalidValue
  if (is_empty(*params)) return 0;
  const auto call = strided(*params);
  return with_element(params->element, [&](auto element) { return run<decltype(element)>(call, workspace, stream); });
}
