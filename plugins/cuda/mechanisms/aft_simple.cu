// AFT-simple (Zhai et al., arXiv 2105.14103, equation 5).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c]) V[u,c] / sum_u exp(K[u,c])        causal: u <= t
// Cost:     bound by memory: about 12 operations per token and channel for four elements moved. Floor: 4BTD elements,
//           q, k and v read once and y written once; 8BTD bytes in 16 bits. Not causal, this is met up to the partial
//           sums (1 % and less). Causal, it is met while the batch and the channels fill the device by themselves;
//           otherwise the tokens are cut too and k and v read twice, 6BTD elements.
// Method:   a thread takes one vector of 16 bytes of channels (one element where rows are not aligned to that) down
//           kInFlight tokens at a time, all their loads issued before the arithmetic. A block is kRows such threads
//           high, side by side as many as read whole 128-byte lines, and runs down one chunk of tokens. (reference,
//           numerator, denominator) is an associative triple per channel: rows are merged within the block, chunks
//           through the workspace by every block that needs them, which costs less than a launch of its own: there are
//           kBlocks chunks at most. All merges of a channel are one thread's or a tree of a few.
//           Not causal: one launch if there is one chunk; otherwise one that sums chunks and one that gates, whose
//           first queries are on their way while it merges chunks.
//           Causal: one that sums chunks (if more than one), and one that starts from the chunks before and scans its
//           own tile by tile: each thread sums its kInFlight consecutive tokens, the rows are scanned, and the thread
//           goes over the tokens again, still in registers, with the sums before them.
// Numerics: sums are relative to the largest key of the tokens that they hold.
// See:      sums/running_softmax.cuh, sums/gate.cuh

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "kernels.h"
#include "sums/gate.cuh"
#include "sums/running_softmax.cuh"

namespace aft::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kInFlight = 4;
constexpr int kChunk = 256;  // the fewest tokens of a chunk

// Blocks wanted at most: two for each multiprocessor of a large device, which keep enough loads under way. Every block
// reads the sums of all chunks of its channels, so that more chunks cost more than they bring.
constexpr int64_t kBlocks = 256;

// Sums in the workspace are moved as 16 bytes.
constexpr int kRecord = 4;

struct Params {
  Strided<AftSimple> call;
  int64_t chunk;  // tokens
  int chunks;
  int groups;      // of channels, one a block
  float* records;  // [batch, chunks, channels, kRecord]
};

// How a block lies over tokens and channels: `kColumns` threads side by side with N channels each.
template <class T, int N>
struct Tile {
  static constexpr int kColumns = N == 1 ? 32 : 8;
  static constexpr int kRows = kThreads / kColumns;
  static constexpr int kRowsPerWarp = kWarp / kColumns;
  static constexpr int kChannels = kColumns * N;
  static constexpr int kParts = kThreads / kChannels;  // threads a channel, where each has one

  struct Shared {
    BinarySum sums[2][kWarps][kChannels];  // in turn
    float means[kChannels];
  };

  int column = threadIdx.x % kColumns, row = threadIdx.x / kColumns, warp = threadIdx.x / kWarp;
  int64_t batch, begin, end, first_channel, channel;
  int chunk;
  bool active;  // has channels

  __device__ explicit Tile(const Params& p) {
    const StridedSequence& s = p.call.sequence;
    chunk = blockIdx.x / p.groups % p.chunks;
    batch = blockIdx.x / p.groups / p.chunks;
    begin = chunk * p.chunk;
    end = begin + p.chunk < s.tokens ? begin + p.chunk : s.tokens;
    // Both are computed in 32 bits: with a sum of 64 bits, nvcc cuts the causal kernel's stores of 16 bytes.
    first_channel = blockIdx.x % p.groups * kChannels;
    channel = blockIdx.x % p.groups * kChannels + column * N;
    active = channel < s.channels;
  }

  // The record of the tile's channel c and a chunk.
  __device__ __forceinline__ float* record(const Params& p, int of_chunk, int c) const {
    return p.records + ((batch * p.chunks + of_chunk) * p.call.sequence.channels + first_channel + c) * kRecord;
  }
};

// kInFlight tokens of a tensor, `step` apart.
template <class T, int N>
struct Tokens {
  Raw<T, N> raw[kInFlight];

  __device__ __forceinline__ void load(const T* first, int64_t step) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) raw[i] = Raw<T, N>(first + i * step);
  }

  // Loads only the first `count` tokens.
  __device__ __forceinline__ void load(const T* first, int64_t step, int count) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (i < count) raw[i] = Raw<T, N>(first + i * step);
  }

  // Loads the first `count` tokens, and puts `rest` in the place of the others.
  __device__ __forceinline__ void load(const T* first, int64_t step, int count, T rest) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (i < count) {
        raw[i] = Raw<T, N>(first + i * step);
      } else {
#pragma unroll
        for (int c = 0; c < N; ++c) raw[i].elements[c] = rest;
      }
  }
};

template <class T, int N>
__device__ __forceinline__ void add_tokens(BinarySum (&sums)[N], const Tokens<T, N>& key, const Tokens<T, N>& value) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    float largest = key.raw[0][c];
#pragma unroll
    for (int i = 1; i < kInFlight; ++i) largest = fmaxf(largest, key.raw[i][c]);
    sums[c].raise(largest);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) sums[c].add_below(key.raw[i][c], value.raw[i][c]);
  }
}

// How many of kInFlight tokens first, first + step, ... lie before `end`.
__device__ __forceinline__ int count_before(int64_t end, int64_t first, int64_t step) {
  if (first >= end) return 0;
  const int64_t count = ceil_div(end - first, step);
  return count < kInFlight ? static_cast<int>(count) : kInFlight;
}

template <int N>
__device__ __forceinline__ void clear(BinarySum (&sums)[N]) {
#pragma unroll
  for (int c = 0; c < N; ++c) sums[c] = BinarySum::empty();
}

// The sum of channel threadIdx.x over `count` parts in shared memory, for the tile's first kChannels threads.
template <int count, class Parts>
__device__ __forceinline__ BinarySum merge_parts(const Parts& parts, int channels) {
  __syncthreads();
  const int c = threadIdx.x;
  if (c >= channels) return BinarySum::empty();
  BinarySum sums[count];
#pragma unroll
  for (int i = 0; i < count; ++i) sums[i] = parts[i][c];
#pragma unroll
  for (int half = count / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i].merge(sums[i + half]);
  return sums[0];
}

// The sum of channel threadIdx.x over the block's chunk.
template <class T, int N>
__device__ __forceinline__ BinarySum sum_chunk(const Params& p, const Tile<T, N>& tile) {
  using Layout = Tile<T, N>;
  constexpr int kStep = Layout::kRows;
  auto& shared = shared_memory<typename Layout::Shared>();
  const StridedSequence& s = p.call.sequence;
  const int64_t length = length_of(s, tile.batch), end = tile.end < length ? tile.end : length;
  const int64_t key_step = kStep * s.key.token_stride, value_step = kStep * s.value.token_stride;
  BinarySum sums[N];
  clear(sums);
  if (tile.active) {
    Tokens<T, N> key, value;
    int64_t t = tile.begin + tile.row;
    const T* key_row = row<T>(s.key, tile.batch, t) + tile.channel;
    const T* value_row = row<T>(s.value, tile.batch, t) + tile.channel;
    for (; t + (kInFlight - 1) * kStep < end; t += kInFlight * kStep) {
      key.load(key_row, key_step);
      value.load(value_row, value_step);
      key_row += kInFlight * key_step;
      value_row += kInFlight * value_step;
      add_tokens(sums, key, value);
    }
    if (const int count = count_before(end, t, kStep)) {
      key.load(key_row, key_step, count, minus_infinity<T>());
      value.load(value_row, value_step, count, T{});
      add_tokens(sums, key, value);
    }
  }
#pragma unroll
  for (int c = 0; c < N; ++c)
#pragma unroll
    for (int distance = Layout::kColumns; distance < kWarp; distance *= 2)
      sums[c].merge(shuffle_xor(sums[c], distance));
  if (tile.row % Layout::kRowsPerWarp == 0)
#pragma unroll
    for (int c = 0; c < N; ++c) shared.sums[0][tile.warp][tile.column * N + c] = sums[c];
  return merge_parts<kWarps>(shared.sums[0], Layout::kChannels);
}

// The sum of channel threadIdx.x over chunks [0, count), whose records several threads share.
template <class T, int N>
__device__ __forceinline__ BinarySum sum_chunks(const Params& p, const Tile<T, N>& tile, int count) {
  using Layout = Tile<T, N>;
  auto& shared = shared_memory<typename Layout::Shared>();
  const int c = threadIdx.x % Layout::kChannels, part = threadIdx.x / Layout::kChannels;
  BinarySum sum = BinarySum::empty();
  if (tile.first_channel + c < p.call.sequence.channels)
#pragma unroll 4
    for (int chunk = part; chunk < count; chunk += Layout::kParts) {
      const Raw<float, kRecord> record(tile.record(p, chunk, c));
      sum.merge({record[0], record[1], record[2]});
    }
  shared.sums[0][part][c] = sum;
  return merge_parts<Layout::kParts>(shared.sums[0], Layout::kChannels);
}

template <class T, int N>
__device__ __forceinline__ T* output_row(const StridedSequence& s, const Tile<T, N>& tile, int64_t t) {
  return static_cast<T*>(s.output) + (tile.batch * s.tokens + t) * s.channels + tile.channel;
}

template <Gate gate, class T, int N>
__device__ __forceinline__ void store_gated(T* output, const Raw<T, N>& query, const float (&context)[N]) {
  float y[N];
#pragma unroll
  for (int c = 0; c < N; ++c) y[c] = gated<gate>(query[c], context[c]);
  store(output, y);
}

// Gates the block's chunk by the sums over all tokens, sum() of channel threadIdx.x, which the first queries come
// before. A query's registers take the next one before the output is stored.
template <Gate gate, class T, int N, class Sum>
__device__ __forceinline__ void gate_chunk(const Params& p, const Tile<T, N>& tile, const Sum& sum) {
  using Layout = Tile<T, N>;
  constexpr int kStep = Layout::kRows;
  auto& shared = shared_memory<typename Layout::Shared>();
  const StridedSequence& s = p.call.sequence;
  const int64_t query_step = kStep * s.query.token_stride, output_step = kStep * s.channels;
  int64_t t = tile.begin + tile.row;
  const T* query_row = row<T>(s.query, tile.batch, t) + tile.channel;
  T* output = output_row(s, tile, t);
  Tokens<T, N> query;
  query.load(query_row, query_step, tile.active ? count_before(tile.end, t, kStep) : 0);
  const BinarySum total = sum();
  if (threadIdx.x < Layout::kChannels) shared.means[threadIdx.x] = total.mean();
  __syncthreads();
  if (!tile.active) return;
  float context[N];
#pragma unroll
  for (int c = 0; c < N; ++c) context[c] = shared.means[tile.column * N + c];

  for (; t + (kInFlight - 1) * kStep < tile.end; t += kInFlight * kStep) {
    query_row += kInFlight * query_step;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const Raw<T, N> present = query.raw[i];
      if (t + (kInFlight + i) * kStep < tile.end) query.raw[i] = Raw<T, N>(query_row + i * query_step);
      store_gated<gate>(output + i * output_step, present, context);
    }
    output += kInFlight * output_step;
  }
#pragma unroll
  for (int i = 0; i < kInFlight; ++i)
    if (t + i * kStep < tile.end) store_gated<gate>(output + i * output_step, query.raw[i], context);
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 2) sum_kernel(const Params p) {
  const Tile<T, N> tile(p);
  const BinarySum sum = sum_chunk(p, tile);
  const int c = threadIdx.x;
  if (c < Tile<T, N>::kChannels && tile.first_channel + c < p.call.sequence.channels)
    store(tile.record(p, tile.chunk, c), {sum.reference, sum.numerator, sum.denominator, 0.0f});
}

template <class T, int N, Gate gate>
__global__ void __launch_bounds__(kThreads, 3) gate_kernel(const Params p) {
  const Tile<T, N> tile(p);
  gate_chunk<gate>(p, tile, [&] { return sum_chunks(p, tile, p.chunks); });
}

template <class T, int N, Gate gate>
__global__ void __launch_bounds__(kThreads, 2) single_chunk_kernel(const Params p) {
  const Tile<T, N> tile(p);
  gate_chunk<gate>(p, tile, [&] { return sum_chunk(p, tile); });
}

// Adds to each row's own sums those of all rows above and `before`, the sum of channel threadIdx.x above the tile,
// which becomes that above the next tile.
template <class T, int N>
__device__ __forceinline__ void scan_rows(BinarySum (&sums)[N], BinarySum& before,
                                          BinarySum (&shared)[kWarps][Tile<T, N>::kChannels], const Tile<T, N>& tile) {
  using Layout = Tile<T, N>;
  const int row_in_warp = tile.row % Layout::kRowsPerWarp, c = threadIdx.x;
#pragma unroll
  for (int c = 0; c < N; ++c) {
#pragma unroll
    for (int distance = 1; distance < Layout::kRowsPerWarp; distance *= 2) {
      BinarySum above = shuffle_up(sums[c], distance * Layout::kColumns);
      if (row_in_warp < distance) above.reference = kNoKey;  // its sums are the lane's own: their weight becomes 0
      sums[c].merge(above);
    }
    if (row_in_warp == Layout::kRowsPerWarp - 1) shared[tile.warp][tile.column * N + c] = sums[c];
    if constexpr (Layout::kRowsPerWarp > 1) sums[c] = shuffle_up(sums[c], Layout::kColumns);
    if (row_in_warp == 0) sums[c] = BinarySum::empty();
  }
  __syncthreads();
  if (c < Layout::kChannels)
#pragma unroll 1  // more take too many registers
    for (int warp = 0; warp < kWarps; ++warp) {
      const BinarySum own = shared[warp][c];
      shared[warp][c] = before;
      before.merge(own);
    }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < N; ++c) sums[c].merge(shared[tile.warp][tile.column * N + c]);
}

template <class T, int N, Gate gate>
__global__ void __launch_bounds__(kThreads, 2) causal_kernel(const Params p) {
  using Layout = Tile<T, N>;
  auto& shared = shared_memory<typename Layout::Shared>();
  const Layout tile(p);
  const StridedSequence& s = p.call.sequence;
  const int64_t length = length_of(s, tile.batch);
  BinarySum before = sum_chunks(p, tile, tile.chunk);
  __syncthreads();  // the first turn is free again
  int turn = 0;
  for (int64_t first = tile.begin; first < tile.end; first += Layout::kRows * kInFlight, turn ^= 1) {
    const int64_t t = first + tile.row * kInFlight;
    const int rows = tile.active ? count_before(tile.end, t, 1) : 0;
    const int counted = tile.active ? count_before(tile.end < length ? tile.end : length, t, 1) : 0;
    Tokens<T, N> query, key, value;
    key.load(row<T>(s.key, tile.batch, t) + tile.channel, s.key.token_stride, counted, minus_infinity<T>());
    value.load(row<T>(s.value, tile.batch, t) + tile.channel, s.value.token_stride, counted, T{});
    BinarySum sums[N];
    clear(sums);
    add_tokens(sums, key, value);
    query.load(row<T>(s.query, tile.batch, t) + tile.channel, s.query.token_stride, rows);
    scan_rows(sums, before, shared.sums[turn], tile);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (i < rows) {
        float context[N];
#pragma unroll
        for (int c = 0; c < N; ++c) {
          sums[c].raise(key.raw[i][c]);
          sums[c].add_below(key.raw[i][c], value.raw[i][c]);
          context[c] = sums[c].mean();
        }
        store_gated<gate>(output_row(s, tile, t + i), query.raw[i], context);
      }
  }
}

template <class T, int N, Gate gate>
int run(const Strided<AftSimple>& call, void* workspace, cudaStream_t stream) {
  using Shared = typename Tile<T, N>::Shared;
  const StridedSequence& s = call.sequence;
  const int64_t groups = ceil_div<int64_t>(s.channels, Tile<T, N>::kChannels);
  const int64_t wanted = ceil_div(kBlocks, groups * s.batch);
  const int64_t most = ceil_div<int64_t>(s.tokens, kChunk);
  const int64_t chunk = round_up<int64_t>(ceil_div(s.tokens, wanted < most ? wanted : most), kChunk);
  const int64_t chunks = ceil_div(s.tokens, chunk);
  const Params params{call, chunk, static_cast<int>(chunks), static_cast<int>(groups), static_cast<float*>(workspace)};
  const dim3 grid(static_cast<unsigned>(groups * chunks * s.batch));
  if (chunks == 1)
    return launch<Shared>(s.causal ? causal_kernel<T, N, gate> : single_chunk_kernel<T, N, gate>, grid, kThreads,
                          stream, params);
  if (const int status = launch<Shared>(sum_kernel<T, N>, grid, kThreads, stream, params)) return status;
  return launch<Shared>(s.causal ? causal_kernel<T, N, gate> : gate_kernel<T, N, gate>, grid, kThreads, stream, params);
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_aft_simple_workspace(const aft::AftSimple* params) {
  using namespace aft::cuda;
  const aft::AftSimple& s = *params;
  const int64_t chunks = s.batch * ceil_div<int64_t>(s.tokens, kChunk), most = kBlocks + s.batch;
  return kRecord * sizeof(float) * (chunks < most ? chunks : most) * s.channels;
}

int aft_cuda_aft_simple(const aft::AftSimple* params, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (is_empty(*params)) return 0;
  const auto call = strided(*params);
  return with_element(params->element, [&](auto element) {
    return with_gate(params->gate, [&](auto gate) {
      using T = decltype(element);
      const bool vectors = params->channels % kVector<T> == 0 && all_aligned<T>(call.sequence);
      return vectors ? run<T, kVector<T>, decltype(gate)::value>(call, workspace, stream)
                     : run<T, 1, decltype(gate)::value>(call, workspace, stream);
    });
  });
}
