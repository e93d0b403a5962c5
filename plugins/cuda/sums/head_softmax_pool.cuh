// Pooling of token rows with one softmax per head.
//
// Computes: the means of the head's own channels, weighted by the softmax of logits that read the whole row.
// Method:   a block works on a chunk of kPoolTokens tokens, a slab of kSlab channels at a time, each thread with a
//           piece of kPieceTokens tokens x kPiece channels of it. A chunk's sums go to the workspace; chunks are merged
//           by kernels of their own (pool_merge.cuh).
// Numerics: a chunk's sums are relative to its largest logit. The running mean of a causal form is
//             mean_t = mean_{t-1} + share_t (x_t - mean_{t-1}),  share_t = exp(logit_t - log sum_{u<=t} exp(logit_u)):
//           every step is between two numbers of the input's size, for all logits.
#pragma once

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "sums/running_softmax.cuh"

namespace aft::cuda {

constexpr int kPoolThreads = 256;
constexpr int kPoolTokens = 64;
constexpr int kSlab = 64;
constexpr int kPiece = 4;
constexpr int kPieceTokens = 4;
constexpr int kSegments = kPoolTokens / kPieceTokens;

// Sums of chunks, or of groups of chunks: [batch, chunks, channels] and twice [batch, chunks, heads].
struct PoolRecords {
  float *sums, *denominators, *maxima;
};

// The results of one pooling, in the workspace.
struct Pool {
  PoolRecords chunks;
  PoolRecords groups;  // of chunks, where there are many
  PoolRecords before;  // of all chunks before each, after a scan; its sums are means, in place of those of `chunks`
  float* means;        // [batch, channels], of everything
  float* logits;       // [batch, tokens, heads]; later the shares
};

struct PoolParams {
  StridedSequence sequence;
  int heads, width;   // channels of a head
  int chunks, chunk;  // chunks of a document, tokens of a chunk
  bool vectors;       // every piece of kPiece channels is aligned to its size
  Pool query, product;
};

// The thread's piece of a slab, and the chunk.
struct PoolPlace {
  int64_t batch;
  int chunk, first, rows, counted;  // the chunk's first token, tokens there are, and that count
  int segment = threadIdx.x / (kSlab / kPiece), token = segment * kPieceTokens;
  int column = threadIdx.x % (kSlab / kPiece) * kPiece;

  __device__ PoolPlace(const PoolParams& p, unsigned index) {
    const StridedSequence& s = p.sequence;
    chunk = static_cast<int>(index % p.chunks);
    batch = index / p.chunks;
    first = chunk * kPoolTokens;
    const int left = static_cast<int>(s.tokens) - first, valid = static_cast<int>(length_of(s, batch)) - first;
    rows = left < kPoolTokens ? left : kPoolTokens;
    counted = valid < 0 ? 0 : valid < rows ? valid : rows;
  }
};

using PieceOfFloats = float[kPieceTokens][kPiece];

// The piece at channel `channel`; 0 where tokens do not count or channels end.
template <class T>
__device__ __forceinline__ void load_piece(PieceOfFloats& x, const PoolParams& p, const StridedTensor& tensor,
                                           const PoolPlace& place, int channel) {
  Raw<T, kPiece> raw[kPieceTokens];
#pragma unroll
  for (int i = 0; i < kPieceTokens; ++i) {
    raw[i].words = {};
    if (place.token + i >= place.counted || channel >= p.sequence.channels) continue;
    const T* from = row<T>(tensor, place.batch, place.first + place.token + i) + channel;
    if (p.vectors) {
      raw[i] = Raw<T, kPiece>(from);
    } else {
#pragma unroll
      for (int c = 0; c < kPiece; ++c)
        if (channel + c < p.sequence.channels) raw[i].elements[c] = from[c];
    }
  }
#pragma unroll
  for (int i = 0; i < kPieceTokens; ++i)
#pragma unroll
    for (int c = 0; c < kPiece; ++c) x[i][c] = raw[i][c];
}

// The head of a channel, or of the last channel beyond it.
__device__ __forceinline__ int head_of(const PoolParams& p, int channel) {
  const int head = channel / p.width;
  return head < p.heads ? head : p.heads - 1;
}

struct ScanShared {
  alignas(16) float mean[kSegments][kSlab], kept[kSegments][kSlab];
};

// x becomes its running means with the pool's shares; all threads of the block together.
__device__ __forceinline__ void scan_means(PieceOfFloats& x, const PoolParams& p, const Pool& pool,
                                           const PoolPlace& place, int channel, ScanShared& shared) {
  const StridedSequence& s = p.sequence;
  PieceOfFloats share;
#pragma unroll
  for (int c = 0; c < kPiece; ++c) {
    const int head = head_of(p, channel + c);
    float mean = 0.0f, kept = 1.0f;
#pragma unroll
    for (int i = 0; i < kPieceTokens; ++i) {
      const int t = place.first + place.token + i;
      share[i][c] = place.token + i < place.counted ? pool.logits[(place.batch * s.tokens + t) * p.heads + head] : 0.0f;
      mean += share[i][c] * (x[i][c] - mean);
      kept *= 1.0f - share[i][c];
    }
    shared.mean[place.segment][place.column + c] = mean;
    shared.kept[place.segment][place.column + c] = kept;
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kPiece; ++c) {
    const int64_t before = (place.batch * p.chunks + place.chunk) * s.channels + channel + c;
    float mean = channel + c < s.channels ? pool.before.sums[before] : 0.0f;
    for (int segment = 0; segment < place.segment; ++segment)
      mean = mean * shared.kept[segment][place.column + c] + shared.mean[segment][place.column + c];
#pragma unroll
    for (int i = 0; i < kPieceTokens; ++i) {
      mean += share[i][c] * (x[i][c] - mean);
      x[i][c] = mean;
    }
  }
  __syncthreads();
}

// One warp a head and chunk: from logits to shares, two tokens a lane.
__device__ __forceinline__ void share_logits(const PoolParams& p, const Pool& pool) {
  const StridedSequence& s = p.sequence;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kPoolThreads / kWarp) + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const bool active = index < s.batch * p.chunks * p.heads;
  const int64_t used = active ? index : 0, head = used % p.heads;
  const PoolPlace place(p, static_cast<unsigned>(used / p.heads));
  float* logits = pool.logits + (place.batch * s.tokens + place.first) * p.heads + head;

  RunningSum own[2], all = RunningSum::empty();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    own[i] = RunningSum::empty();
    if (active && token < place.counted) own[i] = {logits[static_cast<int64_t>(token) * p.heads], 0.0f, 1.0f};
    all.merge(own[i]);
  }
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const RunningSum above = shuffle_up(all, distance);
    if (lane >= distance) all.merge(above);
  }
  all = shuffle_up(all, 1);
  if (lane == 0) all = RunningSum::empty();
  all.merge({pool.before.maxima[used], 0.0f, pool.before.denominators[used]});
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    if (!active || token >= place.counted) continue;
    all.merge(own[i]);
    logits[static_cast<int64_t>(token) * p.heads] = machine::fast_exp(own[i].maximum - all.maximum) / all.denominator;
  }
}

}  // namespace aft::cuda
