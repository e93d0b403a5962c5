// Context matrices of heads, S = sum_t key_t value_t^T: their sizes, their place in the workspace, and how their work
// is cut. Passes with bfloat16 operands are in head_tensor_passes.cuh, those with tf32 operands in head_passes.cuh.
#pragma once

#include "device/block_product.cuh"
#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "device/tile_rows.cuh"
#include "sums/running_softmax.cuh"

namespace aft::cuda {

// Sizes by the head's width rounded up to kWidth, 32, 64, 128 or 256.
template <int kWidth>
struct HeadSizes {
  static constexpr int kValues = kWidth <= 64 ? kWidth : kWidth == 128 ? 64 : 32;  // columns of S in a block
  static constexpr int kSlices = kWidth / kValues;
  static constexpr int kTokens = kWidth <= 128 ? 32 : 16;       // keys in a tile
  static constexpr int kCausalTokens = kWidth <= 64 ? 32 : 16;  // keys and queries in a tile
  static constexpr int kQueries = kWidth <= 64 ? 64 : 32;       // queries in a tile where there are no keys
  static constexpr int kGroups = kBlockThreads / kWidth;        // of threads that share a key channel
};

// The parameters of the kernels: the call, the mechanism's own, and the cut.
template <class Mechanism>
struct HeadParams {
  StridedSequence sequence;
  Mechanism mechanism;
  int heads, width;  // channels of a head
  int chunk;         // tokens
  int chunks;
  bool vectors;  // every head's row starts at a multiple of 16 bytes
  float* states;
};

template <class T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;

// Keys may exceed the reference of their channel by this much. The exponential of this number, times any realistic
// value and number of tokens, stays in the range of float32.
constexpr float kSafeSpread = 40.0f;

// Whether the passes with bfloat16 operands are exact enough. Not for float16 results that are not averages: near 65504
// an error of bfloat16 would decide whether they are infinite.
template <class T, class Mechanism>
constexpr bool kBfloat = sizeof(T) == 2 && (Mechanism::kAverages || kIsBFloat16<T>);

// Chunks that a head has at most, and blocks or so that a launch should have.
constexpr int kMostChunks = 512;

// S [kWidth, kWidth], then per key channel the sum of the weights and the maximum they are relative to.
__host__ __device__ constexpr int64_t state_floats(int64_t width) { return width * (width + 2); }

// Which tokens of which head, and which columns of S, the block works on.
template <int kWidth>
struct HeadPlace {
  int batch, begin, end, length;  // tokens of the chunk; keys of the document
  int head, chunk, first_value;   // the slice's first channel in the head
  float* state;                   // of the chunk

  // A launch may leave out the last chunk, so it passes its own number of chunks.
  template <class Mechanism>
  __device__ HeadPlace(const HeadParams<Mechanism>& p, int chunks) {
    constexpr int kSlices = HeadSizes<kWidth>::kSlices;
    const unsigned slice = blockIdx.x % kSlices, rest = blockIdx.x / kSlices;
    head = rest % p.heads;
    chunk = rest / p.heads % chunks;
    batch = rest / p.heads / chunks;
    first_value = slice * HeadSizes<kWidth>::kValues;
    begin = chunk * p.chunk;
    const int tokens = static_cast<int>(p.sequence.tokens);
    end = begin + p.chunk < tokens ? begin + p.chunk : tokens;
    length = static_cast<int>(length_of(p.sequence, batch));
    state = p.states + ((batch * p.heads + head) * p.chunks + chunk) * state_floats(kWidth);
  }
};

// Sums over neighboring lanes.
template <int kLanes>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Returns the maximum number of chunks: about `blocks` blocks have work, and no chunk is smaller than its state.
inline int64_t most_chunks(int64_t tokens, int64_t heads, int64_t width, int64_t slices, int64_t blocks) {
  const int64_t least_chunk = width < 128 ? 256 : 2 * width;
  const int64_t most = ceil_div(tokens, least_chunk), wanted = ceil_div(blocks, heads * slices);
  return most < wanted ? most : wanted;
}

inline int64_t round_width(int64_t width) { return width <= 32 ? 32 : width <= 64 ? 64 : width <= 128 ? 128 : 256; }

inline size_t head_workspace(const Sequence& s, int64_t heads) {
  const int64_t all_heads = s.batch * heads;
  if (all_heads * s.tokens * s.channels == 0) return 0;
  const int64_t width = round_width(s.channels / heads);
  // A bound for all numbers of heads, because the workspace must not shrink where the shapes grow.
  const int64_t states = all_heads * ceil_div<int64_t>(s.tokens, 256);
  const int64_t most = all_heads + kMostChunks;
  return sizeof(float) * state_floats(width) * (states < most ? states : most);
}

template <int value_>
struct Width {
  static constexpr int value = value_;
};

// Calls f with the width rounded up to one that the kernels are compiled for; returns the result of f.
template <class F>
int with_width(int64_t width, const F& f) {
  if (width > kMaxHeadChannels) return 1;  // cudaErrorInvalidValue
  switch (round_width(width)) {
    case 32: return f(Width<32>{});
    case 64: return f(Width<64>{});
    case 128: return f(Width<128>{});
  }
  return f(Width<256>{});
}

}  // namespace aft::cuda
