// LinearResidual:
//
//   Y = R + X W + b
//
// Bound by multiply-adds: 2 E D FLOPs per row against 4 (E + 2 D) bytes. A task encodes a block of rows into the
// second-level cache, multiplies them with W, panel by panel, and adds bias and residual on the way out.

#include "row_blocks.h"

namespace aft::AFT_ISA {

void linear_residual(const LinearResidual& p, const Parallel& parallel) {
  const int64_t width = p.weight->rows, outputs = p.weight->columns;
  with_product(p.weight->precision, [&](auto product) {
    using Left = LeftRows<decltype(product)>;
    for_row_blocks(p.rows, 0, Left::floats_per_row(width), parallel, [&](int64_t first, int64_t rows, float* memory) {
      const Left left(memory, rows);
      for (int64_t r = 0; r < rows; ++r) left.set(r, p.input + (first + r) * width, width);
      multiply_and_add(left, *p.weight, rows, p.residual + first * outputs, p.bias, p.output + first * outputs);
    });
  });
}

}  // namespace aft::AFT_ISA
