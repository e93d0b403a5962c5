// LinearResidual.
//
// Computes: Y = R + X W + b
// Cost:     bound by multiply-adds: 2 E D FLOPs per row against 4 (E + 2 D) bytes.
// Method:   a task encodes a block of rows into the second-level cache, multiplies them by W, panel by panel, and adds
//           bias and residual in the epilogue.
// See:      row_blocks.h, matmul/matrix_product.h

#include "encoder.h"
#include "encoder/row_blocks.h"

namespace aft::AFT_ISA {

void linear_residual(const LinearResidual& p, const Parallel& parallel) {
  const int64_t width = p.weight->rows, outputs = p.weight->columns;
  with_method(p.weight->method, [&](auto product) {
    using Product = decltype(product);
    using Left = LeftRows<Product>;
    const int64_t row_floats = round_up(width, kLanes), left_floats = Left::floats_per_row(width);
    for_row_blocks<Product>(
        p.rows, row_floats, left_floats + OutputRows::floats(p.element, outputs), parallel,
        [&](int64_t first, int64_t rows, float* memory) {
          const Left left(memory + row_floats, rows);
          float* converted = memory + row_floats + rows * left_floats;
          const OutputRows output(p.element, p.output, first, rows, outputs, converted);
          for (int64_t r = 0; r < rows; ++r)
            left.set(r, read_elements(p.element, p.input, (first + r) * width, width, memory), width);
          const float* residual = read_elements(p.element, p.residual, first * outputs, rows * outputs, converted);
          multiply_and_add(left, *p.weight, rows, residual, p.bias, output.data());
          output.write_back();
        });
  });
}

}  // namespace aft::AFT_ISA
