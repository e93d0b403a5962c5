// The operators around the attention in a transformer encoder. A constant weight is packed when the session is
// made, any other at every run.

#include "encoder.h"

#include "ops.h"

namespace ops {

namespace {

using ort::Attributes;
using ort::Error;
using ort::Run;
using ort::Shape;
using ort::Tensor;
using ort::to_string;

void expect_shape(const char* input, const Tensor& tensor, const Shape& expected) {
  if (tensor.shape != expected)
    throw Error(std::string(input) + " has shape " + to_string(tensor.shape) + ", expected " + to_string(expected));
}

const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.data); }

// The tensor whose rows are transformed, [..., width].
struct Rows {
  Rows(const char* input, const Tensor& tensor) : shape(tensor.shape), data(floats(tensor)) {
    if (shape.empty()) throw Error(std::string(input) + " has no dimensions, expected [batch, tokens, width]");
    width = shape.back();
    for (size_t i = 0; i + 1 < shape.size(); ++i) count *= shape[i];
  }
  Shape with_width(int64_t other) const {
    Shape changed = shape;
    changed.back() = other;
    return changed;
  }

  Shape shape;
  const float* data;
  int64_t count = 1, width;
};

// One weight input of a node.
class Weight {
 public:
  Weight(const char* name, size_t index, const Attributes& attributes)
      : name_(name), index_(index), precision_(read_precision(attributes)) {
    Tensor tensor;
    if (attributes.constant(index, tensor)) packed_ = pack(tensor);
  }

  // The weight for rows of `width` values; packed for this run if it was not before.
  std::shared_ptr<const aft::PackedWeight> get(const Run& run, int64_t width) const {
    const std::shared_ptr<const aft::PackedWeight> packed = packed_ ? packed_ : pack(run.input(index_));
    if (packed->rows != width)
      throw Error(std::string(name_) + " has " + std::to_string(packed->rows) + " rows, expected " +
                  std::to_string(width));
    return packed;
  }

 private:
  std::shared_ptr<const aft::PackedWeight> pack(const Tensor& tensor) const {
    if (tensor.shape.size() != 2 || tensor.shape[0] < 1 || tensor.shape[1] < 1)
      throw Error(std::string(name_) + " has shape " + to_string(tensor.shape) + ", expected two dimensions");
    return aft::pack_weight(floats(tensor), tensor.shape[0], tensor.shape[1], precision_);
  }

  const char* name_;
  size_t index_;
  aft::Precision precision_;
  std::shared_ptr<const aft::PackedWeight> packed_;
};

const float* read_vector(const char* name, const Run& run, size_t index, int64_t width) {
  const Tensor tensor = run.input(index);
  expect_shape(name, tensor, {width});
  return floats(tensor);
}

// Inputs 1 and 2 of the operators that begin with a layer norm.
aft::LayerNorm read_norm(const Run& run, int64_t width, float epsilon) {
  return {read_vector("norm_weight", run, 1, width), read_vector("norm_bias", run, 2, width), epsilon};
}

class LayerNormLinear final : public Kernel {
 public:
  LayerNormLinear(const Settings&, const Attributes& attributes)
      : epsilon_(attributes.number("epsilon", 1e-5f)), weight_("weight", 3, attributes) {}

  void compute(const Run& run) const override {
    const Rows x("x", run.input(0));
    const auto weight = weight_.get(run, x.width);
    const float* bias = read_vector("bias", run, 4, weight->columns);
    float* output = static_cast<float*>(run.output(x.with_width(weight->columns)));
    if (x.count > 0)
      aft::layer_norm_linear({x.count, x.data, read_norm(run, x.width, epsilon_), weight.get(), bias, output},
                             run.parallel());
  }

 private:
  float epsilon_;
  Weight weight_;
};

class LayerNormFeedForward final : public Kernel {
 public:
  LayerNormFeedForward(const Settings&, const Attributes& attributes)
      : epsilon_(attributes.number("epsilon", 1e-5f)),
        weight_in_("weight_in", 3, attributes),
        weight_out_("weight_out", 5, attributes) {}

  void compute(const Run& run) const override {
    const Rows x("x", run.input(0));
    const auto weight_in = weight_in_.get(run, x.width);
    const float* bias_in = read_vector("bias_in", run, 4, weight_in->columns);
    const auto weight_out = weight_out_.get(run, weight_in->columns);
    const float* bias_out = read_vector("bias_out", run, 6, x.width);
    if (weight_out->columns != x.width)
      throw Error("weight_out has " + std::to_string(weight_out->columns) + " columns, expected " +
                  std::to_string(x.width));
    float* output = static_cast<float*>(run.output(x.shape));
    if (x.count > 0)
      aft::layer_norm_feed_forward({x.count, x.data, read_norm(run, x.width, epsilon_), weight_in.get(), bias_in,
                                    weight_out.get(), bias_out, output},
                                   run.parallel());
  }

 private:
  float epsilon_;
  Weight weight_in_, weight_out_;
};

class LinearResidual final : public Kernel {
 public:
  LinearResidual(const Settings&, const Attributes& attributes) : weight_("weight", 1, attributes) {}

  void compute(const Run& run) const override {
    const Rows x("x", run.input(0));
    const auto weight = weight_.get(run, x.width);
    const float* bias = read_vector("bias", run, 2, weight->columns);
    const Tensor residual = run.input(3);
    expect_shape("residual", residual, x.with_width(weight->columns));
    float* output = static_cast<float*>(run.output(residual.shape));
    if (x.count > 0)
      aft::linear_residual({x.count, x.data, weight.get(), bias, floats(residual), output}, run.parallel());
  }

 private:
  Weight weight_;
};

template <class Op>
Kernel* create(const Settings& settings, const Attributes& attributes) {
  return new Op(settings, attributes);
}

}  // namespace

const Operator kEncoderOperators[3] = {
    {"LayerNormLinear", 5, create<LayerNormLinear>, false, -1},
    {"LayerNormFeedForward", 7, create<LayerNormFeedForward>, false, 0},
    {"LinearResidual", 4, create<LinearResidual>, false, 3},
};

}  // namespace ops
