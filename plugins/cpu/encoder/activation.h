// The activations of a hidden layer.
//
// | name      | formula                                                           | max error, absolute, of max(1, |x|) |
// |-----------|-------------------------------------------------------------------|-------------------------------------|
// | gelu      | x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2                     | 1.6e-7; coarse_gelu 1.2e-5          |
// | gelu_tanh | x (1 + tanh(y)) / 2, y = sqrt(2 / pi) (x + 0.044715 x^3)          | 4e-7                                |
// | silu      | x / (1 + exp(-x))                                                 | 4e-7                                |
// | relu      | max(x, 0)                                                         | 0                                   |
//
// Valid range: all x
// Method:      Phi(x) = 1/2 + x p(x^2), p minimax of degree 14 on |x| <= 5.2, or of degree 8 on |x| <= 4.4, in the
//              variable t = 2 x^2 / edge^2 - 1, which keeps the coefficients small; beyond, Phi is 0 or 1 to 1e-7 or
//              6e-6. No division and no exponential. (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)).
#pragma once

#include "encoder.h"
#include "simd/math.h"

namespace aft::AFT_ISA {

template <int kCount>
AFT_INLINE Vec gelu_by_polynomial(Vec x, float edge, const float (&coefficients)[kCount]) {
  const Vec inside = at_most(splat(edge), x);  // below -edge the result is 0, whatever p is
  const Vec t = inside * inside * (2.0f / (edge * edge)) - 1.0f;
  const Vec phi = inside * polynomial(t, coefficients) + 0.5f;
  return x < -edge ? Vec{} : x * phi;
}

AFT_INLINE Vec gelu(Vec x) {
  return gelu_by_polynomial(x, 5.2f,
                            {1.65219762e-4f, -5.30101717e-4f, 7.08516185e-4f, -1.06911524e-3f, 2.54228476e-3f,
                             -4.9704154e-3f, 8.07477551e-3f, -1.24024887e-2f, 1.81166637e-2f, -2.4751542e-2f,
                             3.19644122e-2f, -3.99266104e-2f, 5.00260217e-2f, -6.77437711e-2f, 1.35949979e-1f});
}

// A cheaper polynomial, for results that are rounded to fewer digits.
AFT_INLINE Vec coarse_gelu(Vec x) {
  return gelu_by_polynomial(x, 4.4f,
                            {3.25572072e-3f, -8.28916486e-3f, 1.02494312e-2f, -1.54250367e-2f, 2.71197744e-2f,
                             -4.02948782e-2f, 5.52111082e-2f, -7.85942972e-2f, 1.60405055e-1f});
}

// x / (1 + exp(-z)). The bounds of z keep the exponential within its range, and its inverse too small to be seen.
AFT_INLINE Vec times_sigmoid(Vec x, Vec z) {
  return x / (1.0f + exp_in_range(-at_most(splat(-kExpLow), at_least(splat(-kExpHigh), z))));
}

AFT_INLINE Vec silu(Vec x) { return times_sigmoid(x, x); }

AFT_INLINE Vec gelu_tanh(Vec x) { return times_sigmoid(x, x * (1.59576912f + 0.0713548163f * x * x)); }

template <bool kCoarse>
AFT_INLINE Vec activate(Activation activation, Vec x) {
  switch (activation) {
    case Activation::kGeluTanh: return gelu_tanh(x);
    case Activation::kRelu: return at_least(Vec{}, x);
    case Activation::kSilu: return silu(x);
    default: return kCoarse ? coarse_gelu(x) : gelu(x);
  }
}

}  // namespace aft::AFT_ISA
