// The functions of simd/math.h and encoder/activation.h on arrays, once per instruction set: `count` numbers of x to y.
// `half` stores a number as float16 and loads it again.
#pragma once

#include <cstdint>

namespace aft {

struct MathFunctions {
  using Function = void (*)(const float* x, int64_t count, float* y);
  Function exp, sigmoid, tanh, gelu, coarse_gelu, gelu_tanh, relu, silu, half;
};

namespace baseline {
extern const MathFunctions math_functions;
}
namespace avx2 {
extern const MathFunctions math_functions;
}
namespace avx512 {
extern const MathFunctions math_functions;
}

}  // namespace aft
