#include "ops.h"

#include <algorithm>

#include "backend.h"
#include "checks.h"

namespace ops {

namespace {

// Every operator takes query, key, value first and lengths last. Params is the kernel's struct; derived
// classes fill in the rest of it from the attributes (once) and further inputs (every run).
template <class Params>
class SequenceKernel : public Kernel {
 public:
  explicit SequenceKernel(const Settings& settings) {
    params_.element = settings.element;
    params_.causal = settings.causal;
  }

  void compute(const Run& run) const final {
    Params params = params_;
    const Tensor query = run.input(0), key = run.input(1), value = run.input(2);
    expect_three_dimensions("query", query);
    params.batch = query.shape[0];
    params.tokens = query.shape[1];
    params.channels = query.shape[2];
    expect_shape("key", key, key_shape(query.shape));
    expect_shape("value", value, query.shape);
    const size_t next = 3 + take_inputs(run, query.shape, params);
    const Tensor lengths = run.input(next);
    expect_shape("lengths", lengths, {params.batch});
    params.query = query.data;
    params.key = key.data;
    params.value = value.data;
    params.lengths = static_cast<const int64_t*>(lengths.data);
    params.output = run.output(0, query.shape);
    if (params.batch * params.tokens * params.channels > 0) run_kernel(params, run);
  }

 protected:
  virtual Shape key_shape(const Shape& query) const { return query; }
  // Reads the inputs between value and lengths; returns how many.
  virtual size_t take_inputs(const Run&, const Shape& query, Params&) const = 0;

  Params params_{};
};

class AftSimple final : public SequenceKernel<aft::AftSimple> {
 public:
  AftSimple(const Settings& settings, const Attributes& attributes) : SequenceKernel(settings) {
    params_.gate = read_gate(attributes);
    params_.eps = read_eps(attributes, 0.0f);
    params_.key_channels = attributes.integer("num_heads", 0);
    expect(params_.key_channels >= 0,
           "num_heads is " + std::to_string(params_.key_channels) + ", expected at least 0");
  }

 private:
  Shape key_shape(const Shape& query) const override {
    return params_.key_channels ? Shape{query[0], query[1], params_.key_channels} : query;
  }
  size_t take_inputs(const Run&, const Shape& query, aft::AftSimple& params) const override {
    if (params.key_channels) expect_heads_divide(params.key_channels, "query", query);
    if (params.key_channels == params.channels) params.key_channels = 0;
    return 0;
  }
};

class AftFull final : public SequenceKernel<aft::AftFull> {
 public:
  AftFull(const Settings& settings, const Attributes& attributes) : SequenceKernel(settings) {
    params_.gate = read_gate(attributes);
    params_.eps = read_eps(attributes, 0.0f);
    using aft::Precision;
    params_.precision = read_precision(
        attributes, {Precision::kFloat32, Precision::kFloat16, Precision::kBfloat16, Precision::kInt8});
    params_.methods = ops::choose_weight_methods(params_.precision);
    Tensor bias;
    if (attributes.constant(3, bias)) {
      expect_matrix("position_bias", bias);
      aft::AftFull constant = params_;
      constant.tokens = std::min(bias.shape[0], bias.shape[1]);
      constant.position_bias = bias.data;
      constant.position_bias_width = bias.shape[1];
      packed_bias_ = ops::pack_position_bias(constant);
      params_.constant_bias = true;
    }
  }

 private:
  size_t take_inputs(const Run& run, const Shape& query, aft::AftFull& params) const override {
    const Tensor bias = run.input(3);
    expect_position_bias(bias, query);
    params.position_bias = bias.data;
    params.position_bias_width = bias.shape[1];
    params.packed_bias = packed_bias_.get();
    return 1;
  }

  std::shared_ptr<const aft::PackedWeight> packed_bias_;
};

class AftLocal final : public SequenceKernel<aft::AftLocal> {
 public:
  AftLocal(const Settings& settings, const Attributes& attributes) : SequenceKernel(settings) {
    params_.gate = read_gate(attributes);
    params_.eps = read_eps(attributes, 0.0f);
  }

 private:
  size_t take_inputs(const Run& run, const Shape& query, aft::AftLocal& params) const override {
    const Tensor band = run.input(3);
    expect_matrix("band", band);
    const int64_t rows = band.shape[0], width = band.shape[1];
    expect(rows == 1 || rows >= query[1],
           "query has shape " + to_string(query) + ", longer than band " + to_string(band.shape) + " allows");
    expect(width > 0 && (params.causal || width % 2 == 1),
           "band has shape " + to_string(band.shape) +
               (params.causal ? ", expected at least one column" : ", expected an odd number of columns, 2s-1"));
    params.band = band.data;
    params.band_rows = rows;
    params.window = params.causal ? width : (width + 1) / 2;
    return 1;
  }
};

class AftConv final : public SequenceKernel<aft::AftConv> {
 public:
  AftConv(const Settings& settings, const Attributes& attributes) : SequenceKernel(settings) {
    params_.gate = read_gate(attributes);
    params_.eps = read_eps(attributes, 0.0f);
    params_.heads = read_count(attributes, "num_heads");
  }

 private:
  Shape key_shape(const Shape& query) const override { return {query[0], query[1], params_.heads}; }
  size_t take_inputs(const Run& run, const Shape& query, aft::AftConv& params) const override {
    expect_heads_divide(params.heads, "query", query);
    const Tensor filter = run.input(3);
    expect_matrix("filter", filter);
    expect(filter.shape[0] == params.heads && filter.shape[1] > 0,
           "filter has shape " + to_string(filter.shape) + ", expected [" + std::to_string(params.heads) + ", taps]");
    params.filter = filter.data;
    params.taps = filter.shape[1];
    return 1;
  }
};

// Query, key and value of heads of which several may share a key and a value; then lengths and, not in causal form,
// key_lengths, with which there may be other numbers of keys than of queries.
template <class Params>
class GroupedHeadsKernel : public Kernel {
 public:
  GroupedHeadsKernel(const Settings& settings, const Attributes& attributes) {
    params_.element = settings.element;
    params_.causal = settings.causal;
    params_.heads = read_count(attributes, "num_heads");
    const int64_t groups = attributes.integer("kv_num_heads", 0);
    expect(groups >= 0 && (groups == 0 || params_.heads % groups == 0),
           "kv_num_heads is " + std::to_string(groups) + ", expected a divisor of num_heads " +
               std::to_string(params_.heads));
    params_.kv_heads = groups ? groups : params_.heads;
    has_value_width_ = groups > 0;
  }

  void compute(const Run& run) const final {
    Params params = params_;
    const Tensor query = run.input(0), key = run.input(1), value = run.input(2), lengths = run.input(3);
    expect_three_dimensions("query", query);
    expect_heads_divide(params.heads, "query", query.shape);
    params.batch = query.shape[0];
    params.tokens = query.shape[1];
    params.channels = query.shape[2];
    expect_shape("lengths", lengths, {params.batch});
    int64_t tokens = params.tokens;
    if (const auto key_lengths = params.causal ? std::nullopt : run.optional_input(4)) {
      expect_shape("key_lengths", *key_lengths, {params.batch});
      params.key_lengths = static_cast<const int64_t*>(key_lengths->data);
      if (key.shape.size() == 3) tokens = key.shape[1];
      params.key_tokens = tokens;
    }
    expect_shape("key", key, {params.batch, tokens, params.channels / params.heads * params.kv_heads});
    expect(value.shape.size() == 3 && value.shape[2] % params.kv_heads == 0,
           "value has shape " + to_string(value.shape) + ", whose width is not divisible by kv_num_heads " +
               std::to_string(params.kv_heads));
    expect_shape("value", value, {params.batch, tokens, has_value_width_ ? value.shape[2] : key.shape[2]});
    expect(params.channels > 0 || value.shape[2] == 0,
           "query has shape " + to_string(query.shape) + ", expected at least one channel per head");
    params.value_width = value.shape[2] / params.kv_heads;
    params.query = query.data;
    params.key = key.data;
    params.value = value.data;
    params.lengths = static_cast<const int64_t*>(lengths.data);
    const Shape output{params.batch, params.tokens, params.value_width * params.heads};
    params.output = run.output(0, output);
    if (output[0] * output[1] * output[2] > 0) run_kernel(params, run);
  }

 protected:
  Params params_{};

 private:
  bool has_value_width_;  // the heads of the value may be of another width than those of the key
};

class EfficientAttention final : public GroupedHeadsKernel<aft::EfficientAttention> {
 public:
  EfficientAttention(const Settings& settings, const Attributes& attributes)
      : GroupedHeadsKernel(settings, attributes) {
    params_.scale = attributes.number("scale", 1.0f);
    params_.normalization =
        static_cast<aft::Normalization>(read_choice(attributes, "normalization", {"softmax", "scaling"}, "softmax"));
  }
};

class LinearAttention final : public GroupedHeadsKernel<aft::LinearAttention> {
 public:
  LinearAttention(const Settings& settings, const Attributes& attributes) : GroupedHeadsKernel(settings, attributes) {
    params_.feature_map =
        static_cast<aft::FeatureMap>(read_choice(attributes, "feature_map", {"elu", "relu", "identity"}, "elu"));
    params_.normalizer =
        static_cast<aft::Normalizer>(read_choice(attributes, "normalizer", {"add", "clamp", "none"}, "add"));
    if (params_.normalizer != aft::Normalizer::kNone) params_.eps = read_eps(attributes, 1e-6f);
  }
};

class Fastformer final : public SequenceKernel<aft::Fastformer> {
 public:
  Fastformer(const Settings& settings, const Attributes& attributes) : SequenceKernel(settings) {
    params_.heads = read_count(attributes, "num_heads");
  }

 private:
  size_t take_inputs(const Run& run, const Shape& query, aft::Fastformer& params) const override {
    expect_heads_divide(params.heads, "query", query);
    const Tensor alpha = run.input(3), beta = run.input(4);
    expect_shape("alpha_weight", alpha, {query[2], params.heads});
    expect_shape("beta_weight", beta, {query[2], params.heads});
    params.alpha_weight = alpha.data;
    params.beta_weight = beta.data;
    return 2;
  }
};

}  // namespace

const Operator kOperators[7] = {
    {"AftFull", 5, create<AftFull>},
    {"AftLocal", 5, create<AftLocal>},
    {"AftSimple", 4, create<AftSimple>},
    {"AftConv", 5, create<AftConv>},
    with_key_lengths({"EfficientAttention", 4, create<EfficientAttention>}),
    {"Fastformer", 6, create<Fastformer>},
    with_key_lengths({"NormalizedLinearAttention", 4, create<LinearAttention>}),
};

}  // namespace ops
