// Products of large matrices, a tile of the result by each block of kBlockThreads threads: steps of kTileDepth go
// through two stages of shared memory, one read ahead of the other. 16-bit elements are multiplied as such, float32
// as two tf32 numbers each (block_product.cuh); sums are float32.
//
// Strides put the rows that a warp reads at once, 16 bytes of each or a float of each, into different banks.
#pragma once

#include "device/block_product.cuh"
#include "device/tile_rows.cuh"

namespace aft::cuda {

constexpr int kTileHeight = 128;
template <class T>
constexpr int kTileWidth = 256 / sizeof(T);
template <class T>
constexpr int kTileDepth = 64 / sizeof(T);

template <class T>
struct TileOperands {
  alignas(16) T left[2][kTileHeight][kTileDepth<T> + kVector<T>];
  alignas(16) T right[2][kTileDepth<T>][kTileWidth<T> + 8];
};

template <class T>
using TileSums = Product<kTileHeight, kTileWidth<T>>;

// The matrices [rows, depth] and [depth, columns] of one document, rows and columns counted from the tile's first.
struct TileSource {
  StridedTensor left, right;
  int batch, first_row, first_column, rows, columns, depth;
  bool vectors;  // every row starts at a multiple of 16 bytes
};

template <class T>
__device__ __forceinline__ void multiply_stage(TileSums<T>& product, const TileOperands<T>& operands, int stage) {
  const auto& left = operands.left[stage];
  const auto& right = operands.right[stage];
  if constexpr (sizeof(T) == 4) {
    product.template add<true, true>(
        kTileDepth<T>, [&](int r, int k) { return left[r][k]; }, [&](int k, int c) { return right[k][c]; });
  } else {
    const int lane = threadIdx.x % kWarp, row = product.row - lane / 4, column = product.column - lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < kTileDepth<T>; k += 16) {
      uint32_t a[TileSums<T>::kHigh][4];
#pragma unroll
      for (int i = 0; i < TileSums<T>::kHigh; ++i)
        load_matrices(a[i], &left[row + 16 * i + lane % 16][k + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < TileSums<T>::kWide; j += 2) {
        uint32_t b[4];
        load_matrices_transposed(b, &right[k + lane % 16][column + 8 * j + lane / 16 * 8]);
#pragma unroll
        for (int i = 0; i < TileSums<T>::kHigh; ++i) {
          multiply_add<T>(product.sums[i][j], a[i], {b[0], b[1]});
          multiply_add<T>(product.sums[i][j + 1], a[i], {b[2], b[3]});
        }
      }
    }
  }
}

// Adds left right, change(row, k, x) being in place of each element x of left; its results for a row or
// column beyond the last must be finite. Leaves the stages free.
template <class T, class Change>
__device__ __forceinline__ void multiply_tile(TileSums<T>& product, const TileSource& source, TileOperands<T>& operands,
                                              const Change& change) {
  TileRows<T, kTileHeight, kTileDepth<T>> left;
  TileRows<T, kTileDepth<T>, kTileWidth<T>> right;
  const auto load = [&](int k) {
    const int depth = at_most(source.depth - k, kTileDepth<T>);
    left.load(source.left, source.batch, source.first_row, source.rows, k, depth, source.vectors);
    right.load(source.right, source.batch, k, depth, source.first_column, source.columns, source.vectors);
  };
  const auto write = [&](int stage, int k) {
    left.store_to(operands.left[stage], [&](int r, int c, float x) { return change(r, k + c, x); });
    right.copy_to(operands.right[stage]);
  };
  load(0);
  write(0, 0);
  __syncthreads();
  int stage = 0;
  for (int k = 0; k < source.depth; k += kTileDepth<T>, stage ^= 1) {
    const int next = k + kTileDepth<T>;
    if (next < source.depth) load(next);
    multiply_stage(product, operands, stage);
    if (next < source.depth) write(stage ^ 1, next);
    __syncthreads();
  }
}

}  // namespace aft::cuda
