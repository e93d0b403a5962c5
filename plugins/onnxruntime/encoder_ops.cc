// The operators around the attention in a transformer encoder. A constant weight is packed, and constant float16
// parameters are converted, when the session is made, any other at every run.

#include "cpu/encoder.h"
#include "cpu/methods/choice.h"

#include <initializer_list>
#include <optional>

#include "checks.h"
#include "ops.h"

namespace ops {

namespace {

constexpr std::initializer_list<aft::Precision> kPrecisions = {aft::Precision::kFloat32, aft::Precision::kBfloat16,
                                                               aft::Precision::kInt8};

// The tensor whose rows are transformed, [..., width].
struct Rows {
  Rows(const char* input, const Tensor& tensor) : shape(tensor.shape), data(tensor.data) {
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
  const void* data;
  int64_t count = 1, width;
};

// An input of parameters, as float32; its data is null where an optional one is absent.
class Parameter {
 public:
  struct Floats {
    Shape shape;
    const float* data;
    std::shared_ptr<const std::vector<float>> converted;  // empty: the tensor's own
  };

  Parameter(const char* name, size_t index, const Settings& settings, const Attributes& attributes)
      : name_(name), index_(index), element_(settings.element) {
    Tensor tensor;
    if (element_ == aft::Element::kFloat16 && attributes.constant(index, tensor)) constant_ = to_floats(tensor);
  }

  Floats get(const Run& run, const Shape& expected) const {
    const std::optional<Tensor> tensor = run.optional_input(index_);
    if (!tensor) return {};
    const Floats floats = constant_.converted ? constant_ : to_floats(*tensor);
    expect_shape(name_, {floats.shape, floats.data}, expected);
    return floats;
  }

  Floats to_floats(const Tensor& tensor) const {
    if (element_ == aft::Element::kFloat32) return {tensor.shape, static_cast<const float*>(tensor.data), nullptr};
    int64_t count = 1;
    for (int64_t size : tensor.shape) count *= size;
    const auto converted = std::make_shared<std::vector<float>>(static_cast<size_t>(count));
    aft::half_to_float(tensor.data, count, converted->data());
    return {tensor.shape, converted->data(), converted};
  }

 private:
  const char* name_;
  size_t index_;
  aft::Element element_;
  Floats constant_{};
};

// An input that is the right side of a product. The weights of one operator have one chooser and one side in common, its
// width, for which it chooses their method.
class Weight {
 public:
  enum class Width { kRows, kColumns };

  Weight(const char* name, size_t index, const Settings& settings, const Attributes& attributes,
         const aft::MethodChooser& chooser, Width width = Width::kRows)
      : name_(name), index_(index), chooser_(chooser), width_(width), floats_(name, index, settings, attributes) {
    Tensor tensor;
    if (attributes.constant(index, tensor)) packed_ = pack(tensor);
  }

  // The weight for rows of `width` values, packed for this run if it was not before; null where it is absent.
  std::shared_ptr<const aft::PackedWeight> get(const Run& run, int64_t width) const {
    const std::optional<Tensor> tensor = run.optional_input(index_);
    if (!tensor) return nullptr;
    const std::shared_ptr<const aft::PackedWeight> packed = packed_ ? packed_ : pack(*tensor);
    if (packed->rows != width)
      throw Error(std::string(name_) + " has " + std::to_string(packed->rows) + " rows, expected " +
                  std::to_string(width));
    return packed;
  }

 private:
  std::shared_ptr<const aft::PackedWeight> pack(const Tensor& tensor) const {
    if (tensor.shape.size() != 2 || tensor.shape[0] < 1 || tensor.shape[1] < 1)
      throw Error(std::string(name_) + " has shape " + to_string(tensor.shape) + ", expected two dimensions");
    const int64_t rows = tensor.shape[0], columns = tensor.shape[1];
    const aft::Method method = chooser_.choose(width_ == Width::kRows ? rows : columns);
    return aft::pack_weight(floats_.to_floats(tensor).data, rows, columns, method);
  }

  const char* name_;
  size_t index_;
  aft::MethodChooser chooser_;
  Width width_;
  Parameter floats_;
  std::shared_ptr<const aft::PackedWeight> packed_;
};

aft::MethodChooser read_chooser(const Attributes& attributes) {
  return aft::MethodChooser(read_precision(attributes, kPrecisions));
}

void expect_columns(const char* name, const aft::PackedWeight& weight, int64_t columns) {
  expect(weight.columns == columns, std::string(name) + " has " + std::to_string(weight.columns) +
                                        " columns, expected " + std::to_string(columns));
}

// A kernel reads the layout of all its weights by the method of the first.
void expect_one_method(const aft::PackedWeight& first, const aft::PackedWeight& other) {
  if (first.method == other.method) return;
  const auto name = [](const aft::PackedWeight& weight) {
    return std::string(aft::kMethods[static_cast<int>(weight.method)].name);
  };
  throw Error("expected weights of one operator with one method, got " + name(first) + " and " + name(other));
}

// Inputs 1 and 2 of the operators that begin with a norm. Both are optional: without a weight, x is not normed.
class Norm {
 public:
  struct Floats {
    aft::Norm norm;
    Parameter::Floats weight, bias;
  };

  Norm(const Settings& settings, const Attributes& attributes)
      : weight_("norm_weight", 1, settings, attributes),
        bias_("norm_bias", 2, settings, attributes),
        epsilon_(attributes.number("epsilon", 1e-5f)),
        rms_(read_choice(attributes, "norm", {"layer", "rms"}, "layer") == 1) {}

  Floats get(const Run& run, int64_t width) const {
    Floats floats{{}, weight_.get(run, {width}), bias_.get(run, {width})};
    expect(floats.weight.data || !floats.bias.data, "norm_weight is absent, expected it beside norm_bias");
    floats.norm = {floats.weight.data, floats.bias.data, epsilon_, rms_};
    return floats;
  }

 private:
  Parameter weight_, bias_;
  float epsilon_;
  bool rms_;
};

class LayerNormLinear : public Kernel {
 public:
  LayerNormLinear(const Settings& settings, const Attributes& attributes)
      : LayerNormLinear(settings, attributes, {{"weight", "bias"}}) {}

  void compute(const Run& run) const override {
    const Rows x("x", run.input(0));
    const auto norm = norm_.get(run, x.width);
    std::vector<std::shared_ptr<const aft::PackedWeight>> weights;
    std::vector<Parameter::Floats> biases;
    std::vector<aft::Linear> linears;
    for (const Parameters& parameters : parameters_) {
      weights.push_back(parameters.weight.get(run, x.width));
      expect_one_method(*weights.front(), *weights.back());
      const int64_t columns = weights.back()->columns;
      biases.push_back(parameters.bias.get(run, {columns}));
      void* output = run.output(linears.size(), x.with_width(columns));
      linears.push_back({weights.back().get(), biases.back().data, output});
    }
    if (x.count > 0)
      aft::layer_norm_linear(
          {element_, x.count, x.data, norm.norm, linears.data(), static_cast<int64_t>(linears.size())}, run.parallel());
  }

 protected:
  struct Names {
    const char *weight, *bias;
  };

  LayerNormLinear(const Settings& settings, const Attributes& attributes, std::initializer_list<Names> linears)
      : element_(settings.element), norm_(settings, attributes) {
    const aft::MethodChooser chooser = read_chooser(attributes);
    size_t index = 3;
    for (const Names& names : linears) {
      parameters_.push_back({Weight(names.weight, index, settings, attributes, chooser),
                             Parameter(names.bias, index + 1, settings, attributes)});
      index += 2;
    }
  }

 private:
  struct Parameters {
    Weight weight;
    Parameter bias;
  };

  aft::Element element_;
  Norm norm_;
  std::vector<Parameters> parameters_;
};

class LayerNormQueryKeyValue final : public LayerNormLinear {
 public:
  LayerNormQueryKeyValue(const Settings& settings, const Attributes& attributes)
      : LayerNormLinear(settings, attributes,
                        {{"query_weight", "query_bias"}, {"key_weight", "key_bias"}, {"value_weight", "value_bias"}}) {}
};

class LayerNormFeedForward final : public Kernel {
 public:
  LayerNormFeedForward(const Settings& settings, const Attributes& attributes)
      : element_(settings.element),
        norm_(settings, attributes),
        chooser_(read_chooser(attributes)),
        weight_in_("weight_in", 3, settings, attributes, chooser_),
        bias_in_("bias_in", 4, settings, attributes),
        weight_out_("weight_out", 5, settings, attributes, chooser_, Weight::Width::kColumns),
        bias_out_("bias_out", 6, settings, attributes),
        weight_up_("weight_up", 7, settings, attributes, chooser_),
        bias_up_("bias_up", 8, settings, attributes),
        activation_(static_cast<aft::Activation>(
            read_choice(attributes, "activation", {"gelu", "gelu_tanh", "relu", "silu"}, "gelu"))) {}

  void compute(const Run& run) const override {
    const Rows x("x", run.input(0));
    const auto norm = norm_.get(run, x.width);
    const auto weight_in = weight_in_.get(run, x.width);
    const auto bias_in = bias_in_.get(run, {weight_in->columns});
    const auto weight_out = weight_out_.get(run, weight_in->columns);
    const auto bias_out = bias_out_.get(run, {x.width});
    const auto weight_up = weight_up_.get(run, x.width);
    const auto bias_up = bias_up_.get(run, {weight_in->columns});
    expect_columns("weight_out", *weight_out, x.width);
    expect_one_method(*weight_in, *weight_out);
    if (weight_up) {
      expect_columns("weight_up", *weight_up, weight_in->columns);
      expect_one_method(*weight_in, *weight_up);
    }
    expect(weight_up || !bias_up.data, "weight_up is absent, expected it beside bias_up");
    void* output = run.output(0, x.shape);
    if (x.count > 0)
      aft::layer_norm_feed_forward(
          {element_, x.count, x.data, norm.norm, weight_in.get(), bias_in.data, weight_out.get(), bias_out.data, output,
           activation_, weight_up.get(), bias_up.data},
          run.parallel());
  }

 private:
  aft::Element element_;
  Norm norm_;
  aft::MethodChooser chooser_;
  Weight weight_in_;
  Parameter bias_in_;
  Weight weight_out_;
  Parameter bias_out_;
  Weight weight_up_;
  Parameter bias_up_;
  aft::Activation activation_;
};

class LinearResidual final : public Kernel {
 public:
  LinearResidual(const Settings& settings, const Attributes& attributes)
      : element_(settings.element),
        weight_("weight", 1, settings, attributes, read_chooser(attributes)),
        bias_("bias", 2, settings, attributes) {}

  void compute(const Run& run) const override {
    const Rows x("x", run.input(0));
    const auto weight = weight_.get(run, x.width);
    const auto bias = bias_.get(run, {weight->columns});
    const Tensor residual = run.input(3);
    expect_shape("residual", residual, x.with_width(weight->columns));
    void* output = run.output(0, residual.shape);
    if (x.count > 0)
      aft::linear_residual({element_, x.count, x.data, weight.get(), bias.data, residual.data, output}, run.parallel());
  }

 private:
  aft::Element element_;
  Weight weight_;
  Parameter bias_;
};

class LayerNormFastformer final : public Kernel {
 public:
  LayerNormFastformer(const Settings& settings, const Attributes& attributes)
      : element_(settings.element),
        heads_(read_count(attributes, "num_heads")),
        norm_(settings, attributes),
        chooser_(read_chooser(attributes)),
        packed_query_weight_("query_weight", 3, settings, attributes, chooser_),
        query_weight_("query_weight", 3, settings, attributes),
        query_bias_("query_bias", 4, settings, attributes),
        key_weight_("key_weight", 5, settings, attributes),
        key_bias_("key_bias", 6, settings, attributes),
        alpha_weight_("alpha_weight", 7, settings, attributes),
        beta_weight_("beta_weight", 8, settings, attributes),
        weight_("weight", 9, settings, attributes, chooser_),
        bias_("bias", 10, settings, attributes) {}

  void compute(const Run& run) const override {
    const Tensor tokens = run.input(0);
    expect_three_dimensions("x", tokens);
    expect_heads_divide(heads_, "x", tokens);
    const Rows x("x", tokens);
    const int64_t width = x.width;
    const auto norm = norm_.get(run, width);
    const auto query_weight = query_weight_.get(run, {width, width}), key_weight = key_weight_.get(run, {width, width});
    const auto query_bias = query_bias_.get(run, {width}), key_bias = key_bias_.get(run, {width});
    const auto alpha_weight = alpha_weight_.get(run, {width, heads_});
    const auto beta_weight = beta_weight_.get(run, {width, heads_});
    const auto packed_query_weight = packed_query_weight_.get(run, width), weight = weight_.get(run, width);
    expect_columns("weight", *weight, width);
    expect_one_method(*packed_query_weight, *weight);
    const auto bias = bias_.get(run, {width});
    const Tensor lengths = run.input(11);
    expect_shape("lengths", lengths, {x.shape[0]});
    void* output = run.output(0, x.shape);
    if (x.count > 0)
      aft::layer_norm_fastformer(
          {element_, x.shape[0], x.shape[1], heads_, x.data, norm.norm, query_weight.data, packed_query_weight.get(),
           query_bias.data, key_weight.data, key_bias.data, alpha_weight.data, beta_weight.data, weight.get(),
           bias.data, static_cast<const int64_t*>(lengths.data), output},
          run.parallel());
  }

 private:
  aft::Element element_;
  int64_t heads_;
  Norm norm_;
  aft::MethodChooser chooser_;
  Weight packed_query_weight_;
  Parameter query_weight_, query_bias_, key_weight_, key_bias_, alpha_weight_, beta_weight_;
  Weight weight_;
  Parameter bias_;
};

}  // namespace

constexpr uint32_t kNormInputs = 1u << 1 | 1u << 2;

const Operator kEncoderOperators[5] = {
    {"LayerNormLinear", 5, create<LayerNormLinear>, false, -1, 1, kNormInputs | 1u << 4},
    {"LayerNormQueryKeyValue", 9, create<LayerNormQueryKeyValue>, false, -1, 3,
     kNormInputs | 1u << 4 | 1u << 6 | 1u << 8},
    {"LayerNormFeedForward", 9, create<LayerNormFeedForward>, false, 0, 1,
     kNormInputs | 1u << 4 | 1u << 6 | 1u << 7 | 1u << 8},
    {"LinearResidual", 4, create<LinearResidual>, false, 3, 1, 1u << 2},
    {"LayerNormFastformer", 12, create<LayerNormFastformer>, true, 0},
};

}  // namespace ops
