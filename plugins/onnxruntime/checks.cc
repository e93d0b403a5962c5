#include "checks.h"

namespace ops {

namespace {

using ort::to_string;

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
std::string list_names(std::initializer_list<aft::Precision> precisions) {
  std::string names;
  for (const aft::Precision* precision = precisions.begin(); precision != precisions.end(); ++precision) {
    if (precision != precisions.begin()) names += precision + 1 == precisions.end() ? " or " : ", ";
    names += name_of(*precision);
  }
  return names;
}

}  // namespace

void expect(bool condition, const std::string& message) {
  if (!condition) throw ort::Error(message);
}

void expect_shape(const char* input, const ort::Tensor& tensor, const ort::Shape& expected) {
  expect(tensor.shape == expected,
         std::string(input) + " has shape " + to_string(tensor.shape) + ", expected " + to_string(expected));
}

int64_t read_heads(const ort::Attributes& attributes) {
  const int64_t heads = attributes.integer("num_heads", 1);
  expect(heads > 0, "num_heads is " + std::to_string(heads) + ", expected at least 1");
  return heads;
}

aft::Precision read_precision(const ort::Attributes& attributes, std::initializer_list<aft::Precision> allowed) {
  const std::string name = attributes.text("precision", "fp32");
  for (aft::Precision precision : allowed)
    if (name == name_of(precision)) return precision;
  throw ort::Error("precision is \"" + name + "\", expected " + list_names(allowed));
}

}  // namespace ops
