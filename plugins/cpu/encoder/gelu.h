// Computes:    gelu(x) = x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2: the exact form, not the one with tanh
// Valid range: all x
// Max error:   gelu 1.6e-7 max(1, |x|), coarse_gelu 1.2e-5 max(1, |x|), absolute
// Method:      Phi(x) = 1/2 + x p(x^2), p minimax of degree 14 on |x| <= 5.2, or of degree 8 on |x| <= 4.4, in the
//              variable t = 2 x^2 / edge^2 - 1, which keeps the coefficients small; beyond, Phi is 0 or 1 to 1e-7 or
//              6e-6. No division and no exponential.
#pragma once

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

}  // namespace aft::AFT_ISA
