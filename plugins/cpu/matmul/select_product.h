// The products of this instruction set, and the choice of one by its method.
#pragma once

#include "matmul/product_amx.h"
#include "matmul/product_bf16.h"
#include "matmul/product_bias_weights.h"
#include "matmul/product_fp32.h"
#include "matmul/product_int16.h"
#include "matmul/product_int8.h"
#include "matmul/product_neon.h"

namespace aft::AFT_ISA {

template <class... Product>
struct ProductList {};

using Products = ProductList<Float32Product
#if defined(__SSE2__)
                             ,
                             Int16Product
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
                             ,
                             Bfloat16Product
#endif
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
                             ,
                             Int8Product
#endif
#if defined(AFT_AMX)
                             ,
                             AmxBfloat16Product, AmxInt8Product
#endif
                             >;

// Calls f with a value of the product of that method. Returns false where the list has none.
template <class... Product, class F>
bool visit_method(ProductList<Product...>, Method method, const F& f) {
  return ((Product::kMethod == method && (f(Product{}), true)) || ...);
}

// Methods come from usable_methods() or a packed weight, so that the list has them.
template <class F>
void with_method(Method method, const F& f) {
  if (!visit_method(Products{}, method, f)) __builtin_trap();
}

// The same for the weights of AFT-full.
template <class F>
void with_weight_method(Method method, const F& f) {
  with_method(method, [&](auto product) { f(typename WeightProductOf<decltype(product)>::Type{}); });
}

// Whether the products of a method are in integers.
inline bool is_scaled(Method method) {
  bool scaled = false;
  with_method(method, [&](auto product) { scaled = decltype(product)::kScaled; });
  return scaled;
}

// Returns the first of the methods whose products are in floating point.
inline Method float_method(const MethodOrder& order) {
  for (int i = 0; i < order.count; ++i)
    if (!is_scaled(order.methods[i])) return order.methods[i];
  return Method::kFloat32;
}

}  // namespace aft::AFT_ISA
