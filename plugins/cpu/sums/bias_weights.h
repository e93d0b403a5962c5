// The left side of AFT-full's products: exponentials of position biases, relative to a row's largest.
#pragma once

#include "matmul/matrix_product.h"
#include "sums/running_softmax.h"
#include "simd/math.h"

namespace aft::AFT_ISA {

template <class T>
float row_maximum(const T* bias, int64_t count, float maximum) {
  Vec m = splat(maximum);
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) m = raised_by(m, load(bias + k));
  maximum = max_lanes(m);
  for (; k < count; ++k) maximum = to_float(bias[k]) > maximum ? to_float(bias[k]) : maximum;
  return maximum;
}

// The largest bias less the smallest, NaN where one is.
template <class T>
float row_range(const T* bias, int64_t count) {
  const float maximum = row_maximum(bias, count, kNoKey);
  Vec low = splat(maximum), sums{};
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    low = lowered_by(low, load(bias + k));
    sums += load(bias + k);
  }
  float lowest = -max_lanes(-low), sum = sum_lanes(sums);
  for (; k < count; ++k) {
    lowest = to_float(bias[k]) < lowest ? to_float(bias[k]) : lowest;
    sum += to_float(bias[k]);
  }
  return sum != sum ? sum : maximum - lowest;
}

// Encodes exp(bias - maximum) of the `seen` keys. Keys up to `count`, which the row does not see, and values up to whole
// steps have the weight 0.
template <class Product, class T>
void encode_weights(const T* bias, int64_t seen, int64_t count, float maximum, float* words) {
  const int64_t end = max(count, steps_of<Product>(count) * Product::kPerWord);
  int64_t k = 0;
  for (; k + kPanel <= seen; k += kPanel)
    Product::encode_panel({exp(load(bias + k) - maximum), exp(load(bias + k + kLanes) - maximum)}, k, words);
  for (; k < end; k += kPanel) {
    float last[kPanel] = {};
    for (int64_t i = 0; i < kPanel; i += kLanes)
      store(last + i, exp(load(bias + k + i, seen - k - i) - maximum), seen - k - i);
    Product::encode_panel({load(last), load(last + kLanes)}, k, words);
  }
}

// Rows in whole tiles.
template <class Product>
LeftRows<Product> packed_weights(const PackedWeight& packed) {
  return {packed.memory.data(), round_up(packed.rows, kTileRows)};
}

// All weights, relative to the maximum of the whole row; the last row fills up its tile. Null where a row's biases lie
// too far apart for Product.
template <class Product, class T>
PackedWeight* pack_bias(const AftFull& p) {
  using Weights = LeftRows<Product>;
  const auto row = [&](int64_t t) {
    return static_cast<const T*>(p.position_bias) + min(t, p.tokens - 1) * p.position_bias_width;
  };
  if constexpr (Product::kScaled)
    for (int64_t t = 0; t < p.tokens; ++t)
      if (!(row_range(row(t), p.tokens) <= Product::kLargestRange)) return nullptr;
  const int64_t rows = round_up(p.tokens, kTileRows);
  PackedWeight* packed =
      new PackedWeight(p.tokens, p.tokens, Product::kMethod, rows * Weights::floats_per_row(p.tokens));
  const Weights weights = packed_weights<Product>(*packed);
  for (int64_t t = 0; t < rows; ++t) {
    const T* bias = row(t);
    const float maximum = row_maximum(bias, p.tokens, kNoKey);
    for (int64_t u = 0; u < p.tokens; u += Weights::kChunk) {
      const int64_t count = min(Weights::kChunk, p.tokens - u);
      encode_weights<Product>(bias + u, count, count, maximum, weights.words(u / Weights::kChunk, t));
    }
  }
  return packed;
}

}  // namespace aft::AFT_ISA
