#include "ops.h"

#include <cstring>
#include <map>

#include "log.h"

namespace ops {

// The extent of each axis, -1 for those not yet known.
class Axes {
 public:
  int64_t operator[](char axis) const { return extents_.count(axis) ? extents_.at(axis) : -1; }

  // Whether they are known, so that a check of them makes sense.
  bool known(const char* axes) const {
    for (; *axes; ++axes)
      if ((*this)[*axes] < 0) return false;
    return true;
  }

  // False where the axis already has another extent.
  bool bind(char axis, int64_t extent) {
    if (extent < 0) return true;
    return extents_.emplace(axis, extent).first->second == extent;
  }

 private:
  std::map<char, int64_t> extents_;
};

namespace {

const Field kGate{"gate", &Settings::gate, nullptr, false, {"sigmoid", "tanh", "none"}};
const Field kNormalization{"normalization", &Settings::normalization, nullptr, false, {"softmax", "scaling"}};
const Field kFeatureMap{"feature_map", &Settings::feature_map, nullptr, false, {"elu", "relu"}};
const Field kNumHeads{"num_heads", &Settings::num_heads, nullptr, true};
const Field kScale{"scale", nullptr, &Settings::scale};
const Field kEps{"eps", nullptr, &Settings::eps, true};
const Field kNormalizer{"normalizer", &Settings::normalizer, nullptr, false, {"add"}};
const Field kKvNumHeads{"kv_num_heads", &Settings::kv_num_heads, nullptr, false, {}, true};
const Field kKeyHeads{"num_heads", &Settings::key_heads, nullptr, false, {}, true};
const Field kDenominatorEps{"eps", nullptr, &Settings::denominator_eps, false, {}, true};
const Field kPrecision{"precision", &Settings::precision, nullptr, false, {"fp32", "fp16", "bf16", "int8"}};

AftCudaTensor packed(const Tensor& tensor) {
  const Shape& s = tensor.shape;
  return {tensor.data, s[1] * s[2], s[2]};
}

AftCudaSequence sequence(const Call& call) {
  const Shape& query = call.inputs[0].shape;
  return {call.element,
          call.causal,
          query[0],
          query[1],
          query[2],
          packed(call.inputs[0]),
          packed(call.inputs[1]),
          packed(call.inputs[2]),
          static_cast<const int64_t*>(call.inputs.back().data),
          call.output};
}

AftCudaGate gate(const Call& call) { return static_cast<AftCudaGate>(call.settings.gate); }

AftCudaAftSimple aft_simple(const Call& call) { return {sequence(call), gate(call)}; }

// What `precision` asks for, or the next that holds as large a range where tensors of this element cannot have
// it. Its default, float32, is right for every position_bias.
AftCudaExpPrecision exp_precision(const Call& call) {
  const std::string& asked = kPrecision.choices[static_cast<size_t>(call.settings.precision)];
  if (call.element == AFT_CUDA_FLOAT32 || asked == "fp32") return AFT_CUDA_EXP_FLOAT32;
  return call.element == AFT_CUDA_FLOAT16 && asked == "fp16" ? AFT_CUDA_EXP_FLOAT16 : AFT_CUDA_EXP_BFLOAT16;
}

AftCudaAftFull aft_full(const Call& call) {
  const Tensor& bias = call.inputs[3];
  return {sequence(call), gate(call), bias.data, bias.shape[1], exp_precision(call)};
}

// The precision of AFT-full's factors around a product of tensors of this element.
AftCudaExpPrecision product_precision(AftCudaElement element) {
  if (element == AFT_CUDA_FLOAT32) return AFT_CUDA_EXP_FLOAT32;
  return element == AFT_CUDA_FLOAT16 ? AFT_CUDA_EXP_FLOAT16 : AFT_CUDA_EXP_BFLOAT16;
}

// Of key, value and lengths; query and output do not count.
AftCudaAftFull aft_full_prepare(const Call& call) {
  const Shape& key = call.inputs[0].shape;
  AftCudaSequence s{};
  s.element = call.element;
  s.batch = key[0];
  s.tokens = key[1];
  s.channels = key[2];
  s.key = packed(call.inputs[0]);
  s.value = packed(call.inputs[1]);
  s.lengths = static_cast<const int64_t*>(call.inputs[2].data);
  return {s, AFT_CUDA_NO_GATE, nullptr, 0, product_precision(call.element)};
}

AftCudaAftFull aft_full_finish(const Call& call) {
  const Tensor& bias = call.inputs[3];
  return {sequence(call), gate(call), bias.data, bias.shape[1], product_precision(call.element)};
}

AftCudaAftLocal aft_local(const Call& call) {
  const Tensor& band = call.inputs[3];
  const int64_t width = band.shape[1];
  return {sequence(call), gate(call), band.data, band.shape[0], call.causal ? width : (width + 1) / 2};
}

AftCudaAftConv aft_conv(const Call& call) {
  const Tensor& filter = call.inputs[3];
  return {sequence(call), gate(call), filter.data, filter.shape[0], filter.shape[1]};
}

AftCudaEfficientAttention efficient_attention(const Call& call) {
  return {sequence(call), static_cast<AftCudaNormalization>(call.settings.normalization), call.settings.num_heads,
          call.settings.scale};
}

AftCudaLinearAttention linear_attention(const Call& call) {
  return {sequence(call), static_cast<AftCudaFeatureMap>(call.settings.feature_map), call.settings.num_heads,
          call.settings.eps};
}

AftCudaFastformer fastformer(const Call& call) {
  return {sequence(call), call.inputs[3].data, call.inputs[4].data, call.settings.num_heads};
}

void no_check(const Axes&, bool) {}

void check_heads(const Axes& axes, bool) {
  expect(!axes.known("DH") || axes['D'] % axes['H'] == 0,
         "query has " + std::to_string(axes['D']) + " channels, which num_heads " + std::to_string(axes['H']) +
             " does not divide");
}

void check_head_channels(const Axes& axes, bool causal) {
  check_heads(axes, causal);
  expect(!axes.known("DH") || axes['D'] / axes['H'] <= AFT_CUDA_MOST_HEAD_CHANNELS,
         "query has heads of " + std::to_string(axes['D'] / axes['H']) + " channels, more than the " +
             std::to_string(AFT_CUDA_MOST_HEAD_CHANNELS) +
             " of the plugin; AFTEXPORT_PORTABLE=1 builds the operator from its body");
}

void check_most_tokens(const Axes& axes, const char* input, char most) {
  expect(!axes.known("T") || axes[most] < 0 || axes['T'] <= axes[most],
         "query has " + std::to_string(axes['T']) + " tokens, " + input + " allows " + std::to_string(axes[most]));
}

void check_position_bias(const Axes& axes, bool) { check_most_tokens(axes, "position_bias", 'M'); }

void check_products(const Axes& axes, bool causal) {
  check_position_bias(axes, causal);
  expect(!axes.known("DE") || axes['E'] == 2 * axes['D'],
         "products has " + std::to_string(axes['E']) + " channels, expected " + std::to_string(2 * axes['D']));
}

void check_band(const Axes& axes, bool causal) {
  if (axes['R'] != 1) check_most_tokens(axes, "band", 'R');
  expect(!axes.known("W") || (axes['W'] > 0 && (causal || axes['W'] % 2 == 1)),
         "band has " + std::to_string(axes['W']) + " columns, expected " +
             (causal ? "at least one" : "an odd number, 2s-1"));
}

void check_filter(const Axes& axes, bool causal) {
  check_heads(axes, causal);
  expect(!axes.known("S") || axes['S'] > 0, "filter has no taps");
}

// An operator from its kernel's two functions and `params`, which makes their parameters.
template <auto params, auto workspace, auto kernel>
Operator make(const char* name, std::vector<Input> own_inputs, std::vector<Field> fields,
              void (*check)(const Axes&, bool), const char* key_axes = "BTD") {
  std::vector<Input> inputs{{"query", "BTD"}, {"key", key_axes}, {"value", "BTD"}};
  inputs.insert(inputs.end(), own_inputs.begin(), own_inputs.end());
  inputs.push_back({"lengths", "B"});
  return {name,
          inputs,
          fields,
          check,
          [](const Call& call) {
            const auto p = params(call);
            return workspace(&p);
          },
          [](const Call& call, void* memory, cudaStream_t stream) {
            const auto p = params(call);
            return kernel(&p, memory, stream);
          }};
}

// The two operators around the matrix product of AFT-full, which is TensorRT's own.
Operator make_aft_full_prepare() {
  Operator op{"AftFullPrepare",
              {{"key", "BTD"}, {"value", "BTD"}, {"lengths", "B"}},
              {},
              no_check,
              [](const Call& call) {
                const AftCudaAftFull p = aft_full_prepare(call);
                return aft_cuda_aft_full_prepare_workspace(&p);
              },
              [](const Call& call, void* memory, cudaStream_t stream) {
                const AftCudaAftFull p = aft_full_prepare(call);
                return aft_cuda_aft_full_prepare(&p, call.output, memory, stream);
              }};
  op.has_causal_form = false;
  op.doubles_channels = true;
  return op;
}

Operator make_aft_full_finish() {
  Operator op{"AftFullFinish",
              {{"query", "BTD"},
               {"key", "BTD"},
               {"value", "BTD"},
               {"position_bias", "MM"},
               {"products", "BTE"},
               {"lengths", "B"}},
              {kGate},
              check_products,
              [](const Call&) { return size_t{0}; },
              [](const Call& call, void*, cudaStream_t stream) {
                const AftCudaAftFull p = aft_full_finish(call);
                return aft_cuda_aft_full_finish(&p, call.inputs[4].data, stream);
              }};
  op.has_causal_form = false;
  return op;
}

}  // namespace

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all{
      make<aft_full, aft_cuda_aft_full_workspace, aft_cuda_aft_full>(
          "AftFull", {{"position_bias", "MM"}}, {kGate, kPrecision, kDenominatorEps}, check_position_bias),
      make<aft_local, aft_cuda_aft_local_workspace, aft_cuda_aft_local>(
          "AftLocal", {{"band", "RW"}}, {kGate, kDenominatorEps}, check_band),
      make<aft_simple, aft_cuda_aft_simple_workspace, aft_cuda_aft_simple>(
          "AftSimple", {}, {kGate, kKeyHeads, kDenominatorEps}, no_check),
      make<aft_conv, aft_cuda_aft_conv_workspace, aft_cuda_aft_conv>(
          "AftConv", {{"filter", "HS"}}, {kNumHeads, kGate, kDenominatorEps}, check_filter, "BTH"),
      make<efficient_attention, aft_cuda_efficient_attention_workspace, aft_cuda_efficient_attention>(
          "EfficientAttention", {}, {kNumHeads, kNormalization, kScale, kKvNumHeads}, check_head_channels),
      make<fastformer, aft_cuda_fastformer_workspace, aft_cuda_fastformer>(
          "Fastformer", {{"alpha_weight", "DH"}, {"beta_weight", "DH"}}, {kNumHeads}, check_heads),
      make<linear_attention, aft_cuda_linear_attention_workspace, aft_cuda_linear_attention>(
          "NormalizedLinearAttention", {}, {kNumHeads, kFeatureMap, kEps, kNormalizer, kKvNumHeads},
          check_head_channels),
      make_aft_full_prepare(),
      make_aft_full_finish(),
  };
  return all;
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void check_shapes(const Operator& op, const Settings& settings, bool causal, const std::vector<Shape>& shapes) {
  expect(shapes.size() == op.inputs.size(),
         "has " + std::to_string(shapes.size()) + " inputs, expected " + std::to_string(op.inputs.size()));
  Axes axes;
  for (const Field& field : op.fields)
    if (field.integer == &Settings::num_heads) axes.bind('H', settings.num_heads);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& [name, letters] = op.inputs[i];
    const std::string is = std::string(name) + " is " + to_string(shapes[i]) + ", expected ";
    expect(shapes[i].size() == std::strlen(letters), is + std::to_string(std::strlen(letters)) + " dimensions");
    bool fits = true;
    Shape expected;
    for (size_t d = 0; d < shapes[i].size(); ++d) {
      fits = axes.bind(letters[d], shapes[i][d]) && fits;
      expected.push_back(axes[letters[d]]);
    }
    expect(fits, is + to_string(expected));
  }
  op.check(axes, causal);
}

}  // namespace ops
