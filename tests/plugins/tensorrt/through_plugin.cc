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
  static size_t size_of(const PluginField& field) { return field.type == PluginFieldType::kCHAR ? 1 : 4; }
};

class Slices {  // packed copies of tensors, for TensorRT knows no strides
 public:
  Slices() = default;
  Slices(const Slices&) = delete;
  ~Slices() {
    for (void* copy : copies_) device::release(copy);
  }

  const void* pack(const AftCudaTensor& tensor, int64_t batch, int64_t tokens, int64_t channels, size_t size) {
    if (!tensor.data || (tensor.token_stride == channels && tensor.batch_stride == tokens * channels))
      return tensor.data;
    const size_t row = static_cast<size_t>(channels) * size;
    std::vector<char> packed(static_cast<size_t>(batch * tokens) * row);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t first = b * tensor.batch_stride + t * tensor.token_stride;
        device::read(&packed[static_cast<size_t>(b * tokens + t) * row],
                     static_cast<const char*>(tensor.data) + static_cast<size_t>(first) * size, row);
      }
    copies_.push_back(device::allocate(packed.size()));
    device::write(copies_.back(), packed.data(), packed.size());
    return copies_.back();
  }

 private:
  std::vector<void*> copies_;
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

DataType to_type(AftCudaElement element) {
  const DataType types[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};
  return types[element];
}

Request request(const char* op, const AftCudaSequence& s, int64_t key_channels, Slices& slices,
                std::vector<Tensor> parameters, std::vector<PluginField> fields) {
  const size_t size = s.element == AFT_CUDA_FLOAT32 ? 4 : 2;
  Request made{std::string(s.causal ? "Causal" : "") + op, to_type(s.element), {}, s.output, std::move(fields)};
  const auto add = [&](const AftCudaTensor& tensor, int64_t channels) {
    made.inputs.push_back({{s.batch, s.tokens, channels}, slices.pack(tensor, s.batch, s.tokens, channels, size)});
  };
  add(s.query, s.channels);
  add(s.key, key_channels);
  add(s.value, s.channels);
  for (Tensor& parameter : parameters) made.inputs.push_back(std::move(parameter));
  made.inputs.push_back({{s.batch}, s.lengths});
  return made;
}

PluginField choice(const char* name, int index, std::vector<const char*> words) {
  const char* word = words[static_cast<size_t>(index)];
  return {name, word, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(word))};
}
PluginField gate(AftCudaGate gate) { return choice("gate", gate, {"sigmoid", "tanh", "none"}); }
PluginField heads(const int32_t& heads) { return {"num_heads", &heads, PluginFieldType::kINT32, 1}; }
PluginField number(const char* name, const float& value) { return {name, &value, PluginFieldType::kFLOAT32, 1}; }

// Calls f with each mechanism's request.
template <class F>
auto with_request(const AftCudaAftSimple& p, const F& f) {
  Slices slices;
  return f(request("AftSimple", p.sequence, p.sequence.channels, slices, {}, {gate(p.gate)}));
}
template <class F>
auto with_request(const AftCudaAftFull& p, const F& f) {
  Slices slices;
  const int64_t most = p.position_bias_width;
  return f(request("AftFull", p.sequence, p.sequence.channels, slices, {{{most, most}, p.position_bias}},
                   {gate(p.gate), choice("precision", p.precision, {"fp32", "fp16", "bf16"})}));
}
template <class F>
auto with_request(const AftCudaAftLocal& p, const F& f) {
  Slices slices;
  const int64_t width = p.sequence.causal ? p.window : 2 * p.window - 1;
  return f(request("AftLocal", p.sequence, p.sequence.channels, slices, {{{p.band_rows, width}, p.band}},
                   {gate(p.gate)}));
}
template <class F>
auto with_request(const AftCudaAftConv& p, const F& f) {
  Slices slices;
  const auto count = static_cast<int32_t>(p.heads);
  return f(request("AftConv", p.sequence, p.heads, slices, {{{p.heads, p.taps}, p.filter}},
                   {heads(count), gate(p.gate)}));
}
template <class F>
auto with_request(const AftCudaEfficientAttention& p, const F& f) {
  Slices slices;
  const auto count = static_cast<int32_t>(p.heads);
  return f(request("EfficientAttention", p.sequence, p.sequence.channels, slices, {},
                   {heads(count), choice("normalization", p.normalization, {"softmax", "scaling"}),
                    number("scale", p.scale)}));
}
template <class F>
auto with_request(const AftCudaLinearAttention& p, const F& f) {
  Slices slices;
  const auto count = static_cast<int32_t>(p.heads);
  return f(request("NormalizedLinearAttention", p.sequence, p.sequence.channels, slices, {},
                   {heads(count), choice("feature_map", p.feature_map, {"elu", "relu"}), number("eps", p.eps)}));
}
template <class F>
auto with_request(const AftCudaFastformer& p, const F& f) {
  Slices slices;
  const auto count = static_cast<int32_t>(p.heads);
  const std::vector<int64_t> shape{p.sequence.channels, p.heads};
  return f(request("Fastformer", p.sequence, p.sequence.channels, slices,
                   {{shape, p.alpha_weight}, {shape, p.beta_weight}}, {heads(count)}));
}

}  // namespace

#define THROUGH_PLUGIN(name, Params)                                              \
  size_t name##_workspace(const Params* p) {                                      \
    Params shapes = *p;                                                           \
    shapes.sequence.query.data = shapes.sequence.key.data = nullptr;              \
    shapes.sequence.value.data = nullptr;                                         \
    return with_request(shapes, workspace_size);                                  \
  }                                                                               \
  int name(const Params* p, void* workspace, cudaStream_t stream) {               \
    if (device::only_checks_launches()) return 0; /* for more tokens than the parameters have */ \
    return with_request(*p, [&](const Request& r) { return run(r, workspace, stream); }); \
  }

THROUGH_PLUGIN(aft_cuda_aft_simple, AftCudaAftSimple)
THROUGH_PLUGIN(aft_cuda_aft_full, AftCudaAftFull)
THROUGH_PLUGIN(aft_cuda_aft_local, AftCudaAftLocal)
THROUGH_PLUGIN(aft_cuda_aft_conv, AftCudaAftConv)
THROUGH_PLUGIN(aft_cuda_efficient_attention, AftCudaEfficientAttention)
THROUGH_PLUGIN(aft_cuda_linear_attention, AftCudaLinearAttention)
THROUGH_PLUGIN(aft_cuda_fastformer, AftCudaFastformer)
