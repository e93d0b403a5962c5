// The operators of domain ai.aftexport: for each its attributes, the check of its inputs and the call of
// its kernel. A kernel object is created with the session and runs once per inference.
#pragma once

#include <string>

#include "runtime.h"

namespace ops {

using ort::Attributes;
using ort::Run;
using ort::Shape;
using ort::Tensor;
using ort::to_string;

struct Settings {
  std::string name;
  aft::Element element;
  bool causal;
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
};

constexpr Operator with_key_lengths(Operator op) {
  op.key_lengths = 1;
  return op;
}

extern const Operator kOperators[7];
extern const Operator kEncoderOperators[5];    // encoder_ops.cc; no causal form
extern const Operator kRecurrentOperators[2];  // recurrent_ops.cc; the same

}  // namespace ops
