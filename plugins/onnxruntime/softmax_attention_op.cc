// SoftmaxAttention: query, key and value of heads that may share keys, an optional sink and an optional bias.

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
  }

  void compute(const Run& run) const override {
    aft::SoftmaxAttention params = params_;
    take_sequences(run, params);
    take_beside(run, params);
    params.output = run.output(0, {params.batch, params.tokens, params.heads * params.value_width});
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

  aft::SoftmaxAttention params_{};
  int64_t given_kv_heads_ = 0;
};

}  // namespace

const Operator kSoftmaxAttention{"SoftmaxAttention", 6, create<SoftmaxAttention>, true, -1, 1, 1u << 3 | 1u << 4, 0, 1};

}  // namespace ops
