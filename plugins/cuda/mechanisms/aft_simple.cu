// AFT-simple (Zhai et al., arXiv 2105.14103, equation 5).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c]) V[u,c] / sum_u exp(K[u,c])        causal: u <= t
// Cost:     bound by memory: about 12 operations per token and channel for four elements moved. Floor: 4BTD elements,
//           q, k and v read once and y written once; 8BTD bytes in 16 bits. Not causal, this is met up to the partial
//           sums (1 % and less). Causal, it is met while the batch and the channels fill the device by themselves;
//           otherwise the tokens are cut too and k and v read twice, 6BTD elements.
// Method:   a thread takes one vector of 16 bytes of channels (one element where rows are not aligned to that) down
//           kInFlight tokens at a time, all their loads issued before the arithmetic. A block is kRows such threads
//           high, side by side as many as read whole 128-byte lines, and runs down one chunk of tokens. (maximum,
//           numerator, denominator) is an associative triple per channel: rows are merged within the block, chunks
//           through the workspace by every block that needs them, which costs less than a launch of its own.
//           Not causal: one launch if there is one chunk; otherwise one that sums chunks and one that gates.
//           Causal: one that sums chunks (if more than one), and one that starts from the chunks before and scans its
//           own tile by tile: each thread sums its kInFlight consecutive tokens, the rows are scanned, and the thread
//           goes over the tokens again, still in registers, with the sums before them.
// Numerics: sums are relative to the largest key of the tokens that they hold.
// See:      shared/running_softmax.cuh, shared/gate.cuh

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "kernels.h"
#include "mechanisms/shared/gate.cuh"
#include "mechanisms/shared/running_softmax.cuh"

namespace aft::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kInFlight = 4;
constexpr int kChunk = 256;  // the fewest tokens of a chunk

// Blocks wanted at most: several for each multiprocessor of a large device, or, where more chunks mean more
// traffic, just two.
constexpr int64_t kBlocks = 1024, kCausalBlocks = 256;

struct Params {
  AftCudaAftSimple call;
  int64_t chunk;  // tokens
  int chunks;
  int groups;        // of channels, one a block
  RunningSum* sums;  // [batch, chunks, channels]
};

// How a block lies over tokens and channels: `kColumns` threads side by side with N channels each.
template <class T, int N>
struct Tile {
  static constexpr int kColumns = N == 1 ? 32 : 8;
  static constexpr int kRows = kThreads / kColumns;
  static constexpr int kRowsPerWarp = kWarp / kColumns;
  static constexpr int kChannels = kColumns * N;

  struct Shared {
    RunningSum sums[kWarps][kChannels];
    RunningSum before[kChannels];  // causal: of all tokens above the tile
  };

  int column = threadIdx.x % kColumns, row = threadIdx.x / kColumns, warp = threadIdx.x / kWarp;
  int64_t batch, begin, end, channel;
  int chunk;
  bool active;  // has channels

  __device__ explicit Tile(const Params& p) {
    const AftCudaSequence& s = p.call.sequence;
    chunk = blockIdx.x / p.groups % p.chunks;
    batch = blockIdx.x / p.groups / p.chunks;
    begin = chunk * p.chunk;
    end = begin + p.chunk < s.tokens ? begin + p.chunk : s.tokens;
    channel = blockIdx.x % p.groups * kChannels + column * N;
    active = channel < s.channels;
  }
};

// Adds key and value of up to kInFlight tokens, `step` apart; those from `end` on do not count.
template <class T, int N>
__device__ __forceinline__ void add_tokens(RunningSum (&sums)[N], const Raw<T, N> (&key)[kInFlight],
                                           const Raw<T, N> (&value)[kInFlight], int count) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    float maximum = sums[c].maximum;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (i < count) maximum = fmaxf(maximum, key[i][c]);
    const float rescale = machine::fast_exp(sums[c].maximum - maximum);
    float numerator = sums[c].numerator * rescale, denominator = sums[c].denominator * rescale;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (i < count) {
        const float weight = machine::fast_exp(key[i][c] - maximum);
        numerator += weight * value[i][c];
        denominator += weight;
      }
    sums[c] = {maximum, numerator, denominator};
  }
}

template <class T, int N>
__device__ __forceinline__ void load_tokens(Raw<T, N> (&raw)[kInFlight], const AftCudaTensor& tensor,
                                            const Tile<T, N>& tile, int64_t first, int64_t step, int count) {
#pragma unroll
  for (int i = 0; i < kInFlight; ++i)
    if (i < count) raw[i] = Raw<T, N>(row<T>(tensor, tile.batch, first + i * step) + tile.channel);
}

// How many of kInFlight tokens first, first + step, ... lie before `end`.
__device__ __forceinline__ int count_before(int64_t end, int64_t first, int64_t step) {
  if (first >= end) return 0;
  const int64_t count = ceil_div(end - first, step);
  return count < kInFlight ? static_cast<int>(count) : kInFlight;
}

// Every thread ends with the sum over all rows of its column.
template <class T, int N>
__device__ __forceinline__ void merge_rows(RunningSum (&sums)[N], const Tile<T, N>& tile) {
  auto& shared = shared_memory<typename Tile<T, N>::Shared>();
#pragma unroll
  for (int c = 0; c < N; ++c)
#pragma unroll
    for (int distance = Tile<T, N>::kColumns; distance < kWarp; distance *= 2)
      sums[c].merge(shuffle_xor(sums[c], distance));
  if (tile.row % Tile<T, N>::kRowsPerWarp == 0)
#pragma unroll
    for (int c = 0; c < N; ++c) shared.sums[tile.warp][tile.column * N + c] = sums[c];
  __syncthreads();
#pragma unroll
  for (int c = 0; c < N; ++c) {
    sums[c] = shared.sums[0][tile.column * N + c];
    for (int warp = 1; warp < kWarps; ++warp) sums[c].merge(shared.sums[warp][tile.column * N + c]);
  }
  __syncthreads();
}

template <int N>
__device__ __forceinline__ void clear(RunningSum (&sums)[N]) {
#pragma unroll
  for (int c = 0; c < N; ++c) sums[c] = RunningSum::empty();
}

// The sums over the block's chunk.
template <class T, int N>
__device__ __forceinline__ void sum_chunk(RunningSum (&sums)[N], const Params& p, const Tile<T, N>& tile) {
  constexpr int kStep = Tile<T, N>::kRows;
  const AftCudaSequence& s = p.call.sequence;
  const int64_t length = length_of(s, tile.batch), end = tile.end < length ? tile.end : length;
  clear(sums);
  if (tile.active)
    for (int64_t t = tile.begin + tile.row; t < end; t += kInFlight * kStep) {
      const int count = count_before(end, t, kStep);
      Raw<T, N> key[kInFlight], value[kInFlight];
      load_tokens(key, s.key, tile, t, kStep, count);
      load_tokens(value, s.value, tile, t, kStep, count);
      add_tokens(sums, key, value, count);
    }
  merge_rows(sums, tile);
}

// The sums over chunks [0, count) from the workspace.
template <class T, int N>
__device__ __forceinline__ void sum_chunks(RunningSum (&sums)[N], const Params& p, const Tile<T, N>& tile, int count) {
  clear(sums);
  if (tile.active)
    for (int chunk = tile.row; chunk < count; chunk += Tile<T, N>::kRows) {
      const RunningSum* partial = p.sums + (tile.batch * p.chunks + chunk) * p.call.sequence.channels + tile.channel;
#pragma unroll
      for (int c = 0; c < N; ++c) sums[c].merge(partial[c]);
    }
  merge_rows(sums, tile);
}

template <class T, int N>
__device__ __forceinline__ T* output_row(const AftCudaSequence& s, const Tile<T, N>& tile, int64_t t) {
  return static_cast<T*>(s.output) + (tile.batch * s.tokens + t) * s.channels + tile.channel;
}

template <class T, int N>
__device__ __forceinline__ void gate_chunk(const RunningSum (&sums)[N], const Params& p, const Tile<T, N>& tile) {
  constexpr int kStep = Tile<T, N>::kRows;
  const AftCudaSequence& s = p.call.sequence;
  if (!tile.active) return;
  float context[N];
#pragma unroll
  for (int c = 0; c < N; ++c) context[c] = sums[c].mean();
  for (int64_t t = tile.begin + tile.row; t < tile.end; t += kInFlight * kStep) {
    const int count = count_before(tile.end, t, kStep);
    Raw<T, N> query[kInFlight];
    load_tokens(query, s.query, tile, t, kStep, count);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (i < count) {
        float y[N];
#pragma unroll
        for (int c = 0; c < N; ++c) y[c] = gated(p.call.gate, query[i][c], context[c]);
        store(output_row(s, tile, t + i * kStep), y);
      }
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 2) sum_kernel(const Params p) {
  const Tile<T, N> tile(p);
  RunningSum sums[N];
  sum_chunk(sums, p, tile);
  if (tile.row != 0 || !tile.active) return;
  RunningSum* partial = p.sums + (tile.batch * p.chunks + tile.chunk) * p.call.sequence.channels + tile.channel;
#pragma unroll
  for (int c = 0; c < N; ++c) partial[c] = sums[c];
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 3) gate_kernel(const Params p) {
  const Tile<T, N> tile(p);
  RunningSum sums[N];
  sum_chunks(sums, p, tile, p.chunks);
  gate_chunk(sums, p, tile);
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 2) single_chunk_kernel(const Params p) {
  const Tile<T, N> tile(p);
  RunningSum sums[N];
  sum_chunk(sums, p, tile);
  gate_chunk(sums, p, tile);
}

// From each row's own sums to those of shared.before and all rows above.
template <class T, int N>
__device__ __forceinline__ void scan_rows(RunningSum (&sums)[N], const Tile<T, N>& tile) {
  using Layout = Tile<T, N>;
  auto& shared = shared_memory<typename Layout::Shared>();
  const int row_in_warp = tile.row % Layout::kRowsPerWarp;
#pragma unroll
  for (int c = 0; c < N; ++c) {
#pragma unroll
    for (int distance = 1; distance < Layout::kRowsPerWarp; distance *= 2) {
      const RunningSum above = shuffle_up(sums[c], distance * Layout::kColumns);
      if (row_in_warp >= distance) sums[c].merge(above);
    }
    if (row_in_warp == Layout::kRowsPerWarp - 1) shared.sums[tile.warp][tile.column * N + c] = sums[c];
    if constexpr (Layout::kRowsPerWarp > 1) sums[c] = shuffle_up(sums[c], Layout::kColumns);
    if (row_in_warp == 0) sums[c] = RunningSum::empty();
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < N; ++c) {
    sums[c].merge(shared.before[tile.column * N + c]);
    for (int warp = 0; warp < tile.warp; ++warp) sums[c].merge(shared.sums[warp][tile.column * N + c]);
  }
  __syncthreads();
}

// The `before` of the next tile, or of the first: one row knows it.
template <class T, int N>
__device__ __forceinline__ void keep_before(const RunningSum (&sums)[N], const Tile<T, N>& tile, int row) {
  auto& shared = shared_memory<typename Tile<T, N>::Shared>();
  if (tile.row == row)
#pragma unroll
    for (int c = 0; c < N; ++c) shared.before[tile.column * N + c] = sums[c];
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 2) causal_kernel(const Params p) {
  using Layout = Tile<T, N>;
  const Layout tile(p);
  const AftCudaSequence& s = p.call.sequence;
  const int64_t length = length_of(s, tile.batch);
  RunningSum sums[N];
  sum_chunks(sums, p, tile, tile.chunk);
  keep_before(sums, tile, 0);
  for (int64_t first = tile.begin; first < tile.end; first += Layout::kRows * kInFlight) {
    const int64_t t = first + tile.row * kInFlight;
    const int rows = tile.active ? count_before(tile.end, t, 1) : 0;
    const int counted = tile.active ? count_before(tile.end < length ? tile.end : length, t, 1) : 0;
    Raw<T, N> query[kInFlight], key[kInFlight], value[kInFlight];
    load_tokens(key, s.key, tile, t, 1, counted);
    load_tokens(value, s.value, tile, t, 1, counted);
    load_tokens(query, s.query, tile, t, 1, rows);
    clear(sums);
    add_tokens(sums, key, value, counted);
    scan_rows(sums, tile);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (i < rows) {
        float y[N];
#pragma unroll
        for (int c = 0; c < N; ++c) {
          if (i < counted) sums[c].add(key[i][c], value[i][c]);
          y[c] = gated(p.call.gate, query[i][c], sums[c].mean());
        }
        store(output_row(s, tile, t + i), y);
      }
    keep_before(sums, tile, Layout::kRows - 1);
  }
}

template <class T, int N>
int run(const AftCudaAftSimple& call, void* workspace, cudaStream_t stream) {
  using Shared = typename Tile<T, N>::Shared;
  const AftCudaSequence& s = call.sequence;
  const int64_t groups = ceil_div<int64_t>(s.channels, Tile<T, N>::kChannels);
  const int64_t wanted = ceil_div(s.causal ? kCausalBlocks : kBlocks, groups * s.batch);
  const int64_t most = ceil_div<int64_t>(s.tokens, kChunk);
  const int64_t chunk = round_up<int64_t>(ceil_div(s.tokens, wanted < most ? wanted : most), kChunk);
  const int64_t chunks = ceil_div(s.tokens, chunk);
  const Params params{call, chunk, static_cast<int>(chunks), static_cast<int>(groups),
                      static_cast<RunningSum*>(workspace)};
  const dim3 grid(static_cast<unsigned>(groups * chunks * s.batch));
  if (chunks == 1)
    return launch<Shared>(s.causal ? causal_kernel<T, N> : single_chunk_kernel<T, N>, grid, kThreads, stream, params);
  if (const int status = launch<Shared>(sum_kernel<T, N>, grid, kThreads, stream, params)) return status;
  return launch<Shared>(s.causal ? causal_kernel<T, N> : gate_kernel<T, N>, grid, kThreads, stream, params);
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_aft_simple_workspace(const AftCudaAftSimple* call) {
  using namespace aft::cuda;
  const AftCudaSequence& s = call->sequence;
  return sizeof(RunningSum) * s.batch * ceil_div<int64_t>(s.tokens, kChunk) * s.channels;
}

int aft_cuda_aft_simple(const AftCudaAftSimple* call, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (call->sequence.batch * call->sequence.tokens * call->sequence.channels == 0) return 0;
  return with_element(call->sequence.element, [&](auto element) {
    using T = decltype(element);
    const bool vectors = call->sequence.channels % kVector<T> == 0 && all_aligned<T>(call->sequence);
    return vectors ? run<T, kVector<T>>(*call, workspace, stream) : run<T, 1>(*call, workspace, stream);
  });
}
