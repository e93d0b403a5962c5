// Packs a weight matrix; see packed_weight.h for the layout. Done once per weight, so nothing here is tuned.

#include "packed_weight.h"

#include "products.h"

namespace aft::AFT_ISA {
namespace {

// The largest weight of a column becomes 127. A column of zeros may have any scale, and one so small that its
// scale would have no inverse counts as zeros.
void find_scales(const float* weight, int64_t rows, int64_t columns, float* scales) {
  for (int64_t k = 0; k < rows; ++k)
    for (int64_t column = 0; column < columns; ++column) {
      const float size = __builtin_fabsf(weight[k * columns + column]);
      if (size > scales[column]) scales[column] = size;
    }
  for (int64_t column = 0; column < columns; ++column)
    scales[column] = scales[column] > 127 * __FLT_MIN__ ? scales[column] / 127 : 1.0f;
}

template <class Product>
PackedWeight* pack(const float* weight, int64_t rows, int64_t columns) {
  const WeightLayout<Product> layout(rows, columns);
  PackedWeight* packed = new PackedWeight(rows, columns, Product::kPrecision, layout.floats());
  float* data = packed->memory.data();
  __builtin_memset(data, 0, layout.floats() * sizeof(float));
  float* scales = Product::kScaled ? data + layout.scales() : nullptr;
  if (scales) find_scales(weight, rows, columns, scales);

  for (int64_t k = 0; k < rows; ++k) {
    const int64_t chunk = k / layout.kChunk, place = k % layout.kChunk;
    for (int64_t column = 0; column < columns; ++column) {
      const float value = weight[k * columns + column];
      const int64_t lane = column % kPanel;
      float* words = data + layout.panel(chunk, column - lane) + place / Product::kPerWord * kPanel;
      if (scales) {
        const float whole = __builtin_rintf(value / scales[column]);
        Product::put_weight(words + lane, place % Product::kPerWord, whole);
        data[layout.sums(chunk) + column] += whole * scales[column];
      } else {
        Product::put_weight(words + lane, place % Product::kPerWord, value);
      }
    }
  }
  return packed;
}

}  // namespace

PackedWeight* pack_weight(const float* weight, int64_t rows, int64_t columns, Precision precision) {
  PackedWeight* packed = nullptr;
  with_product(precision, [&](auto product) { packed = pack<decltype(product)>(weight, rows, columns); });
  return packed;
}

}  // namespace aft::AFT_ISA
