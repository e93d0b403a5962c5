// Instructions that are only approximate. The results of a GPU come from tables that are not published, so here each is
// off by up to 1.5 units in the last place, in a way that the bits of the operands decide: what holds with any table
// must hold with this one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// x, which is rounded to nearest, or a neighbour of it; zeros, infinities, NaN and what borders on them stay.
inline float perturbed(float x, uint32_t salt) {
  uint32_t bits = bits_of(x);
  const uint32_t exponent = bits >> 23 & 255;
  if (exponent < 2 || exponent > 253) return x;
  uint32_t mixed = salt * 2654435761u;
  mixed = (mixed ^ mixed >> 15) * 0x7feb352du;
  bits += (mixed >> 16) % 3 - 1;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Numbers below 2^-126 count as 0 for instructions with .ftz.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// ex2.approx.ftz.f32, which has 2^0 exactly.
inline float approximate_exp2(float x) {
  return flushed(x) == 0.0f ? 1.0f : flushed(perturbed(std::exp2(x), bits_of(x)));
}

// __fdividef: 0 for a divisor above 2^126, or NaN where infinity is divided by it.
inline float approximate_quotient(float x, float y) {
  if (std::fabs(y) > 0x1p126f) return std::isinf(x) ? NAN : x * 0.0f;
  return perturbed(x / y, bits_of(x) ^ bits_of(y) * 31u);
}

}  // namespace emulator
