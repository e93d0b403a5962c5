// The sums of a register tile on aarch64, in place of the loop in matrix_product.h.
//
// | instruction       | left operand                     | right operand               | multiply-adds |
// |-------------------|----------------------------------|-----------------------------|---------------|
// | fmla by element   | one word of a row                | a word of 4 columns         | 4             |
// | sdot by element   | one word of a row                | a word of 4 columns         | 16            |
// | bfmmla, usmmla    | two words of each of two rows    | two words of two columns    | 16, 32        |
//
// Method:   by element, the words of a row are read in pairs, since 24 sums, the weights of two steps and a pair fill
//           the 32 registers. By matrix, a sum is a square of two rows and two columns; weight_layout.h has the words
//           of a column next to each other in pairs, and those of two rows are joined here. Half of a tile's rows at a
//           time leave room for the weights of four steps.
#pragma once

#include "matmul/weight_layout.h"
#include "simd/simd.h"

#if defined(__aarch64__)

namespace aft::AFT_ISA {

template <class Product, int64_t kPitch, int kRows>
AFT_INLINE void sum_by_element(const float* left, const float* words, int64_t steps,
                               typename Product::Sum (&sum)[kRows][kTileVectors]) {
  typename Product::Offset offset{};
  int64_t step = 0;
  for (; step + 2 <= steps; step += 2, words += 2 * kPanel) {
    const Vec first[2] = {load(words), load(words + kLanes)};
    const Vec second[2] = {load(words + kPanel), load(words + kPanel + kLanes)};
    offset.add(first);
    offset.add(second);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float32x2_t pair = vld1_f32(left + r * kPitch + step);
      asm("" : "+w"(pair));  // one load: GCC 12 would take each word by itself
      for (int v = 0; v < kTileVectors; ++v) {
        sum[r][v] = Product::template multiply_add_element<0>(sum[r][v], pair, first[v]);
        sum[r][v] = Product::template multiply_add_element<1>(sum[r][v], pair, second[v]);
      }
    }
  }
  if (step < steps) {
    const Vec last[2] = {load(words), load(words + kLanes)};
    offset.add(last);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float32x2_t word = vld1_dup_f32(left + r * kPitch + step);
      for (int v = 0; v < kTileVectors; ++v)
        sum[r][v] = Product::template multiply_add_element<0>(sum[r][v], word, last[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) offset.take_from(sum[r]);
}

// An odd last row stands in for its missing partner.
template <class Product, int64_t kPitch, int kRows>
AFT_INLINE void sum_by_matrix(const float* left, const float* words, int64_t steps,
                              typename Product::Sum (*sum)[kTileVectors]) {
  constexpr int kPairs = (kRows + 1) / 2, kSquares = kPanel / 2;
  typename Product::Sum squares[kPairs][kSquares] = {};
  for (int64_t step = 0; step < steps; step += 4, words += 4 * kPanel) {
    Vec weights[2][kSquares];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kSquares; ++i) weights[i / kSquares][i % kSquares] = load(words + i * kLanes);
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      const float64x2_t upper = (float64x2_t)load(left + 2 * p * kPitch + step);
      const float64x2_t lower = (float64x2_t)load(left + min(2 * p + 1, kRows - 1) * kPitch + step);
      const Vec rows[2] = {(Vec)vzip1q_f64(upper, lower), (Vec)vzip2q_f64(upper, lower)};
      for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
        for (int s = 0; s < kSquares; ++s)
          squares[p][s] = Product::multiply_add_matrix(squares[p][s], rows[half], weights[half][s]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kTileVectors; ++v) {
      const float64x2_t a = (float64x2_t)squares[r / 2][2 * v], b = (float64x2_t)squares[r / 2][2 * v + 1];
      sum[r][v] = (typename Product::Sum)(r % 2 == 0 ? vzip1q_f64(a, b) : vzip2q_f64(a, b));
    }
}

template <class Product, int64_t kPitch, int kRows>
AFT_INLINE void sum_tile(const float* left, const float* words, int64_t steps,
                         typename Product::Sum (&sum)[kRows][kTileVectors]) {
  if constexpr (kStepsTogether<Product> == 1) {
    sum_by_element<Product, kPitch>(left, words, steps, sum);
  } else if constexpr (kRows > 6) {
    sum_by_matrix<Product, kPitch, 6>(left, words, steps, sum);
    sum_by_matrix<Product, kPitch, kRows - 6>(left + 6 * kPitch, words, steps, sum + 6);
  } else {
    sum_by_matrix<Product, kPitch, kRows>(left, words, steps, sum);
  }
}

}  // namespace aft::AFT_ISA

#endif
