// LayerNormLinear:
//
//   Y = layer_norm(X) W + b
//
// Bound by multiply-adds: 2 D E FLOPs per row against 4 (D + E) bytes. Apart from one another, layer norm reads and
// writes every row once more and the bias the result. Here a task takes a block of rows: normalises them into
// encoded rows in the second-level cache, multiplies them with W, panel by panel, and adds the bias on the way out.

#include "layer_norm.h"
#include "row_blocks.h"

namespace aft::AFT_ISA {

void layer_norm_linear(const LayerNormLinear& p, const Parallel& parallel) {
  const int64_t width = p.weight->rows, outputs = p.weight->columns;
  with_product(p.weight->precision, [&](auto product) {
    using Left = LeftRows<decltype(product)>;
    const int64_t row_floats = round_up(width, kLanes);
    const int64_t left_floats = Left::floats_per_row(width), output_floats = OutputRows::floats(p.element, outputs);
    for_row_blocks(p.rows, row_floats, left_floats + output_floats, parallel,
                   [&](int64_t first, int64_t rows, float* memory) {
                     const Left left(memory + row_floats, rows);
                     const OutputRows output(p.element, p.output, first, rows, outputs,
                                             memory + row_floats + rows * left_floats);
                     for (int64_t r = 0; r < rows; ++r) {
                       const float* row = read_elements(p.element, p.input, (first + r) * width, width, memory);
                       normalize_row(row, width, p.norm, memory);
                       left.set(r, memory, width);
                     }
                     multiply_and_add(left, *p.weight, rows, nullptr, p.bias, output.data());
                     output.finish();
                   });
  });
}

}  // namespace aft::AFT_ISA
