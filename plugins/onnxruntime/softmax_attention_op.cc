// SoftmaxAttention: query, key and value of heads that may share keys, with an optional sink, bias and rotation.

#include <algorithm>
#include <cmath>
#include <optional>

#include "checks.h"
#include "cpu/kernels.h"
#include "ops.h"

namespace ops {

namespace {

// Longer than any document: the kernel adds windows to positions.
constexpr int64_t kMaxWindow = int64_t{1} << 40;

constexpr uint32_t bits(std::initializer_list<int> indices) {
  uint32_t all = 0;
  for (int index : indices) all |= 1u << index;
  return all;
}

// A window: a number of keys, or -1 for all.
int64_t read_window(const Attributes& attributes, const char* name) {
  const int64_t keys = attributes.integer(name, -1);
  expect(keys >= -1, std::string(name) + " is " + std::to_string(keys) + ", expected a number of keys, or -1 for all");
  return std::min(keys, kMaxWindow);
}

float read_factor(const Attributes& attributes, const char* name) {
  const float factor = attributes.number(name, 0.0f);
  expect(factor >= 0 && std::isfinite(factor),
         std::string(name) + " is " + std::to_string(factor) + ", expected a finite number of at least 0");
  return factor;
}

class SoftmaxAttention final : public Kernel {
 public:
  SoftmaxAttention(const Settings& settings, const Attributes& attributes) {
    params_.element = settings.element;
    params_.heads = read_count(attributes, "num_heads");
    given_kv_heads_ = attributes.integer("kv_num_heads", 0);
    expect(given_kv_heads_ >= 0, "kv_num_heads is " + std::to_string(given_kv_heads_) + ", expected at least 0");
    params_.kv_heads = given_kv_heads_ ? given_kv_heads_ : params_.heads;
    expect(params_.heads % params_.kv_heads == 0, "kv_num_heads is " + std::to_string(params_.kv_heads) +
                                                      ", expected a divisor of num_heads " +
                                                      std::to_string(params_.heads));
    params_.scale = read_factor(attributes, "scale");
    params_.softcap = read_factor(attributes, "softcap");
    params_.window_left = read_window(attributes, "window_left");
    params_.window_right = read_window(attributes, "window_right");
    const int64_t interleaved = attributes.integer("interleaved", 0);
    expect(interleaved == 0 || interleaved == 1, "interleaved is " + std::to_string(interleaved) + ", expected 0 or 1");
    params_.interleaved = interleaved == 1;
    read_precision(attributes, {aft::Precision::kFloat32});
  }

  void compute(const Run& run) const override {
    aft::SoftmaxAttention params = params_;
    take_sequences(run, params);
    take_beside(run, params);
    take_rotation(run, params);
    take_query_start(run, params);
    params.output = run.output(0, {params.batch, params.tokens, params.heads * params.value_width});
    params.log_sum = static_cast<float*>(run.optional_output(1, {params.batch, params.tokens, params.heads}));
    if (params.batch * params.tokens * params.value_width > 0) aft::softmax_attention(params, run.parallel());
  }

 private:
  void take_sequences(const Run& run, aft::SoftmaxAttention& params) const {
    const Tensor query = run.input(0), key = run.input(1), value = run.input(2), lengths = run.input(5);
    const std::optional<Tensor> key_lengths = run.optional_input(6);
    for (const auto& [name, tensor] : {std::pair{"query", &query}, {"key", &key}, {"value", &value}})
      expect_three_dimensions(name, *tensor);
    expect_heads_divide(params.heads, "query", query);
    params.batch = query.shape[0];
    params.tokens = query.shape[1];
    params.channels = query.shape[2];
    const int64_t width = params.channels / params.heads * params.kv_heads;
    params.key_tokens = key_lengths ? key.shape[1] : params.tokens;
    expect_shape("key", key, {params.batch, params.key_tokens, width});
    expect_shape("value", value, {params.batch, params.key_tokens, given_kv_heads_ ? value.shape[2] : width});
    expect(value.shape[2] % params.kv_heads == 0, "value has shape " + to_string(value.shape) +
                                                      ", whose width is not divisible by kv_num_heads " +
                                                      std::to_string(params.kv_heads));
    expect(params.channels > 0 || value.shape[2] == 0,
           "query has shape " + to_string(query.shape) + ", expected at least one channel per head");
    params.value_width = value.shape[2] / params.kv_heads;
    params.query = query.data;
    params.key = key.data;
    params.value = value.data;
    expect_shape("lengths", lengths, {params.batch});
    params.lengths = static_cast<const int64_t*>(lengths.data);
    if (!key_lengths) return;
    expect_shape("key_lengths", *key_lengths, {params.batch});
    params.key_lengths = static_cast<const int64_t*>(key_lengths->data);
  }

  static void take_beside(const Run& run, aft::SoftmaxAttention& params) {
    if (const std::optional<Tensor> sink = run.optional_input(3)) {
      expect_shape("sink", *sink, {params.heads});
      params.sink = sink->data;
    }
    if (const std::optional<Tensor> bias = run.optional_input(4)) {
      const Shape& shape = bias->shape;
      expect(shape.size() == 2 && shape[0] == params.heads && shape[1] % 2 == 1,
             "bias has shape " + to_string(shape) + ", expected [" + std::to_string(params.heads) +
                 ", an odd number of distances]");
      params.bias = bias->data;
      params.bias_reach = shape[1] / 2;
    }
  }

  static void take_rotation(const Run& run, aft::SoftmaxAttention& params) {
    const std::optional<Tensor> cos = run.optional_input(7), sin = run.optional_input(8);
    expect(cos.has_value() == sin.has_value(), cos ? "sin_cache is absent, expected one beside cos_cache"
                                                   : "cos_cache is absent, expected one beside sin_cache");
    if (!cos) return;
    const int64_t most = params.channels / params.heads / 2;
    expect(cos->shape.size() == 2 && cos->shape[1] <= most, "cos_cache has shape " + to_string(cos->shape) +
                                                                ", expected one row for each position, of at most " +
                                                                std::to_string(most) + " pairs of channels");
    const int64_t tokens = std::max(params.tokens, params.key_tokens);
    expect(cos->shape[0] >= tokens, "cos_cache has shape " + to_string(cos->shape) + ", expected at least " +
                                        std::to_string(tokens) + " positions");
    expect_shape("sin_cache", *sin, cos->shape);
    params.positions = cos->shape[0];
    params.rotary_pairs = cos->shape[1];
    params.cos_cache = cos->data;
    params.sin_cache = sin->data;
  }

  static void take_query_start(const Run& run, aft::SoftmaxAttention& params) {
    const std::optional<Tensor> start = run.optional_input(9);
    if (!start) return;
    expect_shape("query_start", *start, {1});
    expect(params.key_lengths, "key_lengths is absent, expected them beside query_start");
    params.query_start = std::clamp(*static_cast<const int64_t*>(start->data), -kMaxWindow, kMaxWindow);
  }

  aft::SoftmaxAttention params_{};
  int64_t given_kv_heads_ = 0;
};

}  // namespace

static constexpr Operator softmax_attention() {
  Operator op{"SoftmaxAttention", 10, create<SoftmaxAttention>, false, -1, 2, bits({3, 4, 6, 7, 8, 9}), 1};
  op.integer_inputs = bits({5, 6, 9});
  op.float_outputs = bits({1});
  return op;
}

const Operator kSoftmaxAttention = softmax_attention();

}  // namespace ops
