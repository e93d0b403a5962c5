// The C interface of the kernels, kept by the TensorRT plugins: linked with a kernel's test, every case of that
// is built, saved, loaded and run as TensorRT would do it. A loaded plugin serves all later cases of its fields
// and type, so its contexts see many changes of shape.

#include <cstring>
#include <map>

#include "device.h"
#include "host.h"
#include "kernels.h"

namespace {

struct Tensor {
  std::vector<int64_t> shape;
  const void* data;
};

struct Request {
  std::string op;
  DataType type;
  std::vector<Tensor> inputs;
  void* output;
  std::vector<PluginField> fields;

  std::string key() const {
    std::string text = op + " " + std::to_string(static_cast<int>(type));
    for (const PluginField& field : fields)
      text += std::string(" ") + field.name + " " +
              std::string(static_cast<const char*>(field.data), static_cast<size_t>(field.length) * size_of(field));
    return text;
  }
  static size_t size_of(const PluginField& field) {
    return field.type == PluginFieldType::kCHAR ? 1 : field.type == PluginFieldType::kINT64 ? 8 : 4;
  }
};

struct Engine {
  std::unique_ptr<IPluginV3> plugin;
  std::vector<Instance> contexts;
  size_t runs = 0;
};

const Plugins& plugins() {
  static const Plugins loaded;
  return loaded;
}

int log_problem(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  return 1;
}

std::vector<DynamicPluginTensorDesc> profile(const Request& request) {
  std::vector<DynamicPluginTensorDesc> descs;
  for (const Tensor& input : request.inputs) {
    const DataType type = descs.size() + 1 == request.inputs.size() ? DataType::kINT64 : request.type;
    PluginTensorDesc desc = describe(input.shape, type);
    const Dims most = desc.dims;
    Dims least = desc.dims;
    if (least.nbDims != 2) {  // batch and tokens are open, parameters are not
      least.d[0] = 1;
      desc.dims.d[0] = -1;
    }
    if (least.nbDims == 3) {
      least.d[1] = 1;
      desc.dims.d[1] = -1;
    }
    descs.push_back({desc, least, most, most});
  }
  descs.push_back(descs.front());
  return descs;
}

size_t workspace_size(const Request& request) {
  Instance plugin(create(plugins().creator(request.op), request.fields, TensorRTPhase::kBUILD));
  const auto descs = profile(request);
  const auto inputs = static_cast<int32_t>(request.inputs.size());
  return plugin.build->getWorkspaceSize(descs.data(), inputs, &descs.back(), 1);
}

// From createPlugin to what an engine file holds, and back.
Engine build_and_load(const Request& request) {
  IPluginCreatorV3One& creator = plugins().creator(request.op);
  auto plugin = std::make_unique<Instance>(create(creator, request.fields, TensorRTPhase::kBUILD));
  const auto descs = profile(request);
  const auto inputs = static_cast<int32_t>(request.inputs.size());
  for (int32_t position = 0; position <= inputs; ++position)
    if (!plugin->build->supportsFormatCombination(position, descs.data(), inputs, 1)) stop("types refused");
  if (plugin->build->configurePlugin(descs.data(), inputs, &descs.back(), 1) != 0) stop("profile refused");
  const Serialized kept(*plugin->runtime);
  plugin.reset();

  Engine engine{std::unique_ptr<IPluginV3>(create(creator, kept.fields(), TensorRTPhase::kRUNTIME)), {}, 0};
  auto* runtime = static_cast<IPluginV3OneRuntime*>(
      engine.plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  for (int i = 0; i < 2; ++i) engine.contexts.emplace_back(runtime->attachToContext(nullptr));
  return engine;
}

int run(const Request& request, void* workspace, cudaStream_t stream) {
  static std::map<std::string, Engine> engines;
  auto found = engines.find(request.key());
  if (found == engines.end()) found = engines.emplace(request.key(), build_and_load(request)).first;
  Engine& engine = found->second;
  IPluginV3OneRuntime& context = *engine.contexts[engine.runs++ % engine.contexts.size()].runtime;

  std::vector<PluginTensorDesc> descs;
  std::vector<const void*> data;
  for (const Tensor& input : request.inputs) {
    const bool lengths = descs.size() + 1 == request.inputs.size();
    descs.push_back(describe(input.shape, lengths ? DataType::kINT64 : request.type));
    data.push_back(input.data);
  }
  const PluginTensorDesc output = descs.front();
  if (context.onShapeChange(descs.data(), static_cast<int32_t>(descs.size()), &output, 1) != 0)
    return log_problem("shapes refused");
  return context.enqueue(descs.data(), &output, data.data(), &request.output, workspace, stream);
}

DataType to_type(aft::Element element) {
  const DataType types[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};
  return types[static_cast<int>(element)];
}

Request request(const char* op, const aft::Sequence& s, int64_t key_channels, const std::vector<Tensor>& parameters,
                std::vector<PluginField> fields) {
  Request made{std::string(s.causal ? "Causal" : "") + op, to_type(s.element), {}, s.output, std::move(fields)};
  const std::vector<int64_t> shape{s.batch, s.tokens, s.channels};
  made.inputs = {{shape, s.query}, {{s.batch, s.tokens, key_channels}, s.key}, {shape, s.value}};
  made.inputs.insert(made.inputs.end(), parameters.begin(), parameters.end());
  made.inputs.push_back({{s.batch}, s.lengths});
  return made;
}

template <class Enum>
PluginField choice(const char* name, Enum index, std::vector<const char*> words) {
  const char* word = words[static_cast<size_t>(index)];
  return {name, word, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(word))};
}
PluginField gate(aft::Gate gate) { return choice("gate", gate, {"sigmoid", "tanh", "none"}); }
PluginField heads(const int64_t& heads) { return {"num_heads", &heads, PluginFieldType::kINT64, 1}; }
PluginField number(const char* name, const float& value) { return {name, &value, PluginFieldType::kFLOAT32, 1}; }

// The request of a call; its fields point into p.
Request to_request(const aft::AftSimple& p) { return request("AftSimple", p, p.channels, {}, {gate(p.gate)}); }
Request to_request(const aft::AftFull& p) {
  const int64_t most = p.position_bias_width;
  return request("AftFull", p, p.channels, {{{most, most}, p.position_bias}},
                 {gate(p.gate), choice("precision", p.precision, {"fp32", "fp16", "bf16"})});
}
Request to_request(const aft::AftLocal& p) {
  const int64_t width = p.causal ? p.window : 2 * p.window - 1;
  return request("AftLocal", p, p.channels, {{{p.band_rows, width}, p.band}}, {gate(p.gate)});
}
Request to_request(const aft::AftConv& p) {
  return request("AftConv", p, p.heads, {{{p.heads, p.taps}, p.filter}}, {heads(p.heads), gate(p.gate)});
}
Request to_request(const aft::EfficientAttention& p) {
  return request("EfficientAttention", p, p.channels, {},
                 {heads(p.heads), choice("normalization", p.normalization, {"softmax", "scaling"}),
                  number("scale", p.scale)});
}
Request to_request(const aft::LinearAttention& p) {
  return request("NormalizedLinearAttention", p, p.channels, {},
                 {heads(p.heads), choice("feature_map", p.feature_map, {"elu", "relu"}), number("eps", p.eps)});
}
Request to_request(const aft::Fastformer& p) {
  const std::vector<int64_t> shape{p.channels, p.heads};
  return request("Fastformer", p, p.channels, {{shape, p.alpha_weight}, {shape, p.beta_weight}}, {heads(p.heads)});
}

}  // namespace

#define THROUGH_PLUGIN(name, Params)                                                             \
  size_t name##_workspace(const Params* p) { return workspace_size(to_request(*p)); }            \
  int name(const Params* p, void* workspace, cudaStream_t stream) {                              \
    if (device::only_checks_launches()) return 0; /* for more tokens than the parameters have */ \
    return run(to_request(*p), workspace, stream);                                               \
  }

THROUGH_PLUGIN(aft_cuda_aft_simple, aft::AftSimple)
THROUGH_PLUGIN(aft_cuda_aft_full, aft::AftFull)
THROUGH_PLUGIN(aft_cuda_aft_local, aft::AftLocal)
THROUGH_PLUGIN(aft_cuda_aft_conv, aft::AftConv)
THROUGH_PLUGIN(aft_cuda_efficient_attention, aft::EfficientAttention)
THROUGH_PLUGIN(aft_cuda_linear_attention, aft::LinearAttention)
THROUGH_PLUGIN(aft_cuda_fastformer, aft::Fastformer)
