// Choosing the product for a precision, among those this instruction set has.
#pragma once

#include "matmul/product_bf16.h"
#include "matmul/product_bias_weights.h"
#include "matmul/product_fp32.h"

namespace aft::AFT_ISA {

// Calls f with a value of the product's type, for operators whose products are of floating-point numbers.
template <class F>
void with_float_product(Precision precision, const F& f) {
#if defined(__AVX512BF16__)
  if (precision == Precision::kBfloat16) return f(Bfloat16Product{});
#endif
  (void)precision;
  f(Float32Product{});
}

// For the weights of AFT-full.
template <class F>
void with_weight_product(Precision precision, const F& f) {
#if defined(__AVX512VNNI__)
  if (precision == Precision::kInt8) return f(WeightProduct<Int8Product>{});
#endif
#if defined(__AVX2__) && !defined(__AVX512BF16__)
  if (precision == Precision::kBfloat16 || precision == Precision::kInt8 || precision == Precision::kInt16)
    return f(WeightProduct<Int16Product>{});
#endif
  with_float_product(precision, f);
}

template <class F>
void with_product(Precision precision, const F& f) {
#if defined(__AVX512VNNI__)
  if (precision == Precision::kInt8) return f(Int8Product{});
#endif
#if defined(__SSE2__) && !defined(__AVX512BF16__)
  if (precision == Precision::kBfloat16 || precision == Precision::kInt8 || precision == Precision::kInt16)
    return f(Int16Product{});
#endif
  with_float_product(precision, f);
}

}  // namespace aft::AFT_ISA
