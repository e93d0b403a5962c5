// The tiles of AMX: eight registers of 16 rows of 64 bytes, and instructions that multiply two and add the products to
// a third.
//
// Method:   a block of 32 rows by a panel of 32 columns is four tiles of sums. A step loads two tiles of left rows and
//           two of weights, and feeds four products, so that loads take half of the time of the products. A tile of
//           left rows is 16 words of 16 encoded rows, a tile of weights 16 words of 16 columns: both lie in memory as
//           they are loaded.
//           Tiles have as many rows as the block: it is read and multiplied without padding. They are set up for all
//           blocks of one height together, since that takes as long as a dozen products.
// See:      matrix_product.h, product_amx.h
#pragma once

#include "simd/simd.h"

namespace aft::AFT_ISA {

// The base of every product that is summed in tiles.
struct TileProduct {
  static constexpr int64_t kTileWords = 16;  // of a row, in a step
};

template <class Product>
constexpr bool kInTiles = __is_base_of(TileProduct, Product);

template <class Product>
class Tiles;

#if defined(AFT_AMX)

// The operand of LDTILECFG.
struct TileShapes {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileShapes) == 64);

// The tiles for blocks of `rows` rows, from 1 to kRows. This thread has them until the object is destroyed: a thread
// that keeps tiles costs the system 8 KiB at every switch, and other code on it may use tiles of its own.
//
// | tiles | contents                                        |
// |-------|-------------------------------------------------|
// | 0, 1  | sums of the upper rows, left and right columns  |
// | 2, 3  | sums of the lower rows, left and right columns  |
// | 4, 5  | left rows, upper and lower                      |
// | 6, 7  | weights, left and right columns                 |
template <class Product>
class Tiles {
 public:
  static constexpr int64_t kRows = 32;
  typedef typename Product::Sum Sums[kRows][2];  // aligned, as vectors are

  explicit Tiles(int64_t rows) : has_lower_rows_(rows > kHeight) {
    const int64_t upper = min(rows, kHeight), lower = rows - upper;
    const int64_t tile_rows[] = {upper, upper, lower, lower, upper, lower, Product::kTileWords, Product::kTileWords};
    TileShapes shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = static_cast<uint8_t>(tile_rows[tile]);
      shapes.row_bytes[tile] = tile_rows[tile] > 0 ? kVectorBytes : 0;
    }
    before_reading(&shapes);
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // sums = the rows at `left`, `pitch` words apart, times the panel at `weights`; `words` is a whole number of steps.
  void multiply(const float* left, int64_t pitch, const float* weights, int64_t words, Sums& sums) const {
    before_reading(left);
    if (has_lower_rows_)
      add_up<true>(left, pitch, weights, words, sums);
    else
      add_up<false>(left, pitch, weights, words, sums);
  }

 private:
  static constexpr int64_t kHeight = 16;

  template <bool has_lower_rows>
  AFT_INLINE static void add_up(const float* left, int64_t pitch, const float* weights, int64_t words, Sums& sums) {
    constexpr int64_t kPanelBytes = 2 * kVectorBytes;
    const int64_t pitch_bytes = pitch * static_cast<int64_t>(sizeof(float));
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (has_lower_rows) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t word = 0; word < words; word += Product::kTileWords) {
      _tile_loadd(6, weights + word * 2 * kLanes, kPanelBytes);
      _tile_loadd(4, left + word, pitch_bytes);
      _tile_loadd(7, weights + word * 2 * kLanes + kLanes, kPanelBytes);
      Product::multiply_upper_rows();
      if constexpr (has_lower_rows) {
        _tile_loadd(5, left + kHeight * pitch + word, pitch_bytes);
        Product::multiply_lower_rows();
      }
    }
    _tile_stored(0, &sums[0][0], kPanelBytes);
    _tile_stored(1, &sums[0][1], kPanelBytes);
    if constexpr (has_lower_rows) {
      _tile_stored(2, &sums[kHeight][0], kPanelBytes);
      _tile_stored(3, &sums[kHeight][1], kPanelBytes);
    }
  }

  // GCC's intrinsics do not say that they read memory: without this, it may store later, or not at all.
  AFT_INLINE static void before_reading(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

  const bool has_lower_rows_;
};

#endif

}  // namespace aft::AFT_ISA
