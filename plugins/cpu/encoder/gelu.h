// Computes:    gelu(x) = x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2: the exact form, not the one with tanh
// Valid range: all x
// Max error:   1.6e-7 max(1, |x|), absolute
// Method:      Phi(x) = 1/2 + x p(x^2), p minimax of degree 14 on |x| <= 5.2 in the variable t = 2 x^2 / 5.2^2 - 1,
//              which keeps the coefficients small; beyond, Phi is 0 or 1 to 1e-7. No division and no exponential.
#pragma once

#include "simd/math.h"

namespace aft::AFT_ISA {

AFT_INLINE Vec gelu(Vec x) {
  constexpr float kEdge = 5.2f;
  const Vec inside = at_most(splat(kEdge), at_least(splat(-kEdge), x));
  const Vec t = inside * inside * (2.0f / (kEdge * kEdge)) - 1.0f;
  constexpr float kCoefficients[] = {1.65219762e-4f, -5.30101717e-4f, 7.08516185e-4f,  -1.06911524e-3f, 2.54228476e-3f,
                                     -4.9704154e-3f, 8.07477551e-3f,  -1.24024887e-2f, 1.81166637e-2f,  -2.4751542e-2f,
                                     3.19644122e-2f, -3.99266104e-2f, 5.00260217e-2f,  -6.77437711e-2f, 1.35949979e-1f};
  const Vec phi = inside * polynomial(t, kCoefficients) + 0.5f;
  return x < -kEdge ? Vec{} : x * phi;
}

}  // namespace aft::AFT_ISA
