// LayerNormLinear, and LayerNormQueryKeyValue, which has three W, b and Y.
//
// Computes: Y = norm(X) W + b, norm being a layer norm, an RMS norm or none
// Cost:     bound by multiply-adds: 2 D E FLOPs per row against 4 (D + E) bytes. As separate operators, layer norm
//           reads and writes every row once more, and the bias the result.
// Method:   a task takes a block of rows: it normalizes them into encoded rows in the second-level cache, multiplies
//           them by every W, panel by panel, and adds the bias in the epilogue. Each W is packed by itself, so that no
//           panel belongs to two outputs and every output is written in place.
// See:      row_blocks.h, norm.h, matmul/matrix_product.h

#include "encoder/norm.h"
#include "encoder/row_blocks.h"

namespace aft::AFT_ISA {

void layer_norm_linear(const LayerNormLinear& p, const Parallel& parallel) {
  const PackedWeight& first_weight = *p.linears[0].weight;
  const int64_t width = first_weight.rows;
  int64_t widest = 0;
  for (int64_t i = 0; i < p.count; ++i) widest = max(widest, p.linears[i].weight->columns);
  with_method(first_weight.method, [&](auto product) {
    using Product = decltype(product);
    using Left = LeftRows<Product>;
    const int64_t row_floats = round_up(width, kLanes);
    const int64_t left_floats = Left::floats_per_row(width), output_floats = OutputRows::floats(p.element, widest);
    for_row_blocks<Product>(
        p.rows, row_floats, left_floats + output_floats, parallel, [&](int64_t first, int64_t rows, float* memory) {
          const Left left(memory + row_floats, rows);
          float* converted = memory + row_floats + rows * left_floats;
          for (int64_t r = 0; r < rows; ++r) {
            const float* row = read_elements(p.element, p.input, (first + r) * width, width, memory);
            left.set(r, normalize_row(row, width, p.norm, memory), width);
          }
          for (int64_t i = 0; i < p.count; ++i) {
            const Linear& linear = p.linears[i];
            const OutputRows output(p.element, linear.output, first, rows, linear.weight->columns, converted);
            multiply_and_add(left, *linear.weight, rows, nullptr, linear.bias, output.data());
            output.write_back();
          }
        });
  });
}

}  // namespace aft::AFT_ISA
