// The sums over all keys before and after the windows of a tile of rows, for AFT-local and AFT-conv.
//
// Computes: two triples (maximum, numerator, denominator) for a tile of kWindowRows rows from t on: of the keys before
//           and after its span [t - left, t + kWindowRows + right).
// Cost:     beyond the one reading of k and v: 12 bytes written, 24 read and 24 written per piece and channel, two
//           pieces every 128 tokens: 0.94 bytes per token and channel at 128 rows, two thirds of it in causal form.
// Method:   the sequence is cut where some tile's span begins or ends, so these triples are sums of whole pieces: one
//           launch sums the pieces, and window_scan.cuh scans them from both ends. Where pieces are few, tiles add them
//           up themselves, which costs less than a launch.
// Numerics: every term is positive, nothing is subtracted.
#pragma once

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "kernels.h"
#include "sums/running_softmax.cuh"
#include "sums/window_scan.cuh"

namespace aft::cuda {

constexpr int kWindowRows = 128;  // of a tile
constexpr int kSumThreads = 128;
constexpr int kSumWarps = kSumThreads / kWarp;
constexpr int kSumInFlight = 8;
constexpr int kUnscannedPieces = 9;

// Piece i is the keys [cut(i - 1), cut(i)) that count; some pieces are empty.
struct WindowSums : PieceSums {
  int64_t left, right, tokens, low, high;

  WindowSums(const StridedSequence& s, int64_t left, int64_t right, void* memory)
      : PieceSums(s.batch, s.channels, static_cast<int>(2 * ceil_div<int64_t>(s.tokens, kWindowRows) + 1), s.causal,
                  memory),
        left(left),
        right(right),
        tokens(s.tokens) {
    const int64_t begin = (kWindowRows - left % kWindowRows) % kWindowRows, end = right % kWindowRows;
    low = begin < end ? begin : end;
    high = begin < end ? end : begin;
  }

  bool scanned() const { return pieces > kUnscannedPieces; }

  __device__ __forceinline__ int64_t cut(int i) const {
    return i < 0 ? 0 : static_cast<int64_t>(i / 2) * kWindowRows + (i % 2 ? high : low);
  }

  // Returns the number of pieces before a key, which is a cut between pieces or outside of the sequence.
  __device__ __forceinline__ int pieces_before(int64_t key) const {
    if (key <= 0) return 0;
    if (key >= tokens) return pieces;
    return static_cast<int>(key / kWindowRows * 2) + (key % kWindowRows == low ? 1 : 2);
  }

  // Returns the sums of the pieces [from, to), before the scan.
  __device__ __forceinline__ RunningSum of_pieces(int64_t b, int from, int to, int64_t channel) const {
    RunningSum sum = RunningSum::empty();
    for (int i = from; i < to; ++i) sum.merge(before[record(b, i + 1, channel)]);
    return sum;
  }
};

// The sums of one channel for the tile of rows from t on.
struct Outside {
  RunningSum sum;  // of the keys outside the span, those after it only if not causal
  float maximum;   // at least every key of the span

  __device__ __forceinline__ Outside(const WindowSums& w, int64_t b, int64_t t, int64_t channel) {
    const int begin = w.pieces_before(t - w.left), end = w.pieces_before(t + kWindowRows + w.right);
    if (w.pieces > kUnscannedPieces) {
      sum = w.before[w.record(b, begin, channel)];
      if (!w.causal) sum.merge(w.after[w.record(b, end, channel)]);
      maximum = w.before[w.record(b, end, channel)].maximum;
    } else {
      sum = w.of_pieces(b, 0, begin, channel);
      if (!w.causal) sum.merge(w.of_pieces(b, end, w.pieces, channel));
      maximum = w.of_pieces(b, begin, end, channel).maximum;
    }
  }
};

// A thread sums one piece of N channels, whose keys are N channels too or, in AFT-conv, the one of their head.
// Warps beyond those call prepare(item), items [0, prepare.items), which is the mechanism's own.
template <class T, int N, int kKeys, class Prepare>
__global__ void __launch_bounds__(kSumThreads, 3)
    sum_pieces_kernel(const StridedSequence s, const WindowSums w, const int64_t channels_per_key, const int64_t blocks,
                      const Prepare prepare) {
  if (blockIdx.x >= blocks) {
    const int64_t item = (blockIdx.x - blocks) * kSumWarps + threadIdx.x / kWarp;
    if (item < prepare.items) prepare(item);
    return;
  }
  const int64_t vectors = w.channels / N, index = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  const int64_t channel = index % vectors * N, b = index / vectors / w.pieces;
  const int piece = static_cast<int>(index / vectors % w.pieces);
  if (b >= s.batch) return;
  const int64_t length = length_of(s, b), begin = w.cut(piece - 1), cut = w.cut(piece);
  const int64_t end = cut < length ? cut : length;

  float maximum[kKeys], denominator[kKeys], numerator[N];
#pragma unroll
  for (int k = 0; k < kKeys; ++k) maximum[k] = kNoKey, denominator[k] = 0.0f;
#pragma unroll
  for (int c = 0; c < N; ++c) numerator[c] = 0.0f;
  const T* keys = row<T>(s.key, b, 0) + channel / channels_per_key;
  const T* values = row<T>(s.value, b, 0) + channel;
  for (int64_t u = begin; u < end; u += kSumInFlight) {
    Raw<T, kKeys> key[kSumInFlight];
    Raw<T, N> value[kSumInFlight];
#pragma unroll
    for (int i = 0; i < kSumInFlight; ++i)
      if (u + i < end) {
        key[i] = Raw<T, kKeys>(keys + (u + i) * s.key.token_stride);
        value[i] = Raw<T, N>(values + (u + i) * s.value.token_stride);
      }
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const float from = maximum[k];
#pragma unroll
      for (int i = 0; i < kSumInFlight; ++i)
        if (u + i < end) maximum[k] = fmaxf(maximum[k], key[i][k]);
      const float rescale = machine::fast_exp(from - maximum[k]);
      denominator[k] *= rescale;
#pragma unroll
      for (int c = k; c < N; c += kKeys) numerator[c] *= rescale;
#pragma unroll
      for (int i = 0; i < kSumInFlight; ++i)
        if (u + i < end) {
          const float weight = machine::fast_exp(key[i][k] - maximum[k]);
          denominator[k] += weight;
#pragma unroll
          for (int c = k; c < N; c += kKeys) numerator[c] += weight * value[i][c];
        }
    }
  }
  Records<N> sum;
#pragma unroll
  for (int c = 0; c < N; ++c) sum.sums[c] = {maximum[c % kKeys], numerator[c], denominator[c % kKeys]};
  sum.store(w.before + w.record(b, piece + 1, channel));
  if (piece == 0) Records<N>::empty().store(w.before + w.record(b, 0, channel));
}

// The launches before the mechanism's own.
template <class T, int N, int kKeys, class Prepare>
int sum_outside(const StridedSequence& s, const WindowSums& w, int64_t channels_per_key, const Prepare& prepare,
                cudaStream_t stream) {
  const int64_t blocks = ceil_div<int64_t>(s.batch * w.pieces * (s.channels / N), kSumThreads);
  const dim3 grid(static_cast<unsigned>(blocks + ceil_div<int64_t>(prepare.items, kSumWarps)));
  if (const int status = launch(sum_pieces_kernel<T, N, kKeys, Prepare>, grid, kSumThreads, stream, s, w,
                                channels_per_key, blocks, prepare))
    return status;
  return w.scanned() ? scan_pieces<N>(w, stream) : 0;
}

// Adds the sums of the other keys to those of the span, numerator and denominator relative to exp(key + bias).
// A denominator too small to be trusted may have lost more than rounding in the span.
struct Total {
  float mine, theirs;

  __device__ __forceinline__ Total(float key, float bias, const RunningSum& others) {
    const float difference = key - others.maximum + bias, factor = machine::fast_exp(-fabsf(difference));
    mine = difference < 0.0f ? factor : 1.0f;
    theirs = difference < 0.0f ? 1.0f : factor;
  }
  __device__ __forceinline__ float of(float span, float others) const { return span * mine + others * theirs; }
  __device__ __forceinline__ bool trusted(float denominator, float least) const { return denominator >= least * mine; }
};

// Below this, relative to the largest key and the largest bias (which need not meet), float32 may have lost terms
// to underflow; above it the lost terms, at most 2^-126 per key, are below rounding.
constexpr float kTrustedDenominator = 1e-25f;

}  // namespace aft::cuda
