// RecurrentLinearAttention and CausalDepthwiseConv: operators with states, several of whose inputs may be absent.

#include <cmath>
#include <optional>
#include <vector>

#include "checks.h"
#include "cpu/kernels.h"
#include "ops.h"

namespace ops {

namespace {

// Data of an input that is absent is null.
const void* data_of(const char* input, const std::optional<Tensor>& tensor, const Shape& expected) {
  if (!tensor) return nullptr;
  expect_shape(input, *tensor, expected);
  return tensor->data;
}

class RecurrentLinearAttention final : public Kernel {
 public:
  RecurrentLinearAttention(const Settings& settings, const Attributes& attributes) {
    params_.element = settings.element;
    const size_t rule =
        read_choice(attributes, "update_rule", {"linear", "gated", "delta", "gated_delta"}, "gated_delta");
    decays_ = rule == 1 || rule == 3;
    erases_ = rule == 2 || rule == 3;
    params_.direction = static_cast<aft::Direction>(
        read_choice(attributes, "direction", {"forward", "reverse", "bidirectional"}, "forward"));
    params_.normalized = read_choice(attributes, "normalizer", {"none", "sum"}, "none") == 1;
    params_.channel_decay = read_choice(attributes, "decay_granularity", {"head", "channel"}, "head") == 1;
    params_.query_heads = read_count(attributes, "q_num_heads");
    params_.state_heads = read_count(attributes, "kv_num_heads");
    params_.scale = attributes.number("scale", 0.0f);
    if (params_.normalized) params_.eps = read_eps(attributes, 1e-6f);
    expect(params_.query_heads % params_.state_heads == 0, "q_num_heads is " + std::to_string(params_.query_heads) +
                                                               ", expected a multiple of kv_num_heads " +
                                                               std::to_string(params_.state_heads));
    expect(!params_.normalized || !erases_, "normalizer is \"sum\", expected none for the delta rules");
  }

  void compute(const Run& run) const override {
    aft::RecurrentLinearAttention params = params_;
    take_sequences(run, params);
    take_gates(run, params);
    const Shape states{params.batch, params.states(), params.key_width, params.state_columns()};
    params.past_state = data_of("past_state", run.optional_input(3), states);
    const Tensor lengths = run.input(6);
    expect_shape("lengths", lengths, {params.batch});
    params.lengths = static_cast<const int64_t*>(lengths.data);
    params.output = run.output(0, {params.batch, params.tokens, params.query_heads * params.value_width});
    params.present_state = run.optional_output(1, states);
    // Without tokens and states no tensor bounds the widths, and hence none the memory that the kernel takes.
    const bool has_results = params.tokens > 0 || params.present_state;
    if (params.batch > 0 && has_results) aft::recurrent_linear_attention(params, run.parallel());
  }

 private:
  static int64_t head_width(const char* input, const Tensor& tensor, const char* name, int64_t heads) {
    expect(tensor.shape[2] > 0 && tensor.shape[2] % heads == 0,
           std::string(input) + " has shape " + to_string(tensor.shape) + ", whose width is not divisible by " + name +
               " " + std::to_string(heads));
    return tensor.shape[2] / heads;
  }

  void take_sequences(const Run& run, aft::RecurrentLinearAttention& params) const {
    const Tensor query = run.input(0), key = run.input(1), value = run.input(2);
    expect_three_dimensions("query", query);
    expect_three_dimensions("value", value);
    params.batch = query.shape[0];
    params.tokens = query.shape[1];
    params.key_width = head_width("query", query, "q_num_heads", params.query_heads);
    params.value_width = head_width("value", value, "kv_num_heads", params.state_heads);
    expect_shape("key", key, {params.batch, params.tokens, params.state_heads * params.key_width});
    expect_shape("value", value, {params.batch, params.tokens, params.state_heads * params.value_width});
    if (params.scale == 0.0f) params.scale = 1.0f / std::sqrt(static_cast<float>(params.key_width));
    params.query = query.data;
    params.key = key.data;
    params.value = value.data;
  }

  void take_gates(const Run& run, aft::RecurrentLinearAttention& params) const {
    const std::optional<Tensor> decay = run.optional_input(4), beta = run.optional_input(5);
    expect(decay.has_value() == decays_, decays_ ? "decay is absent, expected one for the gated rules"
                                                 : "decay is given, expected none for the rules linear and delta");
    expect(beta.has_value() == erases_, erases_ ? "beta is absent, expected one for the delta rules"
                                                : "beta is given, expected none for the rules linear and gated");
    const int64_t width = params.channel_decay ? params.state_heads * params.key_width : params.state_heads;
    params.decay = data_of("decay", decay, {params.batch, params.tokens, width});
    params.head_beta = beta && beta->shape.size() == 3 && beta->shape[2] != 1;
    params.beta = data_of("beta", beta, {params.batch, params.tokens, params.head_beta ? params.state_heads : 1});
  }

  aft::RecurrentLinearAttention params_{};
  bool decays_, erases_;  // whether the update rule takes decay and beta
};

class CausalDepthwiseConv final : public Kernel {
 public:
  CausalDepthwiseConv(const Settings& settings, const Attributes& attributes) {
    params_.element = settings.element;
    params_.silu = read_choice(attributes, "activation", {"none", "silu"}, "none") == 1;
    Tensor weight;
    if (!attributes.constant(1, weight)) return;
    aft::CausalDepthwiseConv constant = params_;
    take_weight(weight, constant);
    widened_weight_.resize(constant.taps * constant.weight_row());
    aft::widen_conv_weight(constant, widened_weight_.data());
  }

  void compute(const Run& run) const override {
    aft::CausalDepthwiseConv params = params_;
    const Tensor input = run.input(0), weight = run.input(1);
    expect_three_dimensions("input", input);
    params.batch = input.shape[0];
    params.tokens = input.shape[1];
    take_weight(weight, params);
    expect(params.channels == input.shape[2], "weight has shape " + to_string(weight.shape) + ", expected [" +
                                                  std::to_string(input.shape[2]) + ", taps]");
    params.widened_weight = widened_weight_.empty() ? nullptr : widened_weight_.data();
    params.input = input.data;
    params.bias = data_of("bias", run.optional_input(2), {params.channels});
    const Shape state{params.batch, params.taps - 1, params.channels};
    params.past_state = data_of("past_state", run.optional_input(3), state);
    const Tensor lengths = run.input(4);
    expect_shape("lengths", lengths, {params.batch});
    params.lengths = static_cast<const int64_t*>(lengths.data);
    params.output = run.output(0, input.shape);
    params.present_state = run.optional_output(1, state);
    if (params.batch * params.channels > 0) aft::causal_depthwise_conv(params, run.parallel());
  }

 private:
  static void take_weight(const Tensor& weight, aft::CausalDepthwiseConv& params) {
    expect(weight.shape.size() == 2 && weight.shape[1] > 0,
           "weight has shape " + to_string(weight.shape) + ", expected [channels, taps] with at least one tap");
    params.channels = weight.shape[0];
    params.taps = weight.shape[1];
    params.weight = weight.data;
  }

  aft::CausalDepthwiseConv params_{};
  std::vector<float> widened_weight_;  // empty unless the weight is constant
};

constexpr uint32_t inputs(std::initializer_list<int> indices) {
  uint32_t bits = 0;
  for (int index : indices) bits |= 1u << index;
  return bits;
}

}  // namespace

const Operator kRecurrentOperators[2] = {
    {"RecurrentLinearAttention", 7, create<RecurrentLinearAttention>, true, -1, 2, inputs({3, 4, 5}), 1},
    {"CausalDepthwiseConv", 5, create<CausalDepthwiseConv>, true, 0, 2, inputs({2, 3}), 1},
};

}  // namespace ops
