// Reading attributes and checking shapes, as all operators do. Every function throws ort::Error, which names the
// attribute or the input, its value and the expected one.
#pragma once

#include <initializer_list>
#include <string>

#include "runtime.h"

namespace ops {

void expect(bool condition, const std::string& message);
void expect_shape(const char* input, const ort::Tensor& tensor, const ort::Shape& expected);

// Returns the attribute num_heads, 1 by default.
int64_t read_heads(const ort::Attributes& attributes);

// Returns the attribute precision, one of those allowed, fp32 by default.
aft::Precision read_precision(const ort::Attributes& attributes, std::initializer_list<aft::Precision> allowed);

}  // namespace ops
