// AFT-local (Zhai et al., arXiv 2105.14103, equation 4).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c] + w'[t,u]) V[u,c] / sum_u exp(K[u,c] + w'[t,u])    causal: u <= t
//           with w'[t,u] = w[t,u] where |t - u| < s and 0 elsewhere: keys outside the window count with weight exp(K).
// Cost:     floor: 4BTD (2s-1) FLOPs (4BTDs in causal form) and 4BTD elements moved. A tile of 64 rows and 64 channels
//           takes the 64 + 2 (s-1) keys of its span (64 + s-1 in causal form) as a dense product. So it spends 4BTD (62
//           + 2s) FLOPs and reads k and v 1 + (62 + 2s) / 64 times, all but one of the reads from the second-level
//           cache where the batch fits. Bound by memory to about s = 32 (tensor cores; FMA: about 8), by arithmetic
//           from there.
// Method:   shared/window_sums.cuh has the sums outside the span. Inside it exp(K + w) is split into exp(K - m) and
//           exp(w - row maximum), so that the span is a product of a weight matrix [rows, keys] with the matrices
//           exp(K - m) V and exp(K - m), on tensor cores in 16 bits, by FMA in float32 (tf32 has too few digits). The
//           keys of the next step are loaded into registers while the present step is multiplied, and their weights go
//           into the other of two buffers: one barrier a step.
// Numerics: keys and rows whose maxima do not meet lose range. Cells whose denominator is too small to be trusted are
//           summed again by the definition.
// Rejected: (exp(w) - 1) over the window plus the sum over all keys has no sums outside the span, but cancels (4e-2 off
//           where one key dominates and has a low bias). Tiles of 128 rows halve the exponentials of long windows and
//           nearly double the product of short ones. Weights kept in the workspace, T (2s-1) of them, are read by every
//           group of channels at the cost of computing them.
// See:      aft_local_product.cuh, shared/window_sums.cuh, shared/gate.cuh

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "kernels.h"
#include "mechanisms/aft_local_product.cuh"
#include "mechanisms/shared/exact_logit.cuh"
#include "mechanisms/shared/gate.cuh"
#include "mechanisms/shared/window_scan.cuh"
#include "mechanisms/shared/window_sums.cuh"

namespace aft::cuda {
namespace {

constexpr int kCells = kLocalRows * kLocalChannels / kLocalThreads;  // of a thread

struct Params {
  AftCudaAftLocal call;
  WindowSums sums;
  int groups, tiles;        // of channels and of rows
  const float* row_maxima;  // [tokens]: each row's largest bias
};

// A row of the band, of which entries [first, last) belong to tokens of the sequence that the row may see.
template <class T>
struct BandRow {
  const T* entries;
  int64_t first, last;

  __device__ __forceinline__ BandRow(const AftCudaAftLocal& call, int64_t t) {
    const int64_t left = call.window - 1, right = call.sequence.causal ? 0 : left, width = left + right + 1;
    const int64_t end = call.sequence.tokens - t + left;
    entries = static_cast<const T*>(call.band) + (call.band_rows == 1 ? 0 : t * width);
    first = left > t ? left - t : 0;
    last = end < width ? end : width;
  }
};

// A warp finds one row's largest bias, 0 included if the row sees keys outside its window.
template <class T>
struct RowMaximum {
  AftCudaAftLocal call;
  float* row_maxima;
  int64_t items;

  __device__ __forceinline__ void operator()(int64_t t) const {
    const BandRow<T> row(call, t);
    const int lane = threadIdx.x % kWarp;
    const int64_t left = call.window - 1;
    const bool sees_outside = t > left || (!call.sequence.causal && t + left + 1 < call.sequence.tokens);
    float maximum = sees_outside ? 0.0f : kNoKey;
    for (int64_t j = row.first + lane; j < row.last; j += kWarp) maximum = fmaxf(maximum, to_float(row.entries[j]));
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
    if (lane == 0) row_maxima[t] = maximum;
  }
};

template <class T>
struct Shared {
  union {
    typename LocalProduct<T>::Stage stages[2];
    float context[kLocalRows][kLocalChannels];
  };
  RunningSum outside[kLocalChannels];
  float maximum[kLocalChannels];  // of the span's keys
  float row_maxima[kLocalRows];   // bias, less the weights' scale
};

// The block's rows from `first` on and its channels.
struct Tile {
  int64_t batch, first, channel;
  int rows;        // that count, none or less where the document ends before
  int begin, end;  // the span, relative to `first`

  __device__ __forceinline__ explicit Tile(const Params& p) {
    channel = static_cast<int64_t>(blockIdx.x % p.groups) * kLocalChannels;
    first = static_cast<int64_t>(blockIdx.x / p.groups % p.tiles) * kLocalRows;
    batch = blockIdx.x / p.groups / p.tiles;
    const int64_t last = length_of(p.call.sequence, batch) - first, span = kLocalRows + p.sums.right;
    rows = static_cast<int>(last < kLocalRows ? last : kLocalRows);
    begin = -static_cast<int>(first < p.sums.left ? first : p.sums.left);
    end = static_cast<int>(last < span ? last : span);
  }
};

// The keys of one step and their biases, on their way from memory to a stage.
template <class T, int N>
struct Step {
  static constexpr int kKeys = LocalProduct<T>::kKeys;
  static constexpr int kLoads = kKeys * kLocalChannels / N / kLocalThreads;
  static constexpr int kKeysApart = kLocalThreads * N / kLocalChannels;
  static constexpr int kWeights = kLocalRows * kKeys / kLocalThreads, kRowsApart = kLocalThreads / kKeys;
  using Stage = typename LocalProduct<T>::Stage;

  Raw<T, N> key[kLoads], value[kLoads];
  T bias[kWeights];
  // The first load of this thread for the next step, and the key of it, relative to the tile's first row.
  const T *keys, *values, *band;
  int entry_key, weight_key;

  static __device__ __forceinline__ int channel() { return static_cast<int>(threadIdx.x) % (kLocalChannels / N) * N; }
  static __device__ __forceinline__ int weight_row() { return static_cast<int>(threadIdx.x) / kKeys; }

  __device__ __forceinline__ Step(const Params& p, const Tile& tile)
      : entry_key(tile.begin + static_cast<int>(threadIdx.x) / (kLocalChannels / N)),
        weight_key(tile.begin + static_cast<int>(threadIdx.x) % kKeys) {
    const AftCudaSequence& s = p.call.sequence;
    keys = row<T>(s.key, tile.batch, tile.first + entry_key) + tile.channel + channel();
    values = row<T>(s.value, tile.batch, tile.first + entry_key) + tile.channel + channel();
    band = BandRow<T>(p.call, tile.first + weight_row()).entries + (weight_key - weight_row() + p.sums.left);
  }

  __device__ __forceinline__ void load(const Params& p, const Tile& tile) {
    const AftCudaSequence& s = p.call.sequence;
    const bool active = tile.channel + channel() < s.channels;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (active && entry_key + i * kKeysApart < tile.end) {
        key[i] = Raw<T, N>(keys + i * kKeysApart * s.key.token_stride);
        value[i] = Raw<T, N>(values + i * kKeysApart * s.value.token_stride);
      }
    const int apart = (p.call.band_rows == 1 ? 0 : static_cast<int>(p.sums.left + p.sums.right) + 1) - 1;
#pragma unroll
    for (int i = 0; i < kWeights; ++i)
      if (in_window(p, tile, i)) bias[i] = band[i * kRowsApart * apart];
  }

  // Whether the i-th weight's key, one of the sequence, is in the window of its row.
  __device__ __forceinline__ bool in_window(const Params& p, const Tile& tile, int i) const {
    const int row = weight_row() + i * kRowsApart, distance = weight_key - row;
    return distance >= -static_cast<int>(p.sums.left) && distance <= static_cast<int>(p.sums.right) &&
           weight_key < tile.end && row < tile.rows;
  }

  // Computes the weights of the loaded keys, and goes on to the next step.
  __device__ __forceinline__ void store_to(Stage& stage, const Params& p, const Tile& tile, const Shared<T>& shared) {
    const AftCudaSequence& s = p.call.sequence;
    const bool active = tile.channel + channel() < s.channels;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float weight[N] = {}, product[N] = {};
      if (active && entry_key + i * kKeysApart < tile.end)
#pragma unroll
        for (int c = 0; c < N; ++c) {
          weight[c] = machine::fast_exp(key[i][c] - shared.maximum[channel() + c]);
          product[c] = weight[c] * value[i][c];
        }
      const int to = static_cast<int>(threadIdx.x) / (kLocalChannels / N) + i * kKeysApart;
      store(&stage.entries[0][to][channel()], product);
      store(&stage.entries[1][to][channel()], weight);
    }
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const int row = weight_row() + i * kRowsApart;
      const bool counts = weight_key < tile.end && !(p.sums.causal && weight_key > row);
      const float logit = in_window(p, tile, i) ? to_float(bias[i]) : 0.0f;
      LocalProduct<T>::set_weight(stage, row, static_cast<int>(threadIdx.x) % kKeys,
                                  counts ? machine::fast_exp(logit - shared.row_maxima[row]) : 0.0f);
    }
    entry_key += kKeys;
    weight_key += kKeys;
    keys += kKeys * s.key.token_stride;
    values += kKeys * s.value.token_stride;
    band += kKeys;
  }
};

// The mean of one cell as it is defined.
template <class T>
__device__ __forceinline__ float exact_mean(const Params& p, const Tile& tile, int row_, int64_t channel,
                                            RunningSum sum) {
  const AftCudaSequence& s = p.call.sequence;
  const BandRow<T> band(p.call, tile.first + row_);
  const int left = static_cast<int>(p.sums.left), right = static_cast<int>(p.sums.right);
  const int end = p.sums.causal && row_ + 1 < tile.end ? row_ + 1 : tile.end;
  return exact_mean_with(
      sum, tile.begin, end, [&](int64_t u) { return to_float(row<T>(s.key, tile.batch, tile.first + u)[channel]); },
      [&](int64_t u) {
        const bool inside = u >= row_ - left && u <= row_ + right;
        return inside ? to_float(band.entries[u - row_ + left]) : 0.0f;
      },
      [&](int64_t u) { return to_float(row<T>(s.value, tile.batch, tile.first + u)[channel]); });
}

// Reads the results of other kernels for the tile.
template <class T>
__device__ __forceinline__ void load_outside(Shared<T>& shared, const Params& p, const Tile& tile) {
  const int thread = threadIdx.x;
  if (thread < kLocalChannels) {
    const int64_t channel = tile.channel + thread;
    shared.outside[thread] = RunningSum::empty();
    shared.maximum[thread] = 0.0f;
    if (channel < p.call.sequence.channels) {
      const Outside outside(p.sums, tile.batch, tile.first, channel);
      shared.outside[thread] = outside.sum;
      shared.maximum[thread] = outside.maximum;
    }
  } else {
    const int row = thread - kLocalChannels;
    shared.row_maxima[row] = row < tile.rows ? p.row_maxima[tile.first + row] - LocalProduct<T>::kLogScale : 0.0f;
  }
}

template <class T, int N>
__device__ __forceinline__ void gate_tile(const Shared<T>& shared, const Params& p, const Tile& tile) {
  const AftCudaSequence& s = p.call.sequence;
  constexpr int kColumns = kLocalChannels / N;
  const int column = threadIdx.x % kColumns * N;
  const int64_t channel = tile.channel + column;
  if (channel >= s.channels) return;
#pragma unroll 4
  for (int r = threadIdx.x / kColumns; r < kLocalRows; r += kLocalThreads / kColumns) {
    const int64_t t = tile.first + r;
    if (t >= s.tokens) return;
    const Raw<T, N> query(row<T>(s.query, tile.batch, t) + channel);
    float y[N];
#pragma unroll
    for (int c = 0; c < N; ++c) y[c] = gated(p.call.gate, query[c], shared.context[r][column + c]);
    store(static_cast<T*>(s.output) + (tile.batch * s.tokens + t) * s.channels + channel, y);
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kLocalThreads, 3) tile_kernel(const Params p) {
  const AftCudaSequence& s = p.call.sequence;
  auto& shared = shared_memory<Shared<T>>();
  const Tile tile(p);
  LocalProduct<T> product;
  load_outside(shared, p, tile);
  __syncthreads();

  if (tile.rows > 0) {
    Step<T, N> step(p, tile);
    int stage = 1;
    for (int u = tile.begin - step.kKeys; u < tile.end; u += step.kKeys, stage ^= 1) {
      const bool more = u + step.kKeys < tile.end;
      if (more) step.load(p, tile);
      if (u >= tile.begin) product.add(shared.stages[stage]);
      if (more) step.store_to(shared.stages[stage ^ 1], p, tile, shared);
      __syncthreads();
    }
  }

  const float least = least_trusted<T>(tile.end - tile.begin);
  unsigned untrusted = 0;  // cells to be summed again
#pragma unroll
  for (int cell = 0; cell < kCells; ++cell) {
    const int r = product.row_of(cell), c = product.column_of(cell);
    const RunningSum outside = shared.outside[c];
    const Total total(shared.maximum[c], shared.row_maxima[r], outside);
    const float numerator = total.of(product.sum(0, cell), outside.numerator);
    const float denominator = total.of(product.sum(1, cell), outside.denominator);
    const bool counts = r < tile.rows && tile.channel + c < s.channels;
    if (counts && !total.trusted(denominator, least)) untrusted |= 1u << cell;
    shared.context[r][c] = counts && denominator != 0.0f ? numerator / denominator : 0.0f;
  }
#pragma unroll 1
  for (int cell = 0; untrusted != 0; ++cell, untrusted >>= 1)
    if (untrusted & 1) {
      const int r = product.row_of(cell), c = product.column_of(cell);
      shared.context[r][c] = exact_mean<T>(p, tile, r, tile.channel + c, shared.outside[c]);
    }
  __syncthreads();
  gate_tile<T, N>(shared, p, tile);
}

template <class T, int N>
int run(const AftCudaAftLocal& call, void* workspace, cudaStream_t stream) {
  const AftCudaSequence& s = call.sequence;
  const WindowSums sums(s, call.window - 1, s.causal ? 0 : call.window - 1, kLocalRows, workspace);
  float* row_maxima = reinterpret_cast<float*>(static_cast<unsigned char*>(workspace) + sums.bytes());
  const RowMaximum<T> row_maximum{call, row_maxima, s.tokens};
  constexpr int kSummed = N < 4 ? N : 4;
  if (const int status = sum_outside<T, kSummed, kSummed>(s, sums, 1, row_maximum, stream)) return status;
  const int64_t groups = ceil_div<int64_t>(s.channels, kLocalChannels);
  const int64_t tiles = ceil_div<int64_t>(s.tokens, kLocalRows);
  const Params params{call, sums, static_cast<int>(groups), static_cast<int>(tiles), row_maxima};
  const dim3 grid(static_cast<unsigned>(groups * tiles * s.batch));
  return launch<Shared<T>>(tile_kernel<T, N>, grid, kLocalThreads, stream, params);
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_aft_local_workspace(const AftCudaAftLocal* call) {
  using namespace aft::cuda;
  const AftCudaSequence& s = call->sequence;
  const WindowSums sums(s, call->window - 1, s.causal ? 0 : call->window - 1, kLocalRows, nullptr);
  return sums.bytes() + sizeof(float) * s.tokens;
}

int aft_cuda_aft_local(const AftCudaAftLocal* call, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (call->sequence.batch * call->sequence.tokens * call->sequence.channels == 0) return 0;
  return with_element(call->sequence.element, [&](auto element) {
    using T = decltype(element);
    const bool vectors = call->sequence.channels % kVector<T> == 0 && all_aligned<T>(call->sequence);
    return vectors ? run<T, kVector<T>>(*call, workspace, stream) : run<T, 1>(*call, workspace, stream);
  });
}
