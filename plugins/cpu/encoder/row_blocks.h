// Cuts the rows of a tensor into the blocks of tasks, converts them to and from float32, and adds up the sums of a
// block.
#pragma once

#include "matmul/matrix_product.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {

// A block's encoded rows and sums stay in the second-level cache, and within this much memory per thread.
constexpr int64_t kBlockRows = 8 * kTileRows;
constexpr int64_t kBlockFloats = (3 << 20) / 2 / sizeof(float);

// The rows that a product computes at once.
template <class Product>
constexpr int64_t rows_at_once() {
  if constexpr (kInTiles<Product>)
    return Tiles<Product>::kRows;
  else
    return kTileRows;
}

// Calls body(first row, rows, memory of `fixed` + rows x `per_row` floats) for blocks of [0, rows), in parallel. The
// blocks are of whole tiles and as many for each thread, so that all end at the same time.
template <class Product, class Body>
void for_row_blocks(int64_t rows, int64_t fixed, int64_t per_row, const Parallel& parallel, const Body& body) {
  const int64_t fitting = max(1, min(kBlockRows, (kBlockFloats - fixed) / per_row));
  const int64_t tile = fitting < rows_at_once<Product>() ? 1 : rows_at_once<Product>(), tiles = ceil_div(rows, tile);
  const int64_t blocks = min(tiles, round_up(ceil_div(tiles, fitting / tile), parallel.threads));
  const int64_t largest = ceil_div(tiles, max(1, blocks)) * tile;
  parallel_for(parallel, blocks, [&](int64_t task) {
    const int64_t first = task * tiles / blocks * tile, end = min(rows, (task + 1) * tiles / blocks * tile);
    body(first, end - first, task_memory(fixed + largest * per_row));
  });
}

// Elements of a tensor from `offset` on as float32: where they are, or `count` of float16 converted to `memory`.
inline const float* read_elements(Element element, const void* tensor, int64_t offset, int64_t count, float* memory) {
  if (element == Element::kFloat32) return static_cast<const float*>(tensor) + offset;
  to_float(static_cast<const Half*>(tensor) + offset, count, memory);
  return memory;
}

// Rows of an output, `width` wide, while they are computed in float32: where they belong, or in `memory`, from which
// write_back() converts them to float16.
class OutputRows {
 public:
  // Returns the floats that a row takes in `memory`.
  static int64_t floats(Element element, int64_t width) { return element == Element::kFloat32 ? 0 : width; }

  OutputRows(Element element, void* tensor, int64_t first, int64_t rows, int64_t width, float* memory)
      : half_(element == Element::kFloat16 ? static_cast<Half*>(tensor) + first * width : nullptr),
        data_(half_ ? memory : static_cast<float*>(tensor) + first * width),
        count_(rows * width) {}

  float* data() const { return data_; }
  void write_back() const {
    if (!half_) return;
    for (int64_t i = 0; i < count_; i += kLanes) store(half_ + i, load(data_ + i, count_ - i), count_ - i);
  }

 private:
  Half* half_;
  float* data_;
  int64_t count_;
};

// Sink of a product whose left side comes in chunks: output = addend + bias + sums with the first chunk, output +=
// sums with the others. Both `addend` and `bias` may be null. All rows are `width` wide.
class AddTo {
 public:
  AddTo(float* output, int64_t width, const float* addend, const float* bias, bool first_chunk)
      : output_(output), width_(width), addend_(first_chunk ? addend : output), bias_(first_chunk ? bias : nullptr) {}

  AFT_INLINE void operator()(int64_t row, int64_t column, const Vec (&values)[kTileVectors]) const {
    const int64_t columns = width_ - column;
    if (__builtin_expect(columns >= kPanel, 1))
      add(row, column, values, kPanel);
    else
      add(row, column, values, columns);
  }
  AFT_INLINE void prefetch_lines(int64_t row, int64_t column) const {
    for (int64_t c = column; c < column + kPanel; c += kLineElements<float>) {
      prefetch_later(output_ + row * width_ + c);
      if (addend_) prefetch_later(addend_ + row * width_ + c);
    }
  }

 private:
  AFT_INLINE void add(int64_t row, int64_t column, const Vec (&values)[kTileVectors], int64_t columns) const {
    for (int v = 0; v < kTileVectors; ++v) {
      const int64_t c = column + v * kLanes, at = row * width_ + c, count = columns - v * kLanes;
      Vec y = values[v];
      if (bias_) y += load(bias_ + c, count);
      if (addend_) y += load(addend_ + at, count);
      store(output_ + at, y, count);
    }
  }

  float* output_;
  int64_t width_;
  const float *addend_, *bias_;
};

AFT_INLINE void prefetch_sink(const AddTo& sink, int64_t row, int64_t column) { sink.prefetch_lines(row, column); }

// output = addend + bias + left x weight for a block of rows; every pointer at its first row.
template <class Product>
void multiply_and_add(const LeftRows<Product>& left, const PackedWeight& weight, int64_t rows, const float* addend,
                      const float* bias, float* output) {
  const int64_t chunks = ceil_div(weight.rows, LeftRows<Product>::kChunk);
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    multiply(left, chunk, weight, chunk, 0, weight.columns, rows,
             AddTo(output, weight.columns, addend, bias, chunk == 0));
}

}  // namespace aft::AFT_ISA
