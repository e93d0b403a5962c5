// How a weight matrix [rows, columns] lies in memory for the products: rows in chunks which a thread takes one
// after the other, columns in panels of the width of a register tile. Within chunk and panel the words (one or
// more rows of one column, by precision) follow in the order in which they are multiplied, so that the weights
// are read as one stream and a chunk's panel stays in the first-level cache while all rows of a block pass it.
// Missing rows and columns are zero. Weights in whole numbers are followed by the scale of every column and, for every
// chunk, the sum of every column.
#pragma once

#include "matmul/packed_weight.h"
#include "matmul/amx_tiles.h"
#include "simd/simd.h"

namespace aft::AFT_ISA {

constexpr int kTileVectors = 2;
constexpr int64_t kPanel = kTileVectors * kLanes;

// Words of one column that one instruction or one step of the loop takes together.
#if defined(__ARM_FEATURE_MATMUL_INT8)
template <class Product>
constexpr int64_t kStepsTogether = Product::kPerWord > 1 ? 4 : 1;
#else
template <class Product>
constexpr int64_t kStepsTogether = 1;
#endif

// The words in which so many values of a row or column are multiplied. The weights of those beyond the last value are 0.
template <class Product>
constexpr int64_t steps_of(int64_t count) {
  const int64_t words = ceil_div(count, Product::kPerWord);
  if constexpr (kInTiles<Product>) return round_up(words, Product::kTileWords);
  return round_up(words, kStepsTogether<Product>);
}

// Puts the words of one step and one vector of columns where they belong in a panel. Instructions that take two words
// of two columns have these next to each other: steps in pairs, and within a pair, column by column, both words.
template <class Product>
AFT_INLINE void store_words(float* panel, int64_t step, int64_t vector, Vec words) {
  if constexpr (kStepsTogether<Product> == 1) {
    store(panel + step * kPanel + vector * kLanes, words);
  } else {
    float* first = panel + step / 2 * 2 * kPanel + vector * 2 * kLanes + step % 2;
    for (int lane = 0; lane < kLanes; ++lane) first[2 * lane] = words[lane];
  }
}

template <class Product>
struct WeightLayout {
  static constexpr int64_t kChunk = Product::kChunkWords * Product::kPerWord;

  WeightLayout(int64_t rows, int64_t columns)
      : rows(rows),
        width(round_up(columns, kPanel)),
        chunks(ceil_div(rows, kChunk)),
        words(width * ((chunks - 1) * Product::kChunkWords + steps(chunks - 1))) {}

  int64_t chunk_rows(int64_t chunk) const { return min(kChunk, rows - chunk * kChunk); }
  int64_t steps(int64_t chunk) const { return steps_of<Product>(chunk_rows(chunk)); }
  int64_t panel(int64_t chunk, int64_t column) const {
    return chunk * Product::kChunkWords * width + column * steps(chunk);
  }
  int64_t scales() const { return words; }
  int64_t sums(int64_t chunk) const { return words + (1 + chunk) * width; }
  int64_t floats() const { return Product::kScaled ? words + (1 + chunks) * width : words; }

  int64_t rows, width, chunks, words;
};

// The caller deletes the result: these sources call no templates of std, and so no unique_ptr.
PackedWeight* pack_weight(const float* weight, int64_t rows, int64_t columns, Method method);

}  // namespace aft::AFT_ISA
