// Packs a weight matrix; see weight_layout.h for the layout.

#include "matmul/weight_layout.h"

#include "matmul/select_product.h"
#include "simd/load_store.h"

namespace aft::AFT_ISA {
namespace {

// The nearest whole number, of magnitude below 2^22.
AFT_INLINE Vec round_to_whole(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23
  return (x + shift) - shift;
}

// The largest weight of a column becomes `whole`. A column of zeros may have any scale, and one so small that its
// scale would have no inverse counts as zeros.
AFT_INLINE Vec find_scales(const float* weight, int64_t rows, int64_t columns, int64_t column, float whole) {
  Vec largest{};
  for (int64_t k = 0; k < rows; ++k)
    largest = maximum_of(largest, absolute(load(weight + k * columns + column, columns - column)));
  return largest > splat(whole * __FLT_MIN__) ? largest / whole : splat(1.0f);
}

template <class Product>
PackedWeight* pack(const float* weight, int64_t rows, int64_t columns) {
  const WeightLayout<Product> layout(rows, columns);
  PackedWeight* packed = new PackedWeight(rows, columns, Product::kMethod, layout.floats());
  float* data = packed->memory.data();
  for (int64_t column = 0; column < layout.width; column += kLanes) {
    const int64_t panel = column / kPanel * kPanel, count = max(0, columns - column);
    Vec scales{};
    if constexpr (Product::kScaled) {
      scales = find_scales(weight, rows, columns, column, Product::kLargestWeight);
      store(data + layout.scales() + column, scales);
    }
    for (int64_t chunk = 0; chunk < layout.chunks; ++chunk) {
      float* words = data + layout.panel(chunk, panel);
      Vec sum{};
      for (int64_t step = 0; step < layout.steps(chunk); ++step) {
        Vec values[Product::kPerWord];
        for (int i = 0; i < Product::kPerWord; ++i) {
          const int64_t k = chunk * layout.kChunk + step * Product::kPerWord + i;
          values[i] = k < rows ? load(weight + k * columns + column, count) : Vec{};
          if (!Product::kScaled) continue;
          values[i] = round_to_whole(values[i] / scales);
          sum += values[i] * scales;
        }
        store_words<Product>(words, step, (column - panel) / kLanes, Product::pack_weights(values));
      }
      if (Product::kScaled) store(data + layout.sums(chunk) + column, sum);
    }
  }
  return packed;
}

}  // namespace

PackedWeight* pack_weight(const float* weight, int64_t rows, int64_t columns, Method method) {
  PackedWeight* packed = nullptr;
  with_method(method, [&](auto product) { packed = pack<decltype(product)>(weight, rows, columns); });
  return packed;
}

bool has_method(Method method) {
  return visit_method(Products{}, method, [](auto) {});
}

}  // namespace aft::AFT_ISA
