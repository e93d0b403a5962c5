// float16 and bfloat16 as their bits, rounded to nearest even.
#pragma once

#include <cstdint>

namespace emulator {

float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);
float bfloat_to_float(uint16_t bits);
uint16_t float_to_bfloat(float x);

}  // namespace emulator
