// AFT-conv (Zhai et al., arXiv 2105.14103, equation 6), heads of width d with one key channel and one filter of s taps
// each.
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,h] + w'[t,u]) V[u,c] / sum_u exp(K[u,h] + w'[t,u])    causal: u <= t
//           where h is the head of c, w'[t,u] = filter[h, u - t + left] inside the filter and 0 outside of it; left is
//           (s-1)/2 ("same" padding) or s-1 in causal form.
// Cost:     floor: 3BTD elements moved (q, v and y; keys are few). Taken: 4BTD, since v is summed in a launch of its
//           own before any row is computed, and (s-1) / 128 of another BTD for the keys that neighboring tiles share.
//           The second readings come mostly from the second-level cache where a batch fits it. In 16 bits, a product of
//           128 rows with the 127 + s keys of their span costs little beside that. In float32, bound by memory to about
//           s = 30, from there by multiply-adds: 2BTD s of them, and 1/4 of that for the denominators.
// Method:   sums/window_sums.cuh has the sums outside the span of a tile of 128 rows. 16-bit heads of 32 channels and
//           more take aft_conv_product.cuh. Here, the span goes through shared memory once, in panels of 64 keys, as
//           exp(K - m) V and, once for every four channels, exp(K - m). A thread has 8 rows of 4 channels, all of one
//           head, and takes keys in blocks of 8. Blocks within the windows of its rows are multiplied, 8 x 8, by 15
//           weights that depend only on the distance of row and key. All other blocks, of weight exp(0), come as sums
//           that the block of threads shares. The weights are a table of the filter widened at both ends by exp(0),
//           computed once for each head. Heads whose width is not a multiple of 4, and unaligned rows, take one
//           channel a thread.
// Numerics: every term is positive. Cells whose denominator is too small to be trusted are summed again by the
//           definition.
// Rejected: (exp(w) - 1) in the window plus the sum over all keys cancels. The whole span in shared memory would bound
//           s. Tensor cores have too few digits for float32.
// See:      aft_conv_product.cuh, aft_conv_table.cuh, sums/window_sums.cuh, sums/gate.cuh

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "kernels.h"
#include "mechanisms/aft_conv_product.cuh"
#include "mechanisms/aft_conv_table.cuh"
#include "sums/gate.cuh"
#include "sums/window_scan.cuh"
#include "sums/window_sums.cuh"

namespace aft::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 16;  // threads side by side
constexpr int kRows = kWindowRows, kPanel = 64;
constexpr int kBlock = kConvBlock;
constexpr int kPanelBlocks = kPanel / kBlock;
constexpr int kLeastProductWidth = 32;  // tensor cores take 64 channels of a head at once

// The sums outside the span, one panel of the span and the sums of its blocks.
template <int N>
struct Shared {
  alignas(16) float products[kPanel][kColumns * N];  // exp(K - m) V
  alignas(16) float product_sums[kPanelBlocks][kColumns * N];
  float weights[kPanel][kColumns];  // exp(K - m)
  float weight_sums[kPanelBlocks][kColumns];
  RunningSum outside[kColumns * N];
  float maximum[kColumns * N];  // m, the same for the N channels of a thread
};

// The block's rows and the thread's channels.
template <int N>
struct Tile {
  int column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  int batch, channel, head;
  int64_t first, length, origin;  // origin: the key of span index 0, perhaps negative
  int begin, end;                 // of the span, the part that counts; begin a multiple of kBlock
  bool active;

  __device__ __forceinline__ explicit Tile(const ConvParams& p) {
    channel = (static_cast<int>(blockIdx.x % p.groups) * kColumns + column) * N;
    first = static_cast<int64_t>(blockIdx.x / p.groups % p.tiles) * kRows;
    batch = static_cast<int>(blockIdx.x / p.groups / p.tiles);
    length = length_of(p.call.sequence, batch);
    active = channel < p.call.sequence.channels;
    head = active ? channel / static_cast<int>(p.width) : 0;
    origin = first - p.table.left;
    const int64_t span = kRows + p.table.taps - 1, last = length - origin;
    begin = origin < 0 ? static_cast<int>(-origin / kBlock * kBlock) : 0;
    end = static_cast<int>(last < span ? last : span);
  }

  __device__ __forceinline__ bool counts(int index) const { return active && index < end && origin + index >= 0; }
};

// A panel's keys and values on their way: those of keys group, group + kThreads / kColumns, ...
template <class T, int N>
struct Panel {
  static constexpr int kApart = kThreads / kColumns, kLoads = kPanel / kApart;
  T key[kLoads];
  Raw<T, N> value[kLoads];

  __device__ __forceinline__ void load(const ConvParams& p, const Tile<N>& tile, int index) {
    const StridedSequence& s = p.call.sequence;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = index + tile.group + i * kApart;
      if (!tile.counts(at)) continue;
      key[i] = row<T>(s.key, tile.batch, tile.origin + at)[tile.head];
      value[i] = Raw<T, N>(row<T>(s.value, tile.batch, tile.origin + at) + tile.channel);
    }
  }

  __device__ __forceinline__ void store_to(Shared<N>& shared, const Tile<N>& tile, int index) const {
    const float maximum = shared.maximum[tile.column * N];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = tile.group + i * kApart;
      float weight = 0.0f, product[N] = {};
      if (tile.counts(index + at)) {
        weight = machine::fast_exp(to_float(key[i]) - maximum);
#pragma unroll
        for (int c = 0; c < N; ++c) product[c] = weight * value[i][c];
      }
      shared.weights[at][tile.column] = weight;
      store(&shared.products[at][tile.column * N], product);
    }
  }
};

// Each of the panel's blocks is summed by some threads.
template <int N>
__device__ __forceinline__ void sum_blocks(Shared<N>& shared, const Tile<N>& tile) {
  if (tile.group >= kPanelBlocks) return;
  float weight = 0.0f, product[N] = {};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const int key = tile.group * kBlock + i;
    weight += shared.weights[key][tile.column];
    const Raw<float, N> products(&shared.products[key][tile.column * N]);
#pragma unroll
    for (int c = 0; c < N; ++c) product[c] += products[c];
  }
  shared.weight_sums[tile.group][tile.column] = weight;
  store(&shared.product_sums[tile.group][tile.column * N], product);
}

// A thread's rows, relative to exp(m + the head's largest bias).
template <int N>
struct Sums {
  float numerator[kBlock][N] = {}, denominator[kBlock] = {};
  float outside_numerator[N] = {}, outside_denominator = 0.0f;  // of keys with bias 0 in all rows, before its weight

  // Adds a block of keys. Its 15 distances have their weights in the 16 floats at `weights`.
  __device__ __forceinline__ void add(const Shared<N>& shared, const Tile<N>& tile, int block, const float* weights) {
    float weight[2 * kBlock];
#pragma unroll
    for (int i = 0; i < 2 * kBlock; i += 4) {
      const Raw<float, 4> four(weights + i);
#pragma unroll
      for (int k = 0; k < 4; ++k) weight[i + k] = four[k];
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int key = block * kBlock + i;
      const Raw<float, N> products(&shared.products[key][tile.column * N]);
      const float own = shared.weights[key][tile.column];
#pragma unroll
      for (int r = 0; r < kBlock; ++r) {
        denominator[r] += weight[i - r + kBlock - 1] * own;
#pragma unroll
        for (int c = 0; c < N; ++c) numerator[r][c] += weight[i - r + kBlock - 1] * products[c];
      }
    }
  }

  __device__ __forceinline__ void add_outside(const Shared<N>& shared, const Tile<N>& tile, int block) {
    outside_denominator += shared.weight_sums[block][tile.column];
    const Raw<float, N> products(&shared.product_sums[block][tile.column * N]);
#pragma unroll
    for (int c = 0; c < N; ++c) outside_numerator[c] += products[c];
  }
};

// Each thread has one channel.
template <int N>
__device__ __forceinline__ void load_outside(Shared<N>& shared, const ConvParams& p, const Tile<N>& tile) {
  const int thread = threadIdx.x;
  const int channel = tile.channel - tile.column * N + thread;
  if (thread >= kColumns * N || channel >= p.call.sequence.channels) return;
  const Outside outside(p.sums, tile.batch, tile.first, channel);
  shared.outside[thread] = outside.sum;
  shared.maximum[thread] = outside.maximum;
}

// Adds the sums outside the span, and gates.
template <class T, Gate gate, int N>
__device__ __forceinline__ void epilogue(const ConvParams& p, const Tile<N>& tile, const Sums<N>& sums,
                                         const Shared<N>& shared) {
  const StridedSequence& s = p.call.sequence;
  const RunningSum* outside = &shared.outside[tile.column * N];
  const float largest_bias = p.table.largest_bias[tile.head], zero_bias = machine::fast_exp(-largest_bias);
  // All channels of a head share its denominators and maxima.
  const Total total(shared.maximum[tile.column * N], largest_bias, outside[0]);
  const int64_t first = tile.first + tile.group * kBlock;
  T* output = static_cast<T*>(s.output) + (tile.batch * s.tokens + first) * s.channels + tile.channel;
  unsigned untrusted = 0;  // rows to be summed again
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    if (first + r >= s.tokens) break;
    const Raw<T, N> query(row<T>(s.query, tile.batch, first + r) + tile.channel);
    const float span = sums.denominator[r] + sums.outside_denominator * zero_bias;
    const float denominator = total.of(span, outside[0].denominator);
    const bool counts = first + r < tile.length;
    if (counts && !total.trusted(denominator, kTrustedDenominator)) untrusted |= 1u << r;
    float y[N];
#pragma unroll
    for (int c = 0; c < N; ++c) {
      const float numerator =
          total.of(sums.numerator[r][c] + sums.outside_numerator[c] * zero_bias, outside[c].numerator);
      // A later NaN or infinite value has weight 0, which does not clear it. The exact mean does not read it.
      if (p.sums.causal && counts && numerator != numerator) untrusted |= 1u << r;
      const float mean = machine::fast_divide(numerator, fmaxf(denominator, kTrustedDenominator));
      y[c] = gated<gate>(query[c], counts ? mean : 0.0f);
    }
    store(output + r * s.channels, y);
  }
#pragma unroll 1
  for (int r = 0; untrusted != 0; ++r, untrusted >>= 1)
    if (untrusted & 1) {
      const Raw<T, N> query(row<T>(s.query, tile.batch, first + r) + tile.channel);
      float y[N];
#pragma unroll
      for (int c = 0; c < N; ++c)
        y[c] = gated<gate>(query[c], exact_conv_mean<T>(p, tile.batch, tile.head, tile.origin, tile.origin + tile.end,
                                                        first + r, tile.channel + c, outside[c]));
      store(output + r * s.channels, y);
    }
}

template <class T, int N, Gate gate>
__global__ void __launch_bounds__(kThreads, 2) tile_kernel(const ConvParams p) {
  auto& shared = shared_memory<Shared<N>>();
  const Tile<N> tile(p);
  load_outside(shared, p, tile);
  __syncthreads();
  const float* table = p.table.weights + tile.head * p.table.pitch;
  const int last_block = p.table.last_block();
  Sums<N> sums;
  Panel<T, N> panel;
  const int begin = tile.length > tile.first ? tile.begin : tile.end;
  if (begin < tile.end) panel.load(p, tile, begin);
  for (int index = begin; index < tile.end; index += kPanel) {
    panel.store_to(shared, tile, index);
    __syncthreads();
    if (index + kPanel < tile.end) panel.load(p, tile, index + kPanel);
    sum_blocks(shared, tile);
    // The index of the panel's first block, relative to the thread's own block.
    const int from = index / kBlock - tile.group;
    const int blocks = ceil_div(tile.end - index < kPanel ? tile.end - index : kPanel, kBlock);
#pragma unroll 1
    for (int block = from < 0 ? -from : 0; block < blocks && from + block <= last_block; ++block)
      sums.add(shared, tile, block, table + (from + block) * kBlock);
    __syncthreads();
#pragma unroll 1
    for (int block = 0; block < blocks && from + block < 0; ++block) sums.add_outside(shared, tile, block);
    if (!p.sums.causal)
#pragma unroll 1
      for (int block = from > last_block ? 0 : last_block + 1 - from; block < blocks; ++block)
        sums.add_outside(shared, tile, block);
  }
  if (tile.active) epilogue<T, gate>(p, tile, sums, shared);
}

// The kernels that compute the tiles.
enum Way { kSingle, kVectors, kTensorCores };

template <class T, Way way>
int run(const Strided<AftConv>& call, void* workspace, cudaStream_t stream) {
  constexpr int N = way == kSingle ? 1 : 4;
  const StridedSequence& s = call.sequence;
  const ConvTable table(call, way == kTensorCores, workspace);
  const WindowSums sums(s, table.left, table.right, static_cast<unsigned char*>(workspace) + table.bytes(call.heads));
  const int64_t width = s.channels / call.heads, tiles = ceil_div<int64_t>(s.tokens, kWindowRows);
  if (const int status = sum_outside<T, N, 1>(s, sums, width, FillTable<T>{call, table, call.heads}, stream))
    return status;
  const int64_t groups = way == kTensorCores ? call.heads * ceil_div<int64_t>(width, kConvChannels)
                                             : ceil_div<int64_t>(s.channels, kColumns * N);
  const ConvParams params{call, sums, table, width, static_cast<int>(groups), static_cast<int>(tiles)};
  const dim3 grid(static_cast<unsigned>(groups * tiles * s.batch));
  return with_gate(call.gate, [&](auto gate) {
    if constexpr (way == kTensorCores)
      return launch<ConvShared<T>>(product_kernel<T, gate.value>, grid, kConvThreads, stream, params);
    else
      return launch<Shared<N>>(tile_kernel<T, N, gate.value>, grid, kThreads, stream, params);
  });
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_aft_conv_workspace(const aft::AftConv* params) {
  using namespace aft::cuda;
  const auto call = strided(*params, params->heads);
  const ConvTable table(call, true, nullptr);  // the larger one
  return table.bytes(call.heads) + WindowSums(call.sequence, table.left, table.right, nullptr).bytes();
}

int aft_cuda_aft_conv(const aft::AftConv* params, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (is_empty(*params)) return 0;
  const auto call = strided(*params, params->heads);
  const StridedSequence& s = call.sequence;
  return with_element(s.element, [&](auto element) {
    using T = decltype(element);
    const int64_t width = s.channels / call.heads;
    // The alignment of the keys does not matter: they are not read by vectors.
    const bool vectors = width % 4 == 0 && rows_aligned<T>(s.query) && rows_aligned<T>(s.value) &&
                         rows_aligned<T>({s.output, s.tokens * s.channels, s.channels});
    if constexpr (sizeof(T) == 2)
      if (vectors && width % 8 == 0 && width >= kLeastProductWidth)
        return run<T, kTensorCores>(call, workspace, stream);
    return vectors ? run<T, kVectors>(call, workspace, stream) : run<T, kSingle>(call, workspace, stream);
  });
}
