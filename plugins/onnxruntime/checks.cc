#include "checks.h"

#include <cmath>
#include <cstdio>

namespace ops {

namespace {

const char* name_of(aft::Precision precision) {
  switch (precision) {
    case aft::Precision::kFloat32: return "fp32";
    case aft::Precision::kFloat16: return "fp16";
    case aft::Precision::kBfloat16: return "bf16";
    case aft::Precision::kInt8: return "int8";
  }
  throw std::logic_error("a precision has no name");
}

// "fp32, bf16 or int8"
std::string list_names(const std::vector<const char*>& names) {
  std::string list;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) list += i + 1 == names.size() ? " or " : ", ";
    list += names[i];
  }
  return list;
}

}  // namespace

void expect(bool condition, const std::string& message) {
  if (!condition) throw ort::Error(message);
}

void expect_shape(const char* input, const Tensor& tensor, const Shape& expected) {
  expect(tensor.shape == expected,
         std::string(input) + " has shape " + to_string(tensor.shape) + ", expected " + to_string(expected));
}

void expect_three_dimensions(const char* input, const Tensor& tensor) {
  expect(tensor.shape.size() == 3,
         std::string(input) + " has shape " + to_string(tensor.shape) + ", expected [batch, tokens, width]");
}

void expect_matrix(const char* input, const Tensor& tensor) {
  expect(tensor.shape.size() == 2,
         std::string(input) + " has shape " + to_string(tensor.shape) + ", expected two dimensions");
}

void expect_position_bias(const Tensor& bias, const Shape& query) {
  expect_matrix("position_bias", bias);
  expect(bias.shape[0] >= query[1] && bias.shape[1] >= query[1],
         "query has shape " + to_string(query) + ", longer than position_bias " + to_string(bias.shape) + " allows");
}

void expect_heads_divide(int64_t heads, const char* input, const Shape& shape) {
  expect(shape[2] % heads == 0,
         std::string(input) + " has shape " + to_string(shape) + ", whose width is not divisible by num_heads " +
             std::to_string(heads));
}

int64_t read_count(const Attributes& attributes, const char* name) {
  const int64_t count = attributes.integer(name, 1);
  expect(count > 0, std::string(name) + " is " + std::to_string(count) + ", expected at least 1");
  return count;
}

float read_eps(const Attributes& attributes, float otherwise) {
  const float eps = attributes.number("eps", otherwise);
  char text[32];  // not by a stream, which would bring the locales of libstdc++ into the wheel
  std::snprintf(text, sizeof text, "%g", static_cast<double>(eps));
  expect(eps >= 0.0f && std::isfinite(eps), std::string("eps is ") + text + ", expected a finite number of at least 0");
  return eps;
}

size_t read_choice(const Attributes& attributes, const char* name, const std::vector<const char*>& choices,
                   const char* otherwise) {
  const std::string value = attributes.text(name, otherwise);
  for (size_t i = 0; i < choices.size(); ++i)
    if (value == choices[i]) return i;
  throw ort::Error(std::string(name) + " is \"" + value + "\", expected " + list_names(choices));
}

aft::Gate read_gate(const Attributes& attributes) {
  return static_cast<aft::Gate>(read_choice(attributes, "gate", {"sigmoid", "tanh", "none", "relu"}, "sigmoid"));
}

aft::Precision read_precision(const Attributes& attributes, std::initializer_list<aft::Precision> allowed) {
  std::vector<const char*> names;
  for (aft::Precision precision : allowed) names.push_back(name_of(precision));
  return allowed.begin()[read_choice(attributes, "precision", names, "fp32")];
}

}  // namespace ops
