// Reading attributes and checking shapes, for operators that are not in the table of mechanisms. Every function throws
// Error, which names the attribute or the input, its value and the expected one.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "ops.h"

namespace ops {

void expect_three_dimensions(const char* input, const Tensor& tensor);

// Returns the attribute `name`, a number of at least 1 and by default 1.
int64_t read_count(const Attributes& attributes, const char* name);

// Returns the attribute eps, which expect_eps checks.
float read_eps(const Attributes& attributes, float otherwise);

// Returns the place in `choices` of the attribute's value, which is `otherwise` where a node does not have it.
size_t read_choice(const Attributes& attributes, const char* name, const std::vector<std::string>& choices,
                   const char* otherwise);

// Returns the attribute precision, one of those allowed, fp32 by default.
aft::Precision read_precision(const Attributes& attributes, std::initializer_list<aft::Precision> allowed);

}  // namespace ops
