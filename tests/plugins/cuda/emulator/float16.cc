#include "float16.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace emulator {

float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                     : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits >> 15 ? -size : size;
}

uint16_t float_to_half(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (std::isnan(x)) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  // Units of the last place, subnormals included; rounding up to the next power carries into the exponent.
  const int exponent = std::max(size > 0.0f ? std::ilogb(size) : -14, -14);
  const int units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + units));
}

uint16_t float_to_bfloat(float x) {
  if (std::isnan(x)) return 0x7fff;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float bfloat_to_float(uint16_t bits_) {
  const uint32_t bits = static_cast<uint32_t>(bits_) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

}  // namespace emulator
