// AFT-local (Zhai et al., arXiv 2105.14103, equation 4).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c] + w'[t,u]) V[u,c] / sum_u exp(K[u,c] + w'[t,u])    causal: u <= t
//           with w'[t,u] = w[t,u] where |t - u| < s and 0 elsewhere: keys outside the window count with weight exp(K).
// Cost:     floor: 4BTD (2s-1) FLOPs (4BTDs in causal form) and 4BTD elements moved. A tile of 128 rows and 64 channels
//           takes the 128 + 2 (s-1) keys of its span (128 + s-1 in causal form) as a dense product. So it spends 4BTD
//           (126 + 2s) FLOPs and reads k and v 1 + (126 + 2s) / 128 times, all but one of the reads from the
//           second-level cache where the batch fits. The weights are T (2s-1) elements more, written once and read by
//           each group of 64 channels.
// Method:   sums/window_sums.cuh has the sums outside the span. Inside it exp(K + w) is split into exp(K - m) and
//           exp(w - row maximum), so that the span is a product of a weight matrix [rows, keys] with the matrices
//           exp(K - m) V and exp(K - m), on tensor cores in 16 bits, by FMA in float32 (tf32 has too few digits). The
//           weights are taken once per call: further warps of the launch that sums pieces write those of all rows, in
//           chunks of 16 bytes that tiles copy asynchronously. The keys of the next step are loaded into registers
//           while the present step is multiplied, and their weights go into the other of two buffers. So a step has
//           one barrier.
// Numerics: keys and rows whose maxima do not meet lose range. Cells whose denominator is too small to be trusted are
//           summed again by the definition.
// Rejected: (exp(w) - 1) over the window plus the sum over all keys has no sums outside the span, but cancels (4e-2 off
//           where one key dominates and has a low bias). Tiles of 64 rows read k and v 1.5 times as often if s = 128.
//           Exponentials of the band in the tiles take 8 instructions a weight for each 64 channels.
// See:      aft_local_product.cuh, aft_local_weights.cuh, sums/window_sums.cuh, sums/gate.cuh

#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "kernels.h"
#include "mechanisms/aft_local_product.cuh"
#include "mechanisms/aft_local_weights.cuh"
#include "sums/exact_logit.cuh"
#include "sums/gate.cuh"
#include "sums/window_scan.cuh"
#include "sums/window_sums.cuh"

namespace aft::cuda {
namespace {

template <class T>
struct Params {
  Strided<AftLocal> call;
  WindowSums sums;
  LocalWeights<T> weights;
  int groups, tiles;  // of channels and of rows
};

template <class T>
struct Shared {
  union {
    typename LocalProduct<T>::Stage stages[2];
    float context[kLocalRows][kLocalChannels + 8];
  };
  RunningSum outside[kLocalChannels];
  // Negated and in powers of 2: the largest key of the span, and the row's largest bias less the weights' scale.
  alignas(16) float key_reference[kLocalChannels];
  float row_reference[kLocalRows];
};

// The block's rows from `first` on and its channels.
template <class T>
struct Tile {
  int64_t batch, first, channel;
  int rows;        // that count, none or less where the document ends before
  int begin, end;  // the span, relative to `first`
  int start;       // of the chunk of keys with `begin`

  __device__ __forceinline__ explicit Tile(const Params<T>& p) {
    channel = static_cast<int64_t>(blockIdx.x % p.groups) * kLocalChannels;
    first = static_cast<int64_t>(blockIdx.x / p.groups % p.tiles) * kLocalRows;
    batch = blockIdx.x / p.groups / p.tiles;
    const int64_t last = length_of(p.call.sequence, batch) - first, span = kLocalRows + p.sums.right;
    rows = static_cast<int>(last < kLocalRows ? last : kLocalRows);
    begin = -static_cast<int>(first < p.sums.left ? first : p.sums.left);
    end = static_cast<int>(last < span ? last : span);
    start = begin - static_cast<int>((first + begin) % kVector<T>);
  }
};

// The keys of one step on their way from memory to a stage, and their weights, which the device copies.
template <class T, int N>
struct Step {
  static constexpr int kKeys = LocalProduct<T>::kKeys;
  static constexpr int kLoads = kKeys * kLocalChannels / N / kLocalThreads;
  static constexpr int kKeysApart = kLocalThreads * N / kLocalChannels;
  static constexpr int kChunks = kKeys / kVector<T>, kRowsApart = kLocalThreads / kChunks;
  static constexpr int kRows = kLocalRows / kRowsApart;
  using Stage = typename LocalProduct<T>::Stage;

  Raw<T, N> key[kLoads], value[kLoads];
  // Where this thread loads first in the next step, and the index of that key among the `present` keys of the span.
  const T *keys, *values;
  int entry_key, present;
  // For some rows the chunk of weights to read, by its index in the row, and the weight outside of all chunks.
  const T* weights[kRows];
  int chunk[kRows];
  float outside[kRows];

  static __device__ __forceinline__ int channel() { return static_cast<int>(threadIdx.x) % (kLocalChannels / N) * N; }
  static __device__ __forceinline__ int weight_row() { return static_cast<int>(threadIdx.x) / kChunks; }
  static __device__ __forceinline__ int weight_chunk() { return static_cast<int>(threadIdx.x) % kChunks; }

  __device__ __forceinline__ Step(const Params<T>& p, const Tile<T>& tile)
      : entry_key(tile.start - tile.begin + static_cast<int>(threadIdx.x) / (kLocalChannels / N)) {
    const StridedSequence& s = p.call.sequence;
    present = tile.channel + channel() < s.channels ? tile.end - tile.begin : 0;
    const int64_t u = tile.first + tile.begin + entry_key;
    keys = row<T>(s.key, tile.batch, u) + tile.channel + channel();
    values = row<T>(s.value, tile.batch, u) + tile.channel + channel();
    const int chunks = static_cast<int>((tile.first + tile.start) / kVector<T>) + weight_chunk();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = weight_row() + i * kRowsApart;
      const int64_t t = tile.first + r, at = r < tile.rows ? p.weights.row_of(t) : 0;
      chunk[i] = chunks - p.weights.first_chunk(t);
      weights[i] = p.weights.weights + at * p.weights.pitch + chunk[i] * kVector<T>;
      outside[i] = r < tile.rows ? p.weights.scales[at].outside : 0.0f;
      if (r >= tile.rows) chunk[i] = kNoChunk;
    }
  }

  // Returns whether the i-th load reads a key of the span.
  __device__ __forceinline__ bool counts(int i) const {
    return static_cast<unsigned>(entry_key + i * kKeysApart) < static_cast<unsigned>(present);
  }

  __device__ __forceinline__ void load(Stage& stage, const Params<T>& p) {
    const StridedSequence& s = p.call.sequence;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (counts(i)) {
        key[i] = Raw<T, N>(keys + i * kKeysApart * s.key.token_stride);
        value[i] = Raw<T, N>(values + i * kKeysApart * s.value.token_stride);
      }
    keys += kKeys * s.key.token_stride;
    values += kKeys * s.value.token_stride;
    const unsigned chunks = static_cast<unsigned>(p.weights.pitch) / kVector<T>;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      T* to = &stage.weights[weight_row() + i * kRowsApart][weight_chunk() * kVector<T>];
      if (static_cast<unsigned>(chunk[i]) < chunks) {
        async_copy(to, weights[i]);
      } else {
        const float weight = p.sums.causal && chunk[i] >= 0 ? 0.0f : outside[i];
        float all[kVector<T>];
#pragma unroll
        for (float& each : all) each = weight;
        store(to, all);
      }
      chunk[i] += kChunks;
      weights[i] += kKeys;
    }
    async_commit();
  }

  // Computes the entries of the loaded keys.
  __device__ __forceinline__ void store_to(Stage& stage, const Shared<T>& shared) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      float weight[N] = {}, product[N] = {};
      if (counts(i))
#pragma unroll
        for (int c = 0; c < N; ++c) {
          weight[c] = machine::fast_exp2(fmaf(key[i][c], machine::kLog2E, shared.key_reference[channel() + c]));
          product[c] = weight[c] * value[i][c];
        }
      const int to = static_cast<int>(threadIdx.x) / (kLocalChannels / N) + i * kKeysApart;
      store(&stage.entries[0][to][channel()], product);
      store(&stage.entries[1][to][channel()], weight);
    }
    entry_key += kKeys;
    async_wait<0>();
  }

 private:
  static constexpr int kNoChunk = -(1 << 30);  // stays below every chunk
};

// Computes the mean of one cell by the definition.
template <class T>
__device__ __forceinline__ float exact_mean(const Params<T>& p, const Tile<T>& tile, int row_, int64_t channel,
                                            RunningSum sum) {
  const StridedSequence& s = p.call.sequence;
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
__device__ __forceinline__ void load_outside(Shared<T>& shared, const Params<T>& p, const Tile<T>& tile) {
  const int thread = threadIdx.x, row = thread - kLocalChannels;
  if (thread < kLocalChannels) {
    const int64_t channel = tile.channel + thread;
    shared.outside[thread] = RunningSum::empty();
    shared.key_reference[thread] = 0.0f;
    if (channel < p.call.sequence.channels) {
      const Outside outside(p.sums, tile.batch, tile.first, channel);
      shared.outside[thread] = outside.sum;
      shared.key_reference[thread] = reference_of(outside.maximum);
    }
  } else if (row < kLocalRows) {
    shared.row_reference[row] = row < tile.rows ? p.weights.scales[p.weights.row_of(tile.first + row)].reference : 0.0f;
  }
}

// Sums the untrusted cells of the thread again.
template <class T>
__device__ __forceinline__ void repair_means(Shared<T>& shared, const Params<T>& p, const Tile<T>& tile,
                                             LocalProduct<T>& product, float least) {
  constexpr int kColumns = LocalProduct<T>::kColumns, kCells = LocalProduct<T>::kRows * kColumns;
  unsigned untrusted = 0;
#pragma unroll
  for (int cell = 0; cell < kCells; ++cell)
    if (!(product.sum(1, cell / kColumns, cell % kColumns) >= least)) untrusted |= 1u << cell;
#pragma unroll 1
  for (int cell = 0; untrusted != 0; ++cell, untrusted >>= 1) {
    const int r = product.row_of(cell / kColumns), c = product.column_of(cell % kColumns);
    if ((untrusted & 1) && r < tile.rows && tile.channel + c < p.call.sequence.channels)
      shared.context[r][c] = exact_mean<T>(p, tile, r, tile.channel + c, shared.outside[c]);
  }
}

// Adds the sums outside the span to those of the thread's cells, and divides.
template <class T>
__device__ __forceinline__ void store_means(Shared<T>& shared, const Params<T>& p, const Tile<T>& tile,
                                            LocalProduct<T>& product) {
  using Product = LocalProduct<T>;
  const float least = least_trusted<T>(tile.end - tile.begin);
  float row_reference[Product::kRows];
#pragma unroll
  for (int r = 0; r < Product::kRows; ++r) row_reference[r] = shared.row_reference[product.row_of(r)];
  bool trusted = true;
#pragma unroll
  for (int c = 0; c < Product::kColumns; c += 2) {
    RunningSum outside[2];
    float reference[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int column = product.column_of(c + k);
      outside[k] = shared.outside[column];
      reference[k] = fmaf(outside[k].maximum, machine::kLog2E, shared.key_reference[column]);
    }
#pragma unroll
    for (int r = 0; r < Product::kRows; ++r) {
      float mean[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        // The sums outside become relative to the span's, which do not matter below 2^-80 of those outside.
        const float factor = machine::fast_exp2(fminf(reference[k] + row_reference[r], 80.0f));
        const float numerator = fmaf(outside[k].numerator, factor, product.sum(0, r, c + k));
        float denominator = fmaf(outside[k].denominator, factor, product.sum(1, r, c + k));
        // A later NaN or infinite value has weight 0, which does not clear it. The exact mean does not read it.
        if (p.sums.causal && numerator != numerator) denominator = numerator;
        product.sum(1, r, c + k) = denominator;
        trusted = trusted && denominator >= least;
        mean[k] = machine::fast_divide(numerator, denominator);
      }
      store(&shared.context[product.row_of(r)][product.column_of(c)], mean);
    }
  }
  if (!trusted) repair_means(shared, p, tile, product, least);
}

template <Gate gate, int N, class T>
__device__ __forceinline__ void gate_tile(const Shared<T>& shared, const Params<T>& p, const Tile<T>& tile) {
  const StridedSequence& s = p.call.sequence;
  constexpr int kColumns = kLocalChannels / N;
  const int column = threadIdx.x % kColumns * N;
  const int64_t channel = tile.channel + column;
  if (channel >= s.channels) return;
#pragma unroll 4
  for (int r = threadIdx.x / kColumns; r < kLocalRows; r += kLocalThreads / kColumns) {
    const int64_t t = tile.first + r;
    if (t >= s.tokens) return;
    const Raw<T, N> query(row<T>(s.query, tile.batch, t) + channel);
    float y[N] = {};
    if (r < tile.rows)
#pragma unroll
      for (int c = 0; c < N; ++c) y[c] = gated<gate>(query[c], shared.context[r][column + c]);
    store(static_cast<T*>(s.output) + (tile.batch * s.tokens + t) * s.channels + channel, y);
  }
}

template <class T, int N, Gate gate>
__device__ __forceinline__ void compute_tile(const Params<T>& p) {
  auto& shared = shared_memory<Shared<T>>();
  const Tile<T> tile(p);
  LocalProduct<T> product;
  load_outside(shared, p, tile);
  __syncthreads();

  if (tile.rows > 0) {
    Step<T, N> step(p, tile);
    int stage = 1;
    for (int u = tile.start - step.kKeys; u < tile.end; u += step.kKeys, stage ^= 1) {
      const bool more = u + step.kKeys < tile.end;
      if (more) step.load(shared.stages[stage ^ 1], p);
      if (u >= tile.start) product.add(shared.stages[stage]);
      if (more) step.store_to(shared.stages[stage ^ 1], shared);
      __syncthreads();
    }
  }

  if (tile.rows > 0) store_means(shared, p, tile, product);
  __syncthreads();
  gate_tile<gate, N>(shared, p, tile);
}

template <class T, int N, Gate gate>
__global__ void __launch_bounds__(kLocalThreads, 2) tile_kernel(const Params<T> p) {
  compute_tile<T, N, gate>(p);
}

// Rows that are not aligned are loaded element by element, into more registers than two blocks have.
template <class T, int N, Gate gate>
__global__ void __launch_bounds__(kLocalThreads, 1) unaligned_tile_kernel(const Params<T> p) {
  compute_tile<T, N, gate>(p);
}

template <class T, int N>
int run(const Strided<AftLocal>& call, void* workspace, cudaStream_t stream) {
  const StridedSequence& s = call.sequence;
  const WindowSums sums(s, call.window - 1, s.causal ? 0 : call.window - 1, workspace);
  const LocalWeights<T> weights(call, static_cast<unsigned char*>(workspace) + round_up<size_t>(sums.bytes(), 16));
  const PrepareWeights<T> prepare{call, weights, weights.rows};
  constexpr int kSummed = N < 4 ? N : 4;
  if (const int status = sum_outside<T, kSummed, kSummed>(s, sums, 1, prepare, stream)) return status;
  const int64_t groups = ceil_div<int64_t>(s.channels, kLocalChannels);
  const int64_t tiles = ceil_div<int64_t>(s.tokens, kLocalRows);
  const Params<T> params{call, sums, weights, static_cast<int>(groups), static_cast<int>(tiles)};
  const dim3 grid(static_cast<unsigned>(groups * tiles * s.batch));
  return with_gate(call.gate, [&](auto gate) {
    if constexpr (N == 1)
      return launch<Shared<T>>(unaligned_tile_kernel<T, N, gate.value>, grid, kLocalThreads, stream, params);
    else
      return launch<Shared<T>>(tile_kernel<T, N, gate.value>, grid, kLocalThreads, stream, params);
  });
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_aft_local_workspace(const aft::AftLocal* params) {
  using namespace aft::cuda;
  const auto call = strided(*params);
  const StridedSequence& s = call.sequence;
  const WindowSums sums(s, call.window - 1, s.causal ? 0 : call.window - 1, nullptr);
  size_t weights = 0;
  with_element(s.element, [&](auto element) {
    weights = LocalWeights<decltype(element)>(call, nullptr).bytes();
    return 0;
  });
  return round_up<size_t>(sums.bytes(), 16) + weights;
}

int aft_cuda_aft_local(const aft::AftLocal* params, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (is_empty(*params)) return 0;
  const auto call = strided(*params);
  return with_element(params->element, [&](auto element) {
    using T = decltype(element);
    const bool vectors = params->channels % kVector<T> == 0 && all_aligned<T>(call.sequence);
    return vectors ? run<T, kVector<T>>(call, workspace, stream) : run<T, 1>(call, workspace, stream);
  });
}
