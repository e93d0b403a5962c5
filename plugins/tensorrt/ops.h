// The operators of domain ai.aftexport: for each its inputs, its fields and the call of its kernel.
#pragma once

#include <string>
#include <vector>

#include "fields.h"
#include "kernels.h"

namespace ops {

using Shape = std::vector<int64_t>;  // -1: not yet known

// "[2, -1, 64]"
std::string to_string(const Shape& shape);

struct Tensor {
  Shape shape;
  const void* data;
};

// One call of an operator, or only its shapes.
struct Call {
  Settings settings;
  bool causal;
  AftCudaElement element;
  std::vector<Tensor> inputs;
  void* output;
};

// An axis is a letter: axes of one letter are equal. B batch, T tokens, D channels, H num_heads; the others
// are the operator's own.
struct Input {
  const char* name;
  const char* axes;
};

class Axes;

struct Operator {
  const char* name;           // without the prefix Causal
  std::vector<Input> inputs;  // lengths last; the output is like the first
  std::vector<Field> fields;
  void (*check)(const Axes&, bool causal);  // throws Error
  size_t (*workspace)(const Call&);
  int (*enqueue)(const Call&, void* workspace, cudaStream_t);  // returns a cudaError_t
  bool has_causal_form = true;
  bool doubles_channels = false;  // the output has twice the channels of the first input
};

const std::vector<Operator>& operators();

// Throws Error where shapes, as far as they are known, do not fit the operator.
void check_shapes(const Operator& op, const Settings& settings, bool causal, const std::vector<Shape>& shapes);

}  // namespace ops
