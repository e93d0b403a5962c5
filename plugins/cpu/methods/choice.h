// The choice of a method for a precision: of those that keep its error bound the fastest, by measurement.
#pragma once

#include <string>

#include "matmul/packed_weight.h"

namespace aft {

// Chooses the methods of an encoder's operator. The constructor reads the environment variable AFTEXPORT_METHOD, so that
// weights that are packed at different times have the same method. A choice for a width never changes afterwards.
class MethodChooser {
 public:
  // Throws std::invalid_argument where AFTEXPORT_METHOD names a method that this machine lacks.
  explicit MethodChooser(Precision);

  // For weights whose common side is `width`.
  Method choose(int64_t width) const;

 private:
  Precision precision_;
  MethodOrder forced_;
};

// For the weights of AFT-full, of which the range of the biases may exclude the first.
MethodOrder choose_weight_methods(Precision);

// The choice as JSON, with rates in million multiply-adds a second:
//   {"methods": ["int8", ...], "chosen_by": "measurement", "products": "encoder_256", "rates": {"fp32": 61234, ...},
//    "kept": true, "instruction_set": "avx512_vnni", "processor": "..."}
// A width of 0 stands for AFT-full's weights.
std::string describe_choice(Precision, int64_t width);

// Throws std::invalid_argument where the environment variable AFTEXPORT_METHOD names a method that this machine lacks.
void check_method_variable();

}  // namespace aft
