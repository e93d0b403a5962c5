// The product of AFT-full's weights with its entries in integers: that of product_int8.h or product_int16.h, with
// weights exp(w - row maximum) as the left side, of which the largest integer stands for 1. That factor is the same for
// numerator and denominator, so that a row needs no scale.
//
// The right side, exp(K - maximum) V and exp(K - maximum), has a scale for each channel of each block of keys. Most of
// its numbers may lie below half a step of the largest: rounded to nearest they would all vanish, however many they
// are. So each is rounded up or down in turn, and sums are right. Turns are the additive sequence of the plastic
// number, which is even in two dimensions: the rounding of a weight and of its numerator have nothing in common.
#pragma once

#include "matmul/product_int16.h"
#include "matmul/product_int8.h"
#include "matmul/product_neon.h"

namespace aft::AFT_ISA {

template <class Product>
struct WeightProduct : Product {
  static constexpr int64_t kChunkWords = 128;
  static constexpr bool kScaledRows = false;

  AFT_INLINE static void encode_panel(const Vec (&values)[2], int64_t first, float* words) {
    for (int i = 0; i < 2; ++i) Product::put(values[i] * Product::kLargestLeft, first + i * kLanes, words);
  }

  AFT_INLINE static Vec rounded_weight(Vec values, int64_t key) { return rounded(values, 0.7548777f * key); }
  AFT_INLINE static Vec rounded_numerator(Vec values, int64_t key) { return rounded(values, 0.5698403f * key); }

 private:
  // Rounds the values to whole numbers; the fraction of `turn` decides between up and down.
  AFT_INLINE static Vec rounded(Vec values, float turn) {
    const Vec shifted = values + (turn + 0.5f - __builtin_floorf(turn + 0.5f));
#if defined(__AVX512F__)
    return (Vec)_mm512_roundscale_ps((__m512)shifted, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (Vec)_mm256_floor_ps((__m256)shifted);
#elif defined(__aarch64__)
    return vrndmq_f32(shifted);
#else
    const IntVec whole = __builtin_convertvector(shifted, IntVec);
    const Vec floor = __builtin_convertvector(whole + (IntVec)(shifted < __builtin_convertvector(whole, Vec)), Vec);
    return floor + (shifted - shifted);  // carries a NaN, which `whole` cannot hold
#endif
  }
};

// The product for AFT-full's weights with the method of Product.
template <class Product, bool kScaled = Product::kScaled>
struct WeightProductOf {
  using Type = Product;
};
template <class Product>
struct WeightProductOf<Product, true> {
  using Type = WeightProduct<Product>;
};

}  // namespace aft::AFT_ISA
