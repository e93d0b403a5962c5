// The choice of a method for a precision: of those that keep its error bound the fastest, by measurement.
#pragma once

#include <string>

#include "encoder.h"

namespace aft {

// For the weights of an encoder's operators whose common side is `width`. A choice never changes within a process.
Method choose_method(Precision, int64_t width);

// For the weights of AFT-full, of which the range of the biases may exclude the first.
MethodOrder choose_weight_methods(Precision);

// The choice as JSON: {"method": "int8", "chosen_by": "measurement", "width": 256, "rates": {"fp32": 61.2, ...}, ...}.
// A width of 0 stands for AFT-full's weights.
std::string describe_choice(Precision, int64_t width);

// Throws std::invalid_argument where the environment variable AFTEXPORT_METHOD names no method of this machine.
void check_method_variable();

}  // namespace aft
