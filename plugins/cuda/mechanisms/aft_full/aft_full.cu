// AFT-full (Zhai et al., arXiv 2105.14103, equation 2).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c] + w[t,u]) V[u,c] / sum_u exp(K[u,c] + w[t,u])      causal: u <= t
// Cost:     bound by multiply-adds: 4BTTD FLOPs (half that causal), from some 300 tokens on in 16 bits. Floor below
//           that: 8BTD bytes in 16 bits and 2TT of w. Per key a block takes 192 exponentials, 12 clocks of a
//           multiprocessor, for 16,384 multiply-adds, 16 clocks of sm_80's tensor cores and 8 of sm_90's at their peak:
//           neither can be neglected, and two blocks a multiprocessor let them overlap.
// Method:   exp(K + w) = exp(w - r) exp(K - m) exp(r + m), and the last factor cancels: two matrix products with the
//           same left side, computed together. A block sums 128 rows of 64 channels over all keys they see. Both
//           factors are computed on the way into the multiplication, and nothing of T x T is ever written. r, the row
//           maximum of w, and m, the channel's largest key (causal: up to the block's last row), are found by a launch
//           before, so that sums are never rescaled.
//           16-bit products, two blocks a multiprocessor (255 registers, 37 KiB shared): 4 warps of 32 rows each. All
//           64 channels' sums stay in registers (128 of them), so that a warp takes each exp(w - r) once, in the
//           register where the tensor core needs it, and entries of keys and values are read from shared memory by four
//           warps rather than eight. w arrives by asynchronous copies one step ahead, keys and values through
//           registers. One barrier a step.
//           float32 products, two blocks as well (128 registers, 36 KiB): the same tile by fused multiply-adds, 8 rows
//           of 4 channels a thread. Beyond kSegmentKeys keys the workspace holds totals as well, 64 KiB a tile; 16-bit
//           products need none, since the tensor cores add 16 keys at once.
// Numerics: where r and m come from keys far apart the products underflow. Such cells have a small denominator and are
//           summed again by the definition.
// Rejected: maxima found during the sums would cost each step a reduction, a barrier and a rescaling of 128 sums a
//           thread. Split tf32 would take three products for each of float32 and was not tried.
// See:      aft_full_tile.cuh, aft_full_cell.cuh, aft_full_maxima.cuh, aft_full_segments.cuh, aft_full_gemm.cu

#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "device/tile_rows.cuh"
#include "mechanisms/aft_full/aft_full_segments.cuh"
#include "mechanisms/aft_full/aft_full_tile.cuh"

namespace aft::cuda {
namespace {

constexpr int kMaximaThreads = 256;
constexpr int kMaximaWarps = kMaximaThreads / kWarp;

// In the first blocks each warp takes a row of w; the other blocks take keys.
template <class T, int N>
__global__ void __launch_bounds__(kMaximaThreads, 4) maxima_kernel(const FullParams p) {
  const int64_t tokens = p.call.sequence.tokens, row_blocks = ceil_div<int64_t>(tokens, kMaximaWarps);
  if (blockIdx.x >= row_blocks) {
    find_key_maxima<T, N, kMaximaThreads>(p.call.sequence, p.maxima, blockIdx.x - row_blocks);
    return;
  }
  const int64_t t = blockIdx.x * static_cast<int64_t>(kMaximaWarps) + threadIdx.x / kWarp;
  if (t < tokens) find_row_maximum<T>(p.call, p.maxima, t);
}

constexpr int kTensorThreads = 128;
constexpr int kTensorKeys = 32;  // a step
constexpr int kWarpRows = kTileRows / (kTensorThreads / kWarp);
constexpr int kRowTiles = kWarpRows / 16, kColumnTiles = 2 * kTileChannels / 8;

// Pitches a multiple of 16 bytes that puts eight rows into different banks.
template <class T, class P>
struct TensorShared {
  struct Operands {
    alignas(16) T bias[2][kTileRows][kTensorKeys + 8];
    alignas(16) P entries[2][kTensorKeys][2 * kTileChannels + 8];
  };
  union {
    Operands operands;
    alignas(16) float means[kTileRows][kMeanPitch];
  };
};

// The warp's rows of w on the way to shared memory, kTensorKeys columns after the other.
template <class T>
struct BiasCopy {
  static constexpr int kVectors = kTensorKeys / kVector<T>, kRowsApart = kWarp / kVectors;
  static constexpr int kCopies = kWarpRows / kRowsApart;

  const T* source;  // the lane's next vector in its first row, or the warp's next column where rows are unaligned
  int row, column;  // the place of `source` in the tile
  int64_t width;
  bool aligned;

  __device__ __forceinline__ BiasCopy(const FullParams& p, const FullTile& tile, bool aligned) : aligned(aligned) {
    const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kWarpRows;
    row = aligned ? first + lane / kVectors : first;
    column = aligned ? lane % kVectors * kVector<T> : lane;
    width = p.call.position_bias_width;
    source = static_cast<const T*>(p.call.position_bias) + (tile.first_row + row) * width + column;
  }

  // Starts the copy of the next columns, from first_key up to the last key.
  __device__ __forceinline__ void start(T (*bias)[kTensorKeys + 8], const FullTile& tile, int first_key) {
    const int rest = tile.keys - first_key - column, rows = tile.tokens - tile.first_row - row;
    if (aligned) {
      const int bytes = at_most(rest, kVector<T>) * static_cast<int>(sizeof(T));
#pragma unroll
      for (int i = 0; i < kCopies; ++i)
        async_copy(&bias[row + i * kRowsApart][column], source + i * kRowsApart * width,
                   i * kRowsApart < rows ? bytes : 0);
    } else {
#pragma unroll 8
      for (int i = 0; i < kWarpRows; ++i) bias[row + i][column] = i < rows && rest > 0 ? source[i * width] : T{0};
    }
    source += kTensorKeys;
    async_commit();
  }
};

// exp(w - reference) of two keys, the first of them u, for a row that sees keys below `visible`.
template <class T, class P, bool masked>
__device__ __forceinline__ uint32_t exponentials(uint32_t word, float reference, int u, int visible) {
  Raw<T, 2> w;
  w.words = word;
  float low = weight_of(w[0], reference), high = weight_of(w[1], reference);
  if (masked) {
    if (u >= visible) low = 0.0f;
    if (u + 1 >= visible) high = 0.0f;
  }
  return pack<P>(low, high);
}

struct WarpRows {
  int first;                      // row
  float reference[kRowTiles][2];  // of rows first + 16 i + 8 j + lane / 4
  int visible[kRowTiles][2];
  int most_visible, least_visible;
};

// sums += exp(w - r) entries for one step of keys.
template <bool masked, class T, class P>
__device__ __forceinline__ void multiply_step(float (&sums)[kRowTiles][kColumnTiles][4],
                                              const T (*bias)[kTensorKeys + 8],
                                              const P (*entries)[2 * kTileChannels + 8], const WarpRows& rows,
                                              int first_key) {
  const int lane = threadIdx.x % kWarp;
  const int matrix_row = lane % 8 + lane / 8 % 2 * 8, matrix_column = lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kTensorKeys; k += 16) {
    uint32_t weights[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      load_matrices(weights[i], &bias[16 * i + matrix_row][k + matrix_column]);
#pragma unroll
      for (int word = 0; word < 4; ++word)
        weights[i][word] =
            exponentials<T, P, masked>(weights[i][word], rows.reference[i][word % 2],
                                       first_key + k + word / 2 * 8 + lane % 4 * 2, rows.visible[i][word % 2]);
    }
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      uint32_t columns[4];
      load_matrices_transposed(columns, &entries[k + matrix_row][8 * j + matrix_column]);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        multiply_add<P>(sums[i][j], weights[i], {columns[0], columns[1]});
        multiply_add<P>(sums[i][j + 1], weights[i], {columns[2], columns[3]});
      }
    }
  }
}

template <class T, class P, int N>
__global__ void __launch_bounds__(kTensorThreads, 2) tensor_kernel(const FullParams p, bool bias_aligned) {
  auto& shared = shared_memory<TensorShared<T, P>>();
  const FullTile tile(p);
  const int lane = threadIdx.x % kWarp, first_row = threadIdx.x / kWarp * kWarpRows;

  WarpRows rows;
  rows.first = tile.first_row + first_row;
  const int last = rows.first + kWarpRows <= tile.length ? rows.first + kWarpRows : tile.length;
  rows.most_visible = rows.first < tile.length ? tile.visible(last - 1) : 0;
  rows.least_visible = rows.first + kWarpRows <= tile.length ? tile.visible(rows.first) : 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = rows.first + 16 * i + 8 * half + lane / 4;
      rows.visible[i][half] = tile.visible(t);
      rows.reference[i][half] = t < tile.tokens ? raised(kNoKey, p.maxima.rows[t]) - kLift<P> : 0.0f;
    }

  float sums[kRowTiles][kColumnTiles][4] = {};
  KeyTile<T, N, kTensorThreads, kTensorKeys> keys(p, tile, shared.means);
  __syncthreads();
  BiasCopy<T> bias_copy(p, tile, bias_aligned);
  if (tile.keys > 0) {
    bias_copy.start(shared.operands.bias[0], tile, 0);
    keys.load(p, 0);
    keys.write(shared.operands.entries[0]);
    async_wait<0>();
  }
  __syncthreads();
  int stage = 0;
  for (int u = 0; u < tile.keys; u += kTensorKeys, stage ^= 1) {
    const int next = u + kTensorKeys;
    if (next < tile.keys) {
      bias_copy.start(shared.operands.bias[stage ^ 1], tile, next);
      keys.load(p, next);
    }
    const T(*bias)[kTensorKeys + 8] = shared.operands.bias[stage] + first_row;
    if (next <= rows.least_visible)
      multiply_step<false>(sums, bias, shared.operands.entries[stage], rows, u);
    else if (u < rows.most_visible)
      multiply_step<true>(sums, bias, shared.operands.entries[stage], rows, u);
    if (next < tile.keys) {
      keys.write(shared.operands.entries[stage ^ 1]);
      async_wait<0>();
    }
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float least = kTrustedPerKey<P> * static_cast<float>(rows.visible[i][half]);
      const int r = first_row + 16 * i + 8 * half + lane / 4;
#pragma unroll
      for (int j = 0; j < kColumnTiles / 2; ++j) {
        const float* numerator = &sums[i][j][2 * half];
        const float* denominator = &sums[i][j + kColumnTiles / 2][2 * half];
        store(&shared.means[r][8 * j + lane % 4 * 2],
              {trusted_mean(numerator[0], denominator[0], least), trusted_mean(numerator[1], denominator[1], least)});
      }
    }
  __syncthreads();
  write_tile<T, N, kTensorThreads>(shared.means, p, tile);
}

constexpr int kFloatThreads = 256;
constexpr int kFloatKeys = 16;  // a step
constexpr int kThreadChannels = 4, kThreadRows = 8;
constexpr int kFloatColumns = kTileChannels / kThreadChannels;
static_assert(kFloatThreads / kFloatColumns * kThreadRows == kTileRows, "threads cover the tile");
static_assert(kSegmentKeys % kFloatKeys == 0, "a segment ends with a step");

using FloatSums = SegmentSums<kThreadRows, kThreadChannels>;

struct FloatShared {
  struct Operands {
    alignas(16) float weights[2][kFloatKeys][kWeightPitch];
    alignas(16) float entries[2][kFloatKeys][2 * kTileChannels];
  };
  union {
    Operands operands;
    alignas(16) float means[kTileRows][kMeanPitch];
  };
};

// The place of the thread's totals of segments. The index is below 2^32, because no memory holds more totals.
__device__ __forceinline__ float* segment_totals(const FullParams& p) {
  return p.totals + static_cast<size_t>(blockIdx.x * kFloatThreads + threadIdx.x) * FloatSums::kCount;
}

template <class T, int N>
__global__ void __launch_bounds__(kFloatThreads, 2) float_kernel(const FullParams p, bool bias_aligned) {
  auto& shared = shared_memory<FloatShared>();
  const FullTile tile(p);
  const int column = threadIdx.x % kFloatColumns * kThreadChannels;
  const int first_row = threadIdx.x / kFloatColumns * kThreadRows;
  FloatSums sums = {};
  KeyTile<T, N, kFloatThreads, kFloatKeys> keys(p, tile, shared.means);
  __syncthreads();
  WeightTile<T, kFloatThreads, kFloatKeys> weights(p, tile);
  const auto load = [&](int u) {
    weights.load(p, u, bias_aligned);
    keys.load(p, u);
  };
  const auto write = [&](int stage, int u) {
    weights.write(shared.operands.weights[stage], u);
    keys.write(shared.operands.entries[stage]);
  };
  if (tile.keys > 0) {
    load(0);
    write(0, 0);
  }
  __syncthreads();
  for (int u = 0; u < tile.keys; u += kFloatKeys) {
    const int next = u + kFloatKeys, stage = u / kFloatKeys % 2;
    if (next < tile.keys) load(next);
#pragma unroll 1  // more is hoisted into more registers than there are
    for (int k = 0; k < kFloatKeys; ++k) {
      Raw<float, 4> weight[kThreadRows / 4];
#pragma unroll
      for (int i = 0; i < kThreadRows; i += 4)
        weight[i / 4] = Raw<float, 4>(&shared.operands.weights[stage][k][first_row + i]);
      const float* entries = &shared.operands.entries[stage][k][column];
      const Raw<float, kThreadChannels> numerator(entries), denominator(entries + kTileChannels);
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int c = 0; c < kThreadChannels; ++c) {
          sums.numerators[i][c] += weight[i / 4][i % 4] * numerator[c];
          sums.denominators[i][c] += weight[i / 4][i % 4] * denominator[c];
        }
    }
    if (next < tile.keys) {
      write(stage ^ 1, next);
      if (next % kSegmentKeys == 0) sums.end_segment(segment_totals(p), next == kSegmentKeys);
    }
    __syncthreads();
  }
  if (tile.keys > kSegmentKeys) sums.add(segment_totals(p));
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int r = first_row + i;
    const float least = kTrustedPerKey<float> * static_cast<float>(tile.visible(tile.first_row + r));
    float mean[kThreadChannels];
#pragma unroll
    for (int c = 0; c < kThreadChannels; ++c)
      mean[c] = trusted_mean(sums.numerators[i][c], sums.denominators[i][c], least);
    store(&shared.means[r][column], mean);
  }
  __syncthreads();
  write_tile<T, N, kFloatThreads>(shared.means, p, tile);
}

// The workspace: maxima, then totals where documents may have more keys than a segment.
size_t maxima_bytes(const Sequence& s) { return round_up<size_t>(Maxima::bytes(s), 16); }
size_t totals_bytes(const Sequence& s) {
  return s.tokens > kSegmentKeys ? full_tiles(s) * kFloatThreads * sizeof(FloatSums) : 0;
}

// P is the type of the products' operands. Vectors of N channels or one.
template <class P, class T>
int run(const Strided<AftFull>& call, void* workspace, cudaStream_t stream) {
  const StridedSequence& s = call.sequence;
  constexpr bool tensor = sizeof(P) == 2;
  constexpr int vector = tensor ? kVector<T> : 4;
  const FullParams params{call, Maxima(call, workspace),
                          reinterpret_cast<float*>(static_cast<char*>(workspace) + maxima_bytes(call))};
  const bool bias_aligned =
      reinterpret_cast<uintptr_t>(call.position_bias) % 16 == 0 && call.position_bias_width % kVector<T> == 0;
  const auto with_vector = [&](auto n) {
    constexpr int N = decltype(n)::value;
    const int64_t maxima_blocks = ceil_div<int64_t>(s.tokens, kMaximaWarps) + full_tiles(call);
    if (const int status = launch<KeyMaximaShared<kMaximaThreads>>(
            maxima_kernel<T, N>, dim3(static_cast<unsigned>(maxima_blocks)), kMaximaThreads, stream, params))
      return status;
    const dim3 grid(static_cast<unsigned>(full_tiles(call)));
    if constexpr (tensor)
      return launch<TensorShared<T, P>>(tensor_kernel<T, P, N>, grid, kTensorThreads, stream, params, bias_aligned);
    else
      return launch<FloatShared>(float_kernel<T, N>, grid, kFloatThreads, stream, params, bias_aligned);
  };
  return s.channels % kVector<T> == 0 && all_aligned<T>(s) ? with_vector(std::integral_constant<int, vector>{})
                                                           : with_vector(std::integral_constant<int, 1>{});
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_aft_full_workspace(const aft::AftFull* params) {
  using namespace aft::cuda;
  return maxima_bytes(*params) + (multiplies_float32(*params) ? totals_bytes(*params) : 0);
}

int aft_cuda_aft_full(const aft::AftFull* params, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (is_empty(*params)) return 0;
  const auto call = strided(*params);
  return with_product(call, [&](auto element, auto product) {
    return run<decltype(product), decltype(element)>(call, workspace, stream);
  });
}
