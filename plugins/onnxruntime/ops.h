// The operators of domain ai.aftexport as ONNX Runtime's kernels. A kernel object is created with the session and runs
// once per inference.
#pragma once

#include <string>
#include <vector>

#include "operators/operators.h"
#include "runtime.h"

namespace ops {

using ort::Attributes;
using ort::Run;

struct Settings {
  std::string name;
  aft::Element element;
  bool causal;
  const Mechanism* mechanism = nullptr;  // of one of the table
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void compute(const Run& run) const = 0;
};

template <class Op>
Kernel* create(const Settings& settings, const Attributes& attributes) {
  return new Op(settings, attributes);
}

struct Operator {
  const char* name;  // without the prefix Causal
  size_t inputs;     // lengths, where taken, is the last
  Kernel* (*create)(const Settings&, const Attributes&);
  bool takes_lengths = true;
  // The input whose shape the required outputs have; -1: none. With key_lengths this holds only if query, key and value
  // are equally wide.
  int output_like = 0;
  size_t outputs = 1;
  uint32_t optional_inputs = 0;  // bit i: input i may be absent
  size_t optional_outputs = 0;   // how many of the last outputs may be
  size_t key_lengths = 0;        // 1: after `inputs` the optional input key_lengths, which causal operators lack
  const Mechanism* mechanism = nullptr;
  uint32_t integer_inputs = 0;  // bit i: input i is int64, beside those that takes_lengths tells
  uint32_t float_outputs = 0;   // bit i: output i is float32 for every element
};

// Returns the operators of these mechanisms.
std::vector<Operator> operators_of(const std::vector<Mechanism>&);

extern const Operator kEncoderOperators[5];    // encoder_ops.cc
extern const Operator kRecurrentOperators[2];  // recurrent_ops.cc
extern const Operator kSoftmaxAttention;       // softmax_attention_op.cc

}  // namespace ops
