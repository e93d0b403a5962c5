// The choice of a method for a precision.
#pragma once

#include "encoder.h"

namespace aft {

// For the weights of an encoder's operators whose common side is `width`.
Method choose_method(Precision, int64_t width);

// For the weights of AFT-full, of which the range of the biases may exclude the first.
MethodOrder choose_weight_methods(Precision);

}  // namespace aft
