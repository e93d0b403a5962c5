// Reading attributes and checking shapes, as all operators do. Every function throws ort::Error, which names the
// attribute or the input, its value and the expected one.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "ops.h"

namespace ops {

void expect(bool condition, const std::string& message);
void expect_shape(const char* input, const Tensor& tensor, const Shape& expected);
void expect_three_dimensions(const char* input, const Tensor& tensor);
void expect_matrix(const char* input, const Tensor& tensor);
void expect_position_bias(const Tensor& bias, const Shape& query);  // query: [batch, tokens, width]
void expect_heads_divide(int64_t heads, const char* input, const Shape& shape);  // shape: [batch, tokens, width]

// Returns the attribute `name`, a number of at least 1 and by default 1.
int64_t read_count(const Attributes& attributes, const char* name);

// Returns the attribute eps, a finite number of at least 0. Operators whose eps must be above 0 take 0 as well: float32
// makes 0 of a number below 1e-45, and counts both as the smallest eps.
float read_eps(const Attributes& attributes, float otherwise);

// Returns the place in `choices` of the attribute's value, which is `otherwise` where a node does not have it.
size_t read_choice(const Attributes& attributes, const char* name, const std::vector<const char*>& choices,
                   const char* otherwise);

// Returns the attribute gate, by default sigmoid.
aft::Gate read_gate(const Attributes& attributes);

// Returns the attribute precision, one of those allowed, fp32 by default.
aft::Precision read_precision(const Attributes& attributes, std::initializer_list<aft::Precision> allowed);

}  // namespace ops
