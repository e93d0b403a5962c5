#include "checks.h"

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

}  // namespace

void expect_three_dimensions(const char* input, const Tensor& tensor) {
  expect(tensor.shape.size() == 3,
         std::string(input) + " has shape " + to_string(tensor.shape) + ", expected [batch, tokens, width]");
}

int64_t read_count(const Attributes& attributes, const char* name) {
  const int64_t count = attributes.integer(name, 1);
  expect(count > 0, std::string(name) + " is " + std::to_string(count) + ", expected at least 1");
  return count;
}

float read_eps(const Attributes& attributes, float otherwise) {
  const float eps = attributes.number("eps", otherwise);
  expect_eps(double{eps});
  return eps;
}

size_t read_choice(const Attributes& attributes, const char* name, const std::vector<std::string>& choices,
                   const char* otherwise) {
  const std::string value = attributes.text(name, otherwise);
  for (size_t i = 0; i < choices.size(); ++i)
    if (value == choices[i]) return i;
  throw Error(std::string(name) + " is \"" + value + "\", expected " + list_words(choices, choices.size()));
}

aft::Precision read_precision(const Attributes& attributes, std::initializer_list<aft::Precision> allowed) {
  std::vector<std::string> names;
  for (aft::Precision precision : allowed) names.push_back(name_of(precision));
  return allowed.begin()[read_choice(attributes, "precision", names, "fp32")];
}

}  // namespace ops
