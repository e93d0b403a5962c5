#include "plugin.h"

#include <iterator>

#include "log.h"
#include "operators/cuda_calls.h"

using namespace nvinfer1;

namespace {

constexpr int32_t kSuccess = 0, kFailure = 1;

ops::Shape to_shape(const Dims& dims) { return {dims.d, dims.d + dims.nbDims}; }

template <class Desc, class DimsOf>
std::vector<ops::Shape> to_shapes(const Desc* descs, size_t count, const DimsOf& dims_of) {
  std::vector<ops::Shape> shapes;
  for (size_t i = 0; i < count; ++i) shapes.push_back(to_shape(dims_of(descs[i])));
  return shapes;
}

aft::Element to_element(DataType type) {
  if (type == DataType::kHALF) return aft::Element::kFloat16;
  return type == DataType::kBF16 ? aft::Element::kBfloat16 : aft::Element::kFloat32;
}

bool is_floating_point(DataType type) {
  return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

std::string to_string(DataType type) {
  static const char* const names[] = {"float32", "float16", "int8",     "int32", "bool",
                                      "uint8",   "float8",  "bfloat16", "int64"};
  const auto index = static_cast<size_t>(type);
  return index < std::size(names) ? names[index] : "type " + std::to_string(index);
}

}  // namespace

Plugin::Plugin(const ops::Mechanism& op, bool causal, const ops::Values& values)
    : op_(op),
      causal_(causal),
      values_(values),
      name_(std::string(causal ? "Causal" : "") + op.name),
      description_(name_ + "(" + ::to_string(op.attributes, values) + ")") {}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

Plugin* Plugin::clone() noexcept {
  return guarded(name_, static_cast<Plugin*>(nullptr), [&] { return new Plugin(op_, causal_, values_); });
}

void Plugin::expect_counts(int32_t inputs, int32_t outputs) const {
  const auto expected = static_cast<int32_t>(op_.inputs.size());
  expect(inputs == expected, "has " + std::to_string(inputs) + " inputs, expected " + std::to_string(expected));
  expect(outputs == 1, "has " + std::to_string(outputs) + " outputs, expected 1");
}

void Plugin::check_types(const DataType* types) const {
  expect(is_floating_point(types[0]),
         op_.inputs[0].name + (" is " + to_string(types[0]) + ", expected float32, float16 or bfloat16"));
  for (size_t i = 1; i < op_.inputs.size(); ++i) {
    const DataType expected = i + 1 == op_.inputs.size() ? DataType::kINT64 : types[0];
    expect(types[i] == expected,
           op_.inputs[i].name + (" is " + to_string(types[i]) + ", expected " + to_string(expected)));
  }
}

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                   int32_t input_count) const noexcept {
  return guarded(name_, kFailure, [&] {
    expect_counts(input_count, output_count);
    check_types(inputs);
    outputs[0] = inputs[0];
    return kSuccess;
  });
}

int32_t Plugin::getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs*, int32_t,
                                DimsExprs* outputs, int32_t output_count, IExprBuilder& builder) noexcept {
  return guarded(name_, kFailure, [&] {
    expect_counts(input_count, output_count);
    std::vector<ops::Shape> ranks;
    for (int32_t i = 0; i < input_count; ++i) ranks.emplace_back(inputs[i].nbDims, -1);
    check(ranks);
    outputs[0] = inputs[0];
    const IDimensionExpr*& channels = outputs[0].d[2];
    if (op_.width == ops::Mechanism::Width::kTwice)
      channels = builder.operation(DimensionOperation::kSUM, *channels, *channels);
    return kSuccess;
  });
}

// The floating-point tensors are all of the first one's type, lengths are int64.
bool Plugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t input_count,
                                       int32_t output_count) noexcept {
  return guarded(name_, false, [&] {
    expect_counts(input_count, output_count);
    const PluginTensorDesc& desc = tensors[position].desc;
    if (desc.format != TensorFormat::kLINEAR) return false;
    if (position == input_count - 1) return desc.type == DataType::kINT64;
    if (position > 0) return desc.type == tensors[0].desc.type;
    return is_floating_point(desc.type);
  });
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                const DynamicPluginTensorDesc*, int32_t output_count) noexcept {
  return guarded(name_, kFailure, [&] {
    expect_counts(input_count, output_count);
    check(to_shapes(inputs, op_.inputs.size(), [](const auto& input) { return input.desc.dims; }));
    return kSuccess;
  });
}

ops::Call Plugin::call(const std::vector<ops::Shape>& shapes, DataType type) const {
  ops::Call call{to_element(type), causal_, ops::Device::kCuda, values_, {}, std::nullopt, nullptr};
  for (const ops::Shape& shape : shapes) call.inputs.push_back({shape, nullptr});
  return call;
}

void Plugin::check(const std::vector<ops::Shape>& shapes) const {
  ops::check_shapes(op_, call(shapes, DataType::kFLOAT));
}

size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                const DynamicPluginTensorDesc*, int32_t output_count) const noexcept {
  return guarded(name_, size_t{0}, [&] {
    expect_counts(input_count, output_count);
    const auto largest = to_shapes(inputs, op_.inputs.size(), [](const auto& input) { return input.max; });
    return ops::workspace_size(op_.params(call(largest, inputs[0].desc.type)));
  });
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc*,
                              int32_t output_count) noexcept {
  return guarded(name_, kFailure, [&] {
    expect_counts(input_count, output_count);
    check(to_shapes(inputs, op_.inputs.size(), [](const auto& input) { return input.dims; }));
    return kSuccess;
  });
}

int32_t Plugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*, const void* const* inputs,
                        void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
  return guarded(name_, kFailure, [&] {
    const auto shapes = to_shapes(input_descs, op_.inputs.size(), [](const auto& input) { return input.dims; });
    ops::Call call = this->call(shapes, input_descs[0].type);
    for (size_t i = 0; i < call.inputs.size(); ++i) call.inputs[i].data = inputs[i];
    call.output = outputs[0];
    const int status = ops::enqueue(op_.params(call), workspace, stream);
    if (status == 0) return kSuccess;
    std::string what = std::string(aft_cuda_error_text(status)) + " (CUDA error " + std::to_string(status) + ") on " +
                       to_string(input_descs[0].type);
    for (const ops::Tensor& input : call.inputs) what += " " + ops::to_string(input.shape);
    throw Error(what);
  });
}

const PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  return guarded(name_, static_cast<const PluginFieldCollection*>(nullptr), [&] {
    fields_ = to_plugin_fields(op_.attributes, values_);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
  });
}
