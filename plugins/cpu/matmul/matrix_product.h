// The product of a block of rows with a packed weight matrix.
//
// Cost:     bound by multiply-adds: per step one vector load for each vector of the panel and one broadcast per row
//           feed kTileVectors multiply-adds per row.
// Method:   a tile of kTileRows rows by kPanel columns is summed in registers. The rows of a block lie in the
//           second-level cache, a panel of weights in the first while they all pass it, and the first tiles fetch the
//           next panel. The epilogue of a tile is the caller's: bias, activation and residual cost no pass over memory.
// See:      weight_layout.h, select_product.h
#pragma once

#include "matmul/weight_layout.h"
#include "matmul/select_product.h"
#include "matmul/tile_neon.h"
#include "simd/load_store.h"

namespace aft::AFT_ISA {

constexpr int kTileRows = kRegisters == 32 ? 12 : 6;

// The left side: a block of rows, encoded for Product, chunk by chunk. Rows are a constant distance apart, so that
// a tile's rows are reached by fixed offsets, and no multiple of a page, so that they do not compete for the same
// cache lines; the few words between two rows hold the scale of the first, in a scaled product.
template <class Product>
class LeftRows {
 public:
  static constexpr int64_t kChunk = WeightLayout<Product>::kChunk;
  static constexpr int64_t kPitch = Product::kChunkWords + 16;

  static int64_t floats_per_row(int64_t width) { return ceil_div(width, kChunk) * kPitch; }

  LeftRows(float* memory, int64_t rows) : memory_(memory), rows_(rows) {}

  float* words(int64_t chunk, int64_t row) const { return memory_ + (chunk * rows_ + row) * kPitch; }

  void set(int64_t row, const float* values, int64_t width) const {
    for (int64_t chunk = 0; chunk * kChunk < width; ++chunk)
      Product::encode(values + chunk * kChunk, min(kChunk, width - chunk * kChunk), words(chunk, row));
  }

 private:
  float* memory_;
  int64_t rows_;
};

// A sum as a vector of float32: as it is, or with the scales of the row at `left` and the columns at `column`.
template <class Product>
AFT_INLINE Vec finished_sum(Vec sum, const float*, const float*, const float*, int64_t) {
  return sum;
}
template <class Product>
AFT_INLINE Vec finished_sum(IntVec sum, const float* left, const float* scales, const float* sums, int64_t column) {
  const Vec scaled = __builtin_convertvector(sum, Vec) * load(scales + column);
  if constexpr (Product::kScaledRows)
    return scaled * left[Product::kChunkWords] + left[Product::kChunkWords + 1] * load(sums + column);
  return scaled;
}

template <class Product>
struct Panel {
  const float* words;
  int64_t steps;
  int64_t first_column;
  const float *scales, *sums;  // of the whole matrix; only where Product is scaled
};

// Prefetches the memory that a sink will touch while the products are computed. Most sinks touch little.
template <class Sink>
AFT_INLINE void prefetch_sink(const Sink&, int64_t, int64_t) {}

// What a tile fetches of the next panel per step: all of it in one or two tiles. Beside 24 multiply-adds that is free,
// and the panel would else arrive no faster than the first tile waits for it.
constexpr int64_t kFetchedFloats = min(kPanel, kLineElements<float>);

// Sums go through memory to the sink, which runs as a loop over rows: unrolled with them it would be long code.
template <class Product, int kRows, class Sink>
void multiply_tile(const float* left, const Panel<Product>& panel, int64_t first_row,
                   [[maybe_unused]] const float* fetched, const Sink& sink) {
  constexpr int64_t kPitch = LeftRows<Product>::kPitch;
  typename Product::Sum sum[kRows][kTileVectors] = {};
#if defined(__aarch64__)
  sum_tile<Product, kPitch>(left, panel.words, panel.steps, sum);
#else
  const float* words = panel.words;
  for (int r = 0; r < kRows; ++r) prefetch_sink(sink, first_row + r, panel.first_column);
  for (int64_t step = 0; step < panel.steps; ++step, words += kPanel) {
    const Vec first = load(words), second = load(words + kLanes);
    prefetch_later(fetched + step * kFetchedFloats);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = Product::multiply_add(sum[r][0], left + r * kPitch + step, first);
      sum[r][1] = Product::multiply_add(sum[r][1], left + r * kPitch + step, second);
    }
  }
#endif
  typename Product::Sum finished[kRows][kTileVectors];
  __builtin_memcpy(finished, sum, sizeof sum);
  for (int r = 0; r < kRows; ++r) {
    Vec values[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v)
      values[v] = finished_sum<Product>(finished[r][v], left + r * kPitch, panel.scales, panel.sums,
                                        panel.first_column + v * kLanes);
    sink(first_row + r, panel.first_column, values);
  }
}

// The same for all rows and panels by tiles of the processor. Blocks of one height come together.
template <class Product, class PanelAt, class Sink>
void multiply_in_tiles(const float* left, int64_t rows, int64_t panels, const PanelAt& panel_at, const Sink& sink) {
  using Block = Tiles<Product>;
  constexpr int64_t kPitch = LeftRows<Product>::kPitch;
  typename Block::Sums sums;
  for (int64_t first = 0, end; first < rows; first = end) {
    const int64_t height = min(Block::kRows, rows - first);
    end = rows - (rows - first) % height;
    const Block block(height);
    for (int64_t i = 0; i < panels; ++i) {
      const Panel<Product> panel = panel_at(i);
      for (int64_t row = first; row < end; row += height) {
        block.multiply(left + row * kPitch, kPitch, panel.words, panel.steps, sums);
        for (int64_t r = 0; r < height; ++r) {
          Vec values[kTileVectors];
          for (int v = 0; v < kTileVectors; ++v)
            values[v] = finished_sum<Product>(sums[r][v], left + (row + r) * kPitch, panel.scales, panel.sums,
                                              panel.first_column + v * kLanes);
          sink(row + r, panel.first_column, values);
        }
      }
    }
  }
}

template <int kHeight>
struct TileHeight {
  static constexpr int kRows = kHeight;
};

// Gives sink(row, column, values) the products of encoded rows, the first at `left`, with panels panel_at(0) to
// panel_at(panels - 1): `values` are the kPanel columns from `column` on. The last rows of a block take tiles
// with fewer rows, so that no row is computed in vain.
template <class Product, class PanelAt, class Sink>
void multiply_panels(const float* left, int64_t rows, int64_t panels, const PanelAt& panel_at, const Sink& sink) {
  if constexpr (kInTiles<Product>) {
    multiply_in_tiles<Product>(left, rows, panels, panel_at, sink);
  } else {
    constexpr int64_t kPitch = LeftRows<Product>::kPitch;
    for (int64_t i = 0; i < panels; ++i) {
      const Panel<Product> panel = panel_at(i);
      const float* const next = i + 1 < panels ? panel_at(i + 1).words : nullptr;
      int64_t row = 0, fetched = 0;
      const auto multiply_rows = [&](auto height) AFT_LAMBDA_INLINE {
        constexpr int kRows = decltype(height)::kRows;
        const bool fetches = next && fetched < panel.steps * kPanel;
        multiply_tile<Product, kRows>(left + row * kPitch, panel, row, fetches ? next + fetched : panel.words, sink);
        row += kRows;
        fetched += panel.steps * kFetchedFloats;
      };
      while (row + kTileRows <= rows) multiply_rows(TileHeight<kTileRows>{});
      while (row + 3 <= rows) multiply_rows(TileHeight<3>{});
      while (row < rows) multiply_rows(TileHeight<1>{});
    }
  }
}

// Gives sink(row, column, values) every sum over one chunk of k.
// Columns are those of the weight in [begin, end), begin being a multiple of kPanel; the last panel may reach
// beyond `end`.
template <class Product, class Sink>
void multiply(const LeftRows<Product>& left, int64_t left_chunk, const PackedWeight& weight, int64_t chunk,
              int64_t begin, int64_t end, int64_t rows, const Sink& sink) {
  const WeightLayout<Product> layout(weight.rows, weight.columns);
  const float* data = weight.memory.data();
  const auto panel_at = [&](int64_t i) AFT_LAMBDA_INLINE {
    const int64_t column = begin + i * kPanel;
    return Panel<Product>{data + layout.panel(chunk, column), layout.steps(chunk), column,
                          Product::kScaled ? data + layout.scales() : nullptr,
                          Product::kScaled ? data + layout.sums(chunk) : nullptr};
  };
  multiply_panels<Product>(left.words(left_chunk, 0), rows, ceil_div(end - begin, kPanel), panel_at, sink);
}

}  // namespace aft::AFT_ISA
