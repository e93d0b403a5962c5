#include "operators/operators.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace ops {

// The extent of each axis, -1 for those not yet known.
class Axes {
 public:
  Axes() { extents_.fill(-1); }

  int64_t operator[](char axis) const { return extents_[static_cast<size_t>(axis - 'A')]; }

  // Whether they are known, so that a check of them makes sense.
  bool known(const char* axes) const {
    for (; *axes; ++axes)
      if ((*this)[*axes] < 0) return false;
    return true;
  }

  // False where the axis already has another extent.
  bool bind(char axis, int64_t extent) {
    int64_t& bound = extents_[static_cast<size_t>(axis - 'A')];
    if (extent < 0) return true;
    if (bound < 0) bound = extent;
    return bound == extent;
  }

 private:
  std::array<int64_t, 26> extents_;
};

namespace {

constexpr char kOtherwise[] = "; AFTEXPORT_PORTABLE=1 runs the operator by its body";
constexpr char kNoOther[] = ", as the CUDA kernels take no other; AFTEXPORT_PORTABLE=1 runs the operator by its body";

// Not by a stream, which would bring the locales of libstdc++ into the wheel.
std::string number_text(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", number);
  return text;
}

Attribute choice(const char* name, int32_t Values::* index, std::vector<std::string> words, size_t cuda_words) {
  return {name, index, nullptr, std::move(words), cuda_words};
}

Attribute choice(const char* name, int32_t Values::* index, std::vector<std::string> words) {
  const size_t count = words.size();
  return choice(name, index, std::move(words), count);
}

// An integer of at least 1, or 0 by default.
Attribute count(const char* name, int32_t Values::* integer) { return {name, integer, nullptr, {}, 0, false, 1}; }
Attribute optional_count(const char* name, int32_t Values::* integer) { return {name, integer, nullptr, {}, 0, true}; }

const Attribute kGate = choice("gate", &Values::gate, {"sigmoid", "tanh", "none", "relu"}, 3);
const Attribute kPrecision = choice("precision", &Values::precision, {"fp32", "fp16", "bf16", "int8"});
const Attribute kNormalization = choice("normalization", &Values::normalization, {"softmax", "scaling"});
const Attribute kFeatureMap = choice("feature_map", &Values::feature_map, {"elu", "relu", "identity"}, 2);
const Attribute kNormalizer = choice("normalizer", &Values::normalizer, {"add", "clamp", "none"}, 1);
const Attribute kNumHeads = count("num_heads", &Values::num_heads);
const Attribute kKeyHeads = optional_count("num_heads", &Values::key_heads);
const Attribute kKvNumHeads = optional_count("kv_num_heads", &Values::kv_num_heads);
const Attribute kScale{"scale", nullptr, &Values::scale};
const Attribute kEps{"eps", nullptr, &Values::eps};
const Attribute kDenominatorEps{"eps", nullptr, &Values::denominator_eps, {}, 0, true};

std::string shape_text(const char* input, const Tensor& tensor) {
  return std::string(input) + " has shape " + to_string(tensor.shape);
}

// The heads of the query.
void expect_heads_divide(const Call& call, const Axes& axes, int64_t heads) {
  if (axes.known("D")) expect_heads_divide(heads, "query", call.inputs[0]);
}

// The tokens are at most as many as each of the axes `limits` of input 3.
void expect_enough(const char* name, const Call& call, const Axes& axes, const char* limits) {
  for (; *limits; ++limits)
    if (axes.known("T") && axes[*limits] >= 0 && axes['T'] > axes[*limits])
      throw Error(shape_text("query", call.inputs[0]) + ", longer than " + name + " " +
                  to_string(call.inputs[3].shape) + " allows");
}

void derive_nothing(const Call&, Axes&) {}
void check_nothing(const Call&, const Axes&) {}

void derive_heads(const Call& call, Axes& axes) { expect_heads_divide(call, axes, axes['H']); }

void derive_key_columns(const Call& call, Axes& axes) {
  const int64_t heads = call.values.key_heads;
  if (heads) expect_heads_divide(call, axes, heads);
  axes.bind('K', heads ? heads : axes['D']);
}

int64_t kv_heads(const Values& values) { return values.kv_num_heads ? values.kv_num_heads : values.num_heads; }

void derive_groups(const Call& call, Axes& axes) {
  derive_heads(call, axes);
  if (!call.key_lengths) axes.bind('S', axes['T']);
  if (!axes.known("D")) return;
  const int64_t width = axes['D'] / axes['H'];
  if (call.device == Device::kCuda && width > kMaxCudaHeadChannels)
    throw Error("query has heads of " + std::to_string(width) + " channels, more than the " +
                std::to_string(kMaxCudaHeadChannels) + " of the CUDA kernels" + kOtherwise);
  axes.bind('K', width * kv_heads(call.values));
  // Without kv_num_heads, the heads of the value are as wide as those of the key.
  if (!call.values.kv_num_heads) axes.bind('V', axes['K']);
}

void check_groups(const Call& call, const Axes& axes) {
  const int64_t heads = kv_heads(call.values);
  if (axes.known("V") && axes['V'] % heads != 0)
    throw Error(shape_text("value", call.inputs[2]) + ", whose width is not divisible by kv_num_heads " +
                std::to_string(heads));
  if (axes.known("DV") && axes['D'] == 0 && axes['V'] > 0)
    throw Error(shape_text("query", call.inputs[0]) + ", expected at least one channel per head");
  if (!call.key_lengths) return;
  expect_shape("key_lengths", *call.key_lengths, {axes['B']});
  expect(call.device == Device::kCpu, std::string("key_lengths is given, expected none") + kNoOther);
}

// The kernels for CUDA take a square matrix.
void check_position_bias(const Call& call, const Axes& axes) {
  if (call.device == Device::kCuda) expect_shape("position_bias", call.inputs[3], {axes['M'], axes['M']});
  expect_enough("position_bias", call, axes, "MN");
}

void derive_products(const Call&, Axes& axes) {
  if (axes.known("D")) axes.bind('E', 2 * axes['D']);
}

void check_band(const Call& call, const Axes& axes) {
  if (axes['R'] != 1) expect_enough("band", call, axes, "R");
  if (axes.known("W") && (axes['W'] == 0 || (!call.causal && axes['W'] % 2 == 0)))
    throw Error(shape_text("band", call.inputs[3]) +
                (call.causal ? ", expected at least one column" : ", expected an odd number of columns, 2s-1"));
}

void check_filter(const Call& call, const Axes& axes) {
  if (axes['J'] == 0) throw Error(shape_text("filter", call.inputs[3]) + ", expected at least one tap");
}

// Sets what all mechanisms have: the first three inputs, and the last.
template <class P>
P sequence(const Call& call) {
  P p{};
  const Shape& query = call.inputs[0].shape;
  p.element = call.element;
  p.causal = call.causal;
  p.batch = query[0];
  p.tokens = query[1];
  p.channels = query[2];
  p.query = call.inputs[0].data;
  p.key = call.inputs[1].data;
  p.value = call.inputs[2].data;
  p.lengths = static_cast<const int64_t*>(call.inputs.back().data);
  p.output = call.output;
  return p;
}

template <class P>
P gated(const Call& call) {
  P p = sequence<P>(call);
  p.gate = static_cast<aft::Gate>(call.values.gate);
  p.eps = call.values.denominator_eps;
  return p;
}

Params aft_simple(const Call& call) {
  auto p = gated<aft::AftSimple>(call);
  p.key_channels = call.values.key_heads == p.channels ? 0 : call.values.key_heads;
  return p;
}

template <class P>
P with_position_bias(const Call& call) {
  P p = gated<P>(call);
  p.precision = static_cast<aft::Precision>(call.values.precision);
  p.position_bias = call.inputs[3].data;
  p.position_bias_width = call.inputs[3].shape[1];
  return p;
}

Params aft_full(const Call& call) { return with_position_bias<aft::AftFull>(call); }

Params aft_full_prepare(const Call& call) {
  AftFullPrepare p{};
  const Shape& key = call.inputs[0].shape;
  p.element = call.element;
  p.batch = key[0];
  p.tokens = key[1];
  p.channels = key[2];
  p.key = call.inputs[0].data;
  p.value = call.inputs[1].data;
  p.lengths = static_cast<const int64_t*>(call.inputs[2].data);
  p.output = call.output;
  return p;
}

Params aft_full_finish(const Call& call) {
  auto p = with_position_bias<AftFullFinish>(call);
  p.products = call.inputs[4].data;
  return p;
}

Params aft_local(const Call& call) {
  auto p = gated<aft::AftLocal>(call);
  const Shape& band = call.inputs[3].shape;
  p.band = call.inputs[3].data;
  p.band_rows = band[0];
  p.window = call.causal ? band[1] : (band[1] + 1) / 2;
  return p;
}

Params aft_conv(const Call& call) {
  auto p = gated<aft::AftConv>(call);
  p.filter = call.inputs[3].data;
  p.heads = call.values.num_heads;
  p.taps = call.inputs[3].shape[1];
  return p;
}

template <class P>
P grouped(const Call& call) {
  P p = sequence<P>(call);
  p.heads = call.values.num_heads;
  p.kv_heads = kv_heads(call.values);
  p.value_width = call.inputs[2].shape[2] / p.kv_heads;
  if (call.key_lengths) {
    p.key_tokens = call.inputs[1].shape[1];
    p.key_lengths = static_cast<const int64_t*>(call.key_lengths->data);
  }
  return p;
}

Params efficient_attention(const Call& call) {
  auto p = grouped<aft::EfficientAttention>(call);
  p.normalization = static_cast<aft::Normalization>(call.values.normalization);
  p.scale = call.values.scale;
  return p;
}

Params linear_attention(const Call& call) {
  auto p = grouped<aft::LinearAttention>(call);
  p.feature_map = static_cast<aft::FeatureMap>(call.values.feature_map);
  p.normalizer = static_cast<aft::Normalizer>(call.values.normalizer);
  if (p.normalizer != aft::Normalizer::kNone) p.eps = call.values.eps;
  return p;
}

Params fastformer(const Call& call) {
  auto p = sequence<aft::Fastformer>(call);
  p.alpha_weight = call.inputs[3].data;
  p.beta_weight = call.inputs[4].data;
  p.heads = call.values.num_heads;
  return p;
}

const Input kQuery{"query", "BTD"}, kKey{"key", "BTD"}, kValue{"value", "BTD"}, kLengths{"lengths", "B"};
const Input kPositionBias{"position_bias", "MN"}, kGroupKey{"key", "BSK"}, kGroupValue{"value", "BSV"};

}  // namespace

const std::vector<Mechanism>& mechanisms() {
  constexpr auto kValueHeads = Mechanism::Width::kValueHeads;
  static const std::vector<Mechanism> all{
      {"AftFull", {kQuery, kKey, kValue, kPositionBias, kLengths}, {kGate, kPrecision, kDenominatorEps},
       derive_nothing, check_position_bias, aft_full},
      {"AftLocal", {kQuery, kKey, kValue, {"band", "RW"}, kLengths}, {kGate, kDenominatorEps},
       derive_nothing, check_band, aft_local},
      {"AftSimple", {kQuery, {"key", "BTK"}, kValue, kLengths}, {kGate, kKeyHeads, kDenominatorEps},
       derive_key_columns, check_nothing, aft_simple},
      {"AftConv", {kQuery, {"key", "BTH"}, kValue, {"filter", "HJ"}, kLengths}, {kNumHeads, kGate, kDenominatorEps},
       derive_heads, check_filter, aft_conv},
      {"EfficientAttention", {kQuery, kGroupKey, kGroupValue, kLengths},
       {kNumHeads, kNormalization, kScale, kKvNumHeads},
       derive_groups, check_groups, efficient_attention, true, true, kValueHeads},
      {"Fastformer", {kQuery, kKey, kValue, {"alpha_weight", "DH"}, {"beta_weight", "DH"}, kLengths}, {kNumHeads},
       derive_heads, check_nothing, fastformer},
      {"NormalizedLinearAttention", {kQuery, kGroupKey, kGroupValue, kLengths},
       {kNumHeads, kFeatureMap, kEps, kNormalizer, kKvNumHeads},
       derive_groups, check_groups, linear_attention, true, true, kValueHeads},
  };
  return all;
}

const std::vector<Mechanism>& cuda_mechanisms() {
  static const std::vector<Mechanism> all{
      {"AftFullPrepare", {kKey, kValue, kLengths}, {},
       derive_nothing, check_nothing, aft_full_prepare, false, false, Mechanism::Width::kTwice},
      {"AftFullFinish", {kQuery, kKey, kValue, kPositionBias, {"products", "BTE"}, kLengths}, {kGate},
       derive_products, check_position_bias, aft_full_finish, false, false},
  };
  return all;
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string list_words(const std::vector<std::string>& words, size_t count) {
  std::string list;
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) list += i + 1 == count ? " or " : ", ";
    list += words[i];
  }
  return list;
}

int32_t Attribute::index_of(const std::string& word, Device device) const {
  const size_t count = device == Device::kCuda ? cuda_words : words.size();
  for (size_t i = 0; i < count; ++i)
    if (word == words[i]) return static_cast<int32_t>(i);
  throw Error(std::string(name) + " is \"" + word + "\", expected " + list_words(words, count) +
              (count < words.size() ? kNoOther : ""));
}

void Attribute::check(int64_t value, Device device) const {
  const std::string is = std::string(name) + " is " + std::to_string(value) + ", expected ";
  expect(value <= std::numeric_limits<int32_t>::max(), is + "a 32-bit integer");
  expect(value >= least, is + "at least " + std::to_string(least));
  expect(device == Device::kCpu || !cuda_has_default_only || value == 0, is + "0" + kNoOther);
}

void Attribute::check(double value, Device device) const {
  if (std::strcmp(name, "eps") == 0) expect_eps(value);
  expect(device == Device::kCpu || !cuda_has_default_only || value == 0,
         std::string(name) + " is " + number_text(value) + ", expected 0" + kNoOther);
}

void expect_eps(double eps) {
  expect(eps >= 0 && std::isfinite(eps), "eps is " + number_text(eps) + ", expected a finite number of at least 0");
}

void check_values(const Mechanism& mechanism, const Values& values, Device device) {
  // The division by eps is left out with the normalizer.
  const bool ignores_eps = values.normalizer == static_cast<int32_t>(aft::Normalizer::kNone);
  for (const Attribute& attribute : mechanism.attributes) {
    if (attribute.number && !(ignores_eps && attribute.number == &Values::eps))
      attribute.check(double{values.*attribute.number}, device);
    if (attribute.integer == &Values::kv_num_heads)
      expect(values.num_heads % kv_heads(values) == 0, "kv_num_heads is " + std::to_string(values.kv_num_heads) +
                                                           ", expected a divisor of num_heads " +
                                                           std::to_string(values.num_heads));
  }
}

void expect_shape(const char* input, const Tensor& tensor, const Shape& expected) {
  const Shape& shape = tensor.shape;
  bool fits = shape.size() == expected.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] < 0 || expected[i] < 0 || shape[i] == expected[i];
  if (!fits) throw Error(shape_text(input, tensor) + ", expected " + to_string(expected));
}

void expect_heads_divide(int64_t heads, const char* input, const Tensor& tensor) {
  if (tensor.shape[2] % heads != 0)
    throw Error(shape_text(input, tensor) + ", whose width is not divisible by num_heads " + std::to_string(heads));
}

void check_shapes(const Mechanism& mechanism, const Call& call) {
  const size_t count = mechanism.inputs.size();
  if (call.inputs.size() != count)
    throw Error("has " + std::to_string(call.inputs.size()) + " inputs, expected " + std::to_string(count));
  Axes axes;
  axes.bind('H', call.values.num_heads);
  for (size_t i = 0; i < count; ++i) {
    const auto& [name, letters] = mechanism.inputs[i];
    const Tensor& tensor = call.inputs[i];
    const size_t dimensions = std::strlen(letters);
    if (tensor.shape.size() != dimensions)
      throw Error(shape_text(name, tensor) + ", expected " + std::to_string(dimensions) + " dimensions");
    bool fits = true;
    for (size_t d = 0; d < dimensions; ++d) fits = axes.bind(letters[d], tensor.shape[d]) && fits;
    if (!fits) {
      Shape expected;
      for (size_t d = 0; d < dimensions; ++d) expected.push_back(axes[letters[d]]);
      expect_shape(name, tensor, expected);
    }
    if (i == 0) mechanism.derive(call, axes);
  }
  mechanism.check(call, axes);
}

Shape output_shape(const Mechanism& mechanism, const Call& call) {
  Shape shape = call.inputs[0].shape;
  if (mechanism.width == Mechanism::Width::kTwice) shape[2] *= 2;
  if (mechanism.width == Mechanism::Width::kValueHeads)
    shape[2] = call.inputs[2].shape[2] / kv_heads(call.values) * call.values.num_heads;
  return shape;
}

}  // namespace ops
