// The intrinsics of AMX that the kernels use, as Intel's manual defines the instructions, for a processor without them.
// Included before everything else, by CMake's AFT_EMULATE_AMX. Where the processor would raise an exception, and where
// a thread ends that still has tiles, the process is aborted.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

typedef float Columns __attribute__((vector_size(64)));
typedef int32_t IntColumns __attribute__((vector_size(64)));

inline void require_tiles(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

struct Tile {
  int rows, row_bytes;
  alignas(64) char data[16][64];

  template <class Vector>
  Vector row(int i) const {
    static_assert(sizeof(Vector) == 64);
    Vector values;
    std::memcpy(&values, data[i], sizeof values);
    return values;
  }
  // The 32 bits at word `k` of a row.
  uint32_t word(int i, int k) const {
    uint32_t bits;
    std::memcpy(&bits, data[i] + 4 * k, sizeof bits);
    return bits;
  }
};

struct TileState {
  bool configured;
  Tile tiles[8];

  ~TileState() { require_tiles(!configured, "a thread ends with tiles"); }

  Tile& at(int tile) {
    require_tiles(configured, "no tiles are configured");
    require_tiles(tiles[tile].rows > 0 && tiles[tile].row_bytes > 0, "the tile is not configured");
    return tiles[tile];
  }
};

inline thread_local TileState tile_state{};

inline void tile_release() {
  for (Tile& tile : tile_state.tiles) tile = {};
  tile_state.configured = false;
}

inline void tile_loadconfig(const void* from) {
  uint8_t bytes[64];
  std::memcpy(bytes, from, sizeof bytes);
  require_tiles(bytes[0] == 1 && bytes[1] == 0, "the palette is not 1, or the first row not 0");
  for (int i = 2; i < 16; ++i) require_tiles(bytes[i] == 0, "a reserved byte is not 0");
  for (int i = 32; i < 48; ++i) require_tiles(bytes[i] == 0, "a ninth tile is configured");
  for (int i = 56; i < 64; ++i) require_tiles(bytes[i] == 0, "a ninth tile is configured");
  tile_release();
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    require_tiles(bytes[48 + i] <= 16 && row_bytes <= 64, "a tile is too large");
    require_tiles((bytes[48 + i] == 0) == (row_bytes == 0), "a tile has rows or columns only");
    tile_state.tiles[i].rows = bytes[48 + i];
    tile_state.tiles[i].row_bytes = row_bytes;
  }
  tile_state.configured = true;
}

inline void tile_zero(int tile) { std::memset(tile_state.at(tile).data, 0, sizeof(Tile::data)); }

inline void tile_loadd(int to, const void* from, int64_t stride) {
  Tile& tile = tile_state.at(to);
  tile_zero(to);
  for (int i = 0; i < tile.rows; ++i)
    std::memcpy(tile.data[i], static_cast<const char*>(from) + i * stride, static_cast<size_t>(tile.row_bytes));
}

inline void tile_stored(int from, void* to, int64_t stride) {
  const Tile& tile = tile_state.at(from);
  for (int i = 0; i < tile.rows; ++i)
    std::memcpy(static_cast<char*>(to) + i * stride, tile.data[i], static_cast<size_t>(tile.row_bytes));
}

// Calls add_row(sums, left, i, right) for every row i, which adds the products of one row with all columns.
template <class Sums, class AddRow>
void multiply_tiles(int to, int from, int by, const AddRow& add_row) {
  Tile& sums = tile_state.at(to);
  const Tile &left = tile_state.at(from), &right = tile_state.at(by);
  require_tiles(to != from && to != by && from != by, "two tiles of a product are the same");
  require_tiles(sums.rows == left.rows && sums.row_bytes == right.row_bytes && left.row_bytes == 4 * right.rows,
                "the tiles of a product do not fit");
  for (int i = 0; i < sums.rows; ++i) {
    const Sums row = add_row(sums.row<Sums>(i), left, i, right);
    std::memcpy(sums.data[i], &row, static_cast<size_t>(sums.row_bytes));
  }
}

// A subnormal number counts as 0, with its sign.
inline Columns flush(Columns values) {
  const IntColumns bits = (IntColumns)values;
  return (Columns)((bits & 0x7fffffff) < 0x00800000 ? bits & INT32_MIN : bits);
}
inline Columns multiply_add(float a, Columns b, Columns sums) {
  for (int i = 0; i < 16; ++i) sums[i] = __builtin_fmaf(a, b[i], sums[i]);
  return flush(sums);
}

// The products of the lower and of the upper numbers of all words are added up by themselves, with one rounding for
// each; then one sum is added to the other, and both to the tile.
inline void tile_dpbf16ps(int to, int from, int by) {
  multiply_tiles<Columns>(to, from, by, [](Columns sums, const Tile& left, int i, const Tile& right) {
    Columns lower{}, upper{};
    for (int k = 0; k < right.rows; ++k) {
      const IntColumns pair = IntColumns{} + static_cast<int32_t>(left.word(i, k)), pairs = right.row<IntColumns>(k);
      lower = multiply_add(flush((Columns)(pair << 16))[0], flush((Columns)(pairs << 16)), lower);
      const int32_t high = static_cast<int32_t>(0xffff0000);
      upper = multiply_add(flush((Columns)(pair & high))[0], flush((Columns)(pairs & high)), upper);
    }
    return flush(flush(sums) + flush(lower + upper));
  });
}

// Four unsigned bytes by four signed ones; a sum that is too large wraps around.
inline void tile_dpbusd(int to, int from, int by) {
  typedef uint32_t Wrapping __attribute__((vector_size(64)));
  multiply_tiles<Wrapping>(to, from, by, [](Wrapping sums, const Tile& left, int i, const Tile& right) {
    for (int k = 0; k < right.rows; ++k) {
      const uint32_t word = left.word(i, k);
      const IntColumns words = right.row<IntColumns>(k);
      for (int byte = 0; byte < 4; ++byte)
        sums += (Wrapping)(static_cast<int32_t>(word >> (8 * byte) & 0xff) * ((words << (24 - 8 * byte)) >> 24));
    }
    return sums;
  });
}

}  // namespace emulated

#define _tile_loadconfig emulated::tile_loadconfig
#define _tile_release emulated::tile_release
#undef _tile_zero
#define _tile_zero emulated::tile_zero
#undef _tile_loadd
#define _tile_loadd emulated::tile_loadd
#undef _tile_stored
#define _tile_stored emulated::tile_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps emulated::tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_dpbusd emulated::tile_dpbusd
