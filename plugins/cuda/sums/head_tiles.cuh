// Tiles of tokens of one head for tensor cores with bfloat16 operands: on the way from global to shared memory, made
// weights there, and read as fragments.
//
// A block has 4 warps, and a tile 64 tokens. A warp copies, converts and writes the 16 rows that it multiplies as
// queries, so that only keys and values need barriers of the block. A thread converts the 16 bytes that it copied
// itself. Rows are 16 bytes longer than a multiple of 64, which puts the 8 rows of a matrix that ldmatrix reads into
// different banks.
//
// Numerics: float16 tensors are rounded to bfloat16, too: its range holds every weight without scaling. Sums are
// float32.
#pragma once

#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "sums/head_context.cuh"

namespace aft::cuda {

constexpr int kTensorThreads = 128;
constexpr int kTensorWarps = kTensorThreads / kWarp;
constexpr int kTileTokens = 64;
constexpr int kWarpTokens = kTileTokens / kTensorWarps;

template <int kColumns>
using HeadTile = BFloat16[kTileTokens][kColumns + 8];

// The pieces of 8 channels of the warp's rows that are this lane's, all in the same channels.
template <int kColumns>
struct WarpPieces {
  static constexpr int kPerRow = kColumns / 8, kRowsApart = kWarp / kPerRow, kMine = kWarpTokens / kRowsApart;
  int row = threadIdx.x / kWarp * kWarpTokens + threadIdx.x % kWarp / kPerRow, column = threadIdx.x % kPerRow * 8;
};

// Copies rows first to first + count of the tensor, from `channel` on, into the warp's rows; 0 beyond them and beyond
// `columns`. Aligned pieces arrive with the thread's group of asynchronous copies.
template <class T, int kColumns>
__device__ __forceinline__ void copy_rows(HeadTile<kColumns>& tile, const StridedTensor& tensor, int batch, int first,
                                          int count, int channel, int columns, bool vectors) {
  using Pieces = WarpPieces<kColumns>;
  const Pieces pieces;
  const T* from = row<T>(tensor, batch, first + pieces.row) + channel + pieces.column;
  const int64_t apart = Pieces::kRowsApart * tensor.token_stride;
  const int rows = pieces.column < columns ? count - pieces.row : 0;
  if (vectors) {
#pragma unroll 4
    for (int i = 0; i < Pieces::kMine; ++i, from += apart)
      async_copy(&tile[pieces.row + i * Pieces::kRowsApart][pieces.column], from,
                 i * Pieces::kRowsApart < rows ? 16 : 0);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < Pieces::kMine; ++i, from += apart) {
    Raw<T, 8> raw;
    raw.words = {};
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (i * Pieces::kRowsApart < rows && pieces.column + k < columns) raw.elements[k] = from[k];
    machine::store(&tile[pieces.row + i * Pieces::kRowsApart][pieces.column], raw.words);
  }
}

// Replaces the pieces that this thread copied by bfloat16 numbers: change(row, x) changes eight floats of a row.
template <class T, int kColumns, class Change>
__device__ __forceinline__ void convert_rows(HeadTile<kColumns>& tile, const Change& change) {
  using Pieces = WarpPieces<kColumns>;
  const Pieces pieces;
#pragma unroll 4
  for (int i = 0; i < Pieces::kMine; ++i) {
    const int r = pieces.row + i * Pieces::kRowsApart;
    const Raw<T, 8> raw(reinterpret_cast<const T*>(&tile[r][pieces.column]));
    float x[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = raw[k];
    change(r, x);
    store(&tile[r][pieces.column], x);
  }
}

// Makes operands of values.
template <class T, int kColumns>
__device__ __forceinline__ void convert_values(HeadTile<kColumns>& tile) {
  if constexpr (!kIsBFloat16<T>) convert_rows<T, kColumns>(tile, [](int, float (&)[8]) {});
}

// Makes weights of the queries in the warp's rows. Sums of weights that divide a row go to row_sums.
template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ void weigh_queries(const HeadParams<Mechanism>& p, HeadTile<kWidth>& queries,
                                              float (&row_sums)[kTileTokens]) {
  using Pieces = WarpPieces<kWidth>;
  const int column = Pieces{}.column;
  convert_rows<T, kWidth>(queries, [&](int r, float (&x)[8]) {
    const float sum = p.mechanism.template compute_query_weights<Pieces::kPerRow>(x, column, 1, p.width);
    if (Mechanism::kSoftmax && column == 0) row_sums[r] = sum;
  });
}

// Makes weights of the keys in the warp's rows from `first` on, before `end`, and 0 of the others. Returns this
// thread's first row with a key too far above the reference of its channel, kTileTokens if it has none.
template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ int weigh_keys(const HeadParams<Mechanism>& p, HeadTile<kWidth>& keys,
                                          const float (&reference)[kWidth], int first, int end) {
  const int column = WarpPieces<kWidth>{}.column;
  float references[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) references[i] = Mechanism::kSoftmax ? reference[column + i] : 0.0f;
  int cut = kTileTokens;
  convert_rows<T, kWidth>(keys, [&](int r, float (&x)[8]) {
    const bool counts = r >= first && r < end;
    float highest = kNoKey;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (Mechanism::kSoftmax) {
        // The factor log2(e) stays apart: the rounded product of a large reference may lie far below its own key's,
        // whose row would be cut again without end.
        const float difference = x[i] - references[i];
        highest = fmaxf(highest, difference);
        x[i] = machine::fast_exp(difference);
      } else {
        x[i] = p.mechanism.compute_key_weight(x[i], 0.0f);
      }
      x[i] = counts ? x[i] : 0.0f;
    }
    if (counts && highest > kSafeSpread && r < cut) cut = r;
  });
  return cut;
}

// Clears the warp's rows from `first` on.
template <int kColumns>
__device__ __forceinline__ void clear_rows(HeadTile<kColumns>& tile, int first) {
  convert_rows<BFloat16, kColumns>(tile, [&](int r, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = r < first ? x[i] : 0.0f;
  });
}

// Publishes the warp's first row with a key too far above its reference; first_cut reads the block's after a barrier.
__device__ __forceinline__ void publish_cut(int (&cuts)[kTensorWarps], int cut) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int other = __shfl_xor_sync(~0u, cut, distance);
    cut = other < cut ? other : cut;
  }
  if (threadIdx.x % kWarp == 0) cuts[threadIdx.x / kWarp] = cut;
}
__device__ __forceinline__ int first_cut(const int (&cuts)[kTensorWarps]) {
  int cut = cuts[0];
#pragma unroll
  for (int warp = 1; warp < kTensorWarps; ++warp) cut = cuts[warp] < cut ? cuts[warp] : cut;
  return cut;
}

// Raises the references to the keys of a token, and leaves the factors of what is relative to them. All threads of
// the block together; ends with a barrier.
template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ void raise_reference(const HeadParams<Mechanism>& p, const HeadPlace<kWidth>& place,
                                                int token, float (&reference)[kWidth], float (&factor)[kWidth]) {
  const T* key = row<T>(p.sequence.key, place.batch, token) + place.head * p.width;
  for (int c = threadIdx.x; c < kWidth; c += kTensorThreads) {
    const float old = reference[c], raised = fmaxf(old, c < p.width ? to_float(key[c]) : 0.0f);
    reference[c] = raised;
    factor[c] = machine::fast_exp(old - raised);
  }
  __syncthreads();
}

// Fragments of a left operand [16, 16] at row `row` and depth `k` of a tile [rows, depth], or of one [depth, rows].
template <int kRows, int kStride>
__device__ __forceinline__ void load_left(uint32_t (&a)[4], const BFloat16 (&tile)[kRows][kStride], int row, int k) {
  const int lane = threadIdx.x % kWarp;
  load_matrices(a, &tile[row + lane % 16][k + lane / 16 * 8]);
}
template <int kRows, int kStride>
__device__ __forceinline__ void load_left_transposed(uint32_t (&a)[4], const BFloat16 (&tile)[kRows][kStride], int row,
                                                     int k) {
  const int lane = threadIdx.x % kWarp;
  load_matrices_transposed(a, &tile[k + lane / 16 * 8 + lane % 8][row + lane / 8 % 2 * 8]);
}

// Fragments of a right operand [16, 16], two of 8 columns, at depth `k` and column `column` of a tile [depth, columns],
// or of one [columns, depth].
template <int kRows, int kStride>
__device__ __forceinline__ void load_right(uint32_t (&b)[4], const BFloat16 (&tile)[kRows][kStride], int k,
                                           int column) {
  const int lane = threadIdx.x % kWarp;
  load_matrices_transposed(b, &tile[k + lane % 16][column + lane / 16 * 8]);
}
template <int kRows, int kStride>
__device__ __forceinline__ void load_right_transposed(uint32_t (&b)[4], const BFloat16 (&tile)[kRows][kStride], int k,
                                                      int column) {
  const int lane = threadIdx.x % kWarp;
  load_matrices(b, &tile[column + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
}

// Adds a times the two fragments of b to neighboring sums.
__device__ __forceinline__ void multiply_add_two(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[4]) {
  multiply_add<BFloat16>(left, a, {b[0], b[1]});
  multiply_add<BFloat16>(right, a, {b[2], b[3]});
}

// Adds the products of 16 queries' weights at depth k with S and, behind its columns, with z.
template <class Mechanism, int kTiles, int kDepth, int kStride>
__device__ __forceinline__ void add_state_products(float (&results)[kTiles][4], float (&normalizer)[4],
                                                   const uint32_t (&a)[4], const BFloat16 (&context)[kDepth][kStride],
                                                   int k) {
  uint32_t b[4];
  if constexpr (Mechanism::kNormalized) {
    load_matrices_transposed(b, &context[k + static_cast<int>(threadIdx.x) % 16][8 * kTiles]);
    multiply_add<BFloat16>(normalizer, a, {b[0], b[1]});
  }
#pragma unroll
  for (int j = 0; j < kTiles; j += 2) {
    load_right(b, context, k, 8 * j);
    multiply_add_two(results[j], results[j + 1], a, b);
  }
}

// Adds the sums of a's rows to column 0.
__device__ __forceinline__ void add_row_sums(float (&sums)[4], const uint32_t (&a)[4]) {
  constexpr uint32_t kOnes = 0x3f803f80u;  // two of bfloat16
  const uint32_t first_column = threadIdx.x % kWarp < 4 ? kOnes : 0u;
  multiply_add<BFloat16>(sums, a, {first_column, first_column});
}

// The factor of row `row` + 8 `half` of the warp's results; its sum of weights is in columns 0 and 1 of `normalizer`.
template <class Mechanism>
__device__ __forceinline__ float scale_of_row(const HeadParams<Mechanism>& p, const float (&normalizer)[4],
                                              const float (&row_sums)[kTileTokens], int row, int half, int keys) {
  float sum = 0.0f;
  if constexpr (Mechanism::kNormalized) {
    const int first = threadIdx.x % kWarp & ~3;
    sum = __shfl_sync(~0u, normalizer[2 * half] + normalizer[2 * half + 1], first);
  }
  if constexpr (Mechanism::kSoftmax) sum = row_sums[row + 8 * half];
  return p.mechanism.row_scale(sum, keys);
}

// Writes the warp's rows [from, to) of a tile of T to output rows first + from on, `columns` of them from `channel` on.
template <class T, int kColumns, int kTileColumns>
__device__ __forceinline__ void write_warp_rows(const StridedSequence& s, const HeadTile<kTileColumns>& tile, int batch,
                                                int first, int from, int to, int channel, int columns, bool vectors) {
  using Pieces = WarpPieces<kColumns>;
  const Pieces pieces;
  if (pieces.column >= columns) return;
  T* target = static_cast<T*>(s.output) + (batch * s.tokens + first + pieces.row) * s.channels;
  target += channel + pieces.column;
  const int64_t apart = Pieces::kRowsApart * s.channels;
  if (vectors) {
#pragma unroll 4
    for (int i = 0; i < Pieces::kMine; ++i, target += apart) {
      const int r = pieces.row + i * Pieces::kRowsApart;
      if (r >= from && r < to) machine::store(target, machine::load<uint4>(&tile[r][pieces.column]));
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < Pieces::kMine; ++i, target += apart) {
    const int r = pieces.row + i * Pieces::kRowsApart;
    if (r < from || r >= to) continue;
    const Raw<T, 8> raw(reinterpret_cast<const T*>(&tile[r][pieces.column]));
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (pieces.column + k < columns) target[k] = raw.elements[k];
  }
}

// Writes the warp's results, scaled by row, through its own rows of a tile that it does not need any more.
template <class T, int kColumns, int kTileColumns>
__device__ __forceinline__ void write_results(const StridedSequence& s, const float (&results)[kColumns / 8][4],
                                              const float (&scale)[2], HeadTile<kTileColumns>& tile, int batch,
                                              int first, int from, int to, int channel, int columns, bool vectors) {
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * kWarpTokens + lane / 4;
  __syncwarp();  // other lanes have read the rows
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      machine::store(&tile[row + 8 * half][8 * j + lane % 4 * 2],
                     pack<T>(results[j][2 * half] * scale[half], results[j][2 * half + 1] * scale[half]));
  __syncwarp();
  write_warp_rows<T, kColumns, kTileColumns>(s, tile, batch, first, from, to, channel, columns, vectors);
  __syncwarp();
}

}  // namespace aft::cuda
