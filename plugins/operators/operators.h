// The mechanisms as operators of domain ai.aftexport, for every runtime: for each its inputs with their axes, its
// attributes, the check of its shapes, and the parameters of its kernel.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "cpu/kernels.h"

namespace ops {

// What went wrong with a node, in words meant for the person who made the model.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void expect(bool condition, const std::string& otherwise) {
  if (!condition) throw Error(otherwise);
}

using Shape = std::vector<int64_t>;  // -1: not yet known

// "[2, -1, 64]"
std::string to_string(const Shape&);

// "sigmoid, tanh or none", of the first `count` words.
std::string list_words(const std::vector<std::string>& words, size_t count);

struct Tensor {
  Shape shape;
  const void* data;
};

// Throw Error with the name of the input, its shape and the expected one. A tensor of heads has three dimensions, the
// last one of which they share.
void expect_shape(const char* input, const Tensor&, const Shape& expected);
void expect_heads_divide(int64_t heads, const char* input, const Tensor&);

// The kernels for CUDA lack some forms, which a node then runs by its body.
enum class Device { kCpu, kCuda };

// The maximum channels of a head of Efficient and linear attention on a CUDA device.
constexpr int64_t kMaxCudaHeadChannels = 256;

// The values of all attributes that there are, with their defaults. A choice is the index of its word.
struct Values {
  int32_t gate = 0, normalization = 0, feature_map = 0, precision = 0, normalizer = 0;
  int32_t num_heads = 1, kv_num_heads = 0, key_heads = 0;
  float scale = 1.0f, eps = 1e-6f, denominator_eps = 0.0f;
};

struct Attribute {
  const char* name;
  int32_t Values::* integer = nullptr;  // an integer or a choice
  float Values::* number = nullptr;
  std::vector<std::string> words = {};  // of a choice
  size_t cuda_words = words.size();     // how many of the first ones the CUDA kernels have
  bool cuda_has_default_only = false;   // 0, of a number
  int32_t least = 0;                    // of an integer

  // Returns the index of a word. Throws Error where it is none of those that the device has.
  int32_t index_of(const std::string& word, Device) const;
  // Throws Error where a number, before it is narrowed to 32 bits, is not allowed.
  void check(int64_t value, Device) const;
  void check(double value, Device) const;
};

// Throws Error unless eps is finite and at least 0. Operators whose eps must be above 0 take 0 as well: float32 makes
// 0 of a number below 1e-45, and counts both as the smallest eps.
void expect_eps(double eps);

// An axis is a letter: axes of one letter are equal. B batch, T tokens, D channels, H num_heads; the others
// are the operator's own.
struct Input {
  const char* name;
  const char* axes;
};

// One call of an operator, or only its shapes.
struct Call {
  aft::Element element;
  bool causal;
  Device device;
  Values values;
  std::vector<Tensor> inputs;         // those of the operator's `inputs`
  std::optional<Tensor> key_lengths;  // absent in causal form
  void* output;
};

// AFT-full around a matrix product of the runtime, for CUDA only; cuda/kernels.h has the formulas.
struct AftFullPrepare : aft::AftFull {};  // of key, value and lengths
struct AftFullFinish : aft::AftFull {
  const void* products;
};

// The parameters of a kernel.
using Params = std::variant<aft::AftSimple, aft::AftFull, aft::AftLocal, aft::AftConv, aft::EfficientAttention,
                            aft::LinearAttention, aft::Fastformer, AftFullPrepare, AftFullFinish>;

class Axes;

struct Mechanism {
  const char* name;  // without the prefix Causal
  std::vector<Input> inputs;
  std::vector<Attribute> attributes;
  // Checks that the heads divide the channels, and sets the axes that follow from those of the first input.
  void (*derive)(const Call&, Axes&);
  void (*check)(const Call&, const Axes&);  // of all inputs
  Params (*params)(const Call&);
  bool takes_key_lengths = false;  // after `inputs`, not in causal form
  bool has_causal_form = true;
  // The output is [batch, tokens, as many channels], of the first input's or of `values_channels`.
  enum class Width { kFirstInput, kValueHeads, kTwice } width = Width::kFirstInput;
};

// In every runtime, and those that only the CUDA kernels have.
const std::vector<Mechanism>& mechanisms();
const std::vector<Mechanism>& cuda_mechanisms();

// Throws Error where a number is not allowed, or values do not fit each other.
void check_values(const Mechanism&, const Values&, Device);

// Throws Error where shapes, as far as they are known, do not fit the operator.
void check_shapes(const Mechanism&, const Call&);

Shape output_shape(const Mechanism&, const Call&);

}  // namespace ops
