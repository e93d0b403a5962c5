// Products of a chunk's token rows. A tile of their sums stays in registers.
#pragma once

#include "simd/parallel.h"
#include "simd/simd.h"

namespace aft::AFT_ISA {

// Tokens of a chunk. The products within a chunk grow with it, and those with the state are shared by its tokens.
constexpr int64_t kChunk = 16;
static_assert(kChunk % kLanes == 0);

constexpr int kChunkTileRows = kRegisters == 32 ? 8 : 4;
static_assert(kChunk % kChunkTileRows == 0);

// Columns of the values that are taken together: a panel. Rows of a panel lie kPanel floats apart.
constexpr int kPanelVecs = 2;
constexpr int64_t kPanel = kPanelVecs * kLanes;

// sum[r] += sum_i left[r * row + i] right[i * stride]; beside(i) is called at every step.
template <int rows, int vecs, class F>
AFT_INLINE void add_product(Vec (&sum)[rows][vecs], const float* left, int64_t row, int64_t depth, const float* right,
                            int64_t stride, const F& beside) {
  for (int64_t i = 0; i < depth; ++i) {
    beside(i);
    Vec line[vecs];
    for (int v = 0; v < vecs; ++v) line[v] = load(right + i * stride + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < vecs; ++v) sum[r][v] += left[r * row + i] * line[v];
  }
}
template <int rows, int vecs>
AFT_INLINE void add_product(Vec (&sum)[rows][vecs], const float* left, int64_t row, int64_t depth, const float* right,
                            int64_t stride) {
  add_product(sum, left, row, depth, right, stride, [](int64_t) AFT_LAMBDA_INLINE {});
}

// Calls f(Constant<rows>, t) for tiles of rows that cover `tokens` rows of a chunk; the last may reach past them. A
// single row, as in a step of decoding, is a tile of its own.
template <class F>
AFT_INLINE void for_each_tile(int64_t tokens, const F& f) {
  int64_t t = 0;
  for (; t + 1 < tokens; t += kChunkTileRows) f(Constant<kChunkTileRows>{}, t);
  if (t < tokens) f(Constant<1>{}, t);
}

// In a panel of values of a chunk: row t -= sum_{u < t} weights[t, u] row u, in the order of the rows.
template <int vecs>
inline void substitute_forward(const float* weights, int64_t tokens, float* values) {
  constexpr int kRows = 8 / vecs;  // with a row that is finished, within 16 registers
  for (int64_t first = 0; first < tokens; first += kRows) {
    Vec row[kRows][vecs];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < vecs; ++v) row[r][v] = load(values + (first + r) * kPanel + v * kLanes);
    const float* block = weights + first * kChunk;
    for (int64_t u = 0; u < first; ++u) {
      Vec line[vecs];
      for (int v = 0; v < vecs; ++v) line[v] = load(values + u * kPanel + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < vecs; ++v) row[r][v] -= block[r * kChunk + u] * line[v];
    }
#pragma GCC unroll 8
    for (int u = 0; u < kRows; ++u)
#pragma GCC unroll 8
      for (int r = u + 1; r < kRows; ++r)
        for (int v = 0; v < vecs; ++v) row[r][v] -= block[r * kChunk + first + u] * row[u][v];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < vecs; ++v) store(values + (first + r) * kPanel + v * kLanes, row[r][v]);
  }
}

}  // namespace aft::AFT_ISA
