// Products in bfloat16 and in 8-bit integers by the tiles of AMX: an instruction makes 16 x 16 sums of 32 or 64
// products each. Rows and weights are encoded as for the instructions on vectors, product_bf16.h and product_int8.h.
// The sums of integers are the same; those of bfloat16 differ in the order of their additions.
#pragma once

#include "matmul/amx_tiles.h"
#include "matmul/product_bf16.h"
#include "matmul/product_int8.h"

#if defined(AFT_AMX)

namespace aft::AFT_ISA {

struct AmxBfloat16Product : Bfloat16Product, TileProduct {
  static constexpr Method kMethod = Method::kAmxBfloat16;

  AFT_INLINE static void multiply_upper_rows() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  AFT_INLINE static void multiply_lower_rows() {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

struct AmxInt8Product : Int8Product, TileProduct {
  static constexpr Method kMethod = Method::kAmxInt8;

  AFT_INLINE static void multiply_upper_rows() {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
  }
  AFT_INLINE static void multiply_lower_rows() {
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
};

}  // namespace aft::AFT_ISA

#endif
