// Which precision AftFull's kernel is called with: for every element and every word of the field the plugin's
// output has the bits of the kernel called so.

#include "../cuda/problem.h"
#include "host.h"

namespace {

constexpr int64_t kBatch = 2, kTokens = 33, kChannels = 16;
constexpr aft::Precision kFloat32 = aft::Precision::kFloat32, kFloat16 = aft::Precision::kFloat16,
                              kBFloat16 = aft::Precision::kBfloat16;

struct Choice {
  const char* word;  // null: the field is not given
  aft::Precision by_element[3];
};
const Choice kChoices[] = {{nullptr, {kFloat32, kFloat32, kFloat32}},
                           {"fp32", {kFloat32, kFloat32, kFloat32}},
                           {"fp16", {kFloat32, kFloat16, kBFloat16}},
                           {"bf16", {kFloat32, kBFloat16, kBFloat16}}};

std::string bits_of(Buffer& buffer) {
  if (!buffer.read()) stop("writes behind a buffer");
  return {reinterpret_cast<const char*>(buffer.host()), buffer.bytes};
}

std::string by_kernel(aft::AftFull call, aft::Precision precision, size_t bytes) {
  Buffer output(bytes), workspace(aft_cuda_aft_full_workspace(&call));
  call.output = output.data();
  call.precision = precision;
  if (aft_cuda_aft_full(&call, workspace.data(), nullptr) != 0) stop("the kernel refuses the call");
  return bits_of(output);
}

std::string by_plugin(IPluginCreatorV3One& creator, const aft::AftFull& call, const char* word, size_t bytes) {
  std::vector<PluginField> fields;
  if (word) fields.emplace_back("precision", word, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(word)));
  Instance plugin(create(creator, fields, TensorRTPhase::kRUNTIME));
  if (!plugin.plugin) stop(std::string("the plugin refuses precision ") + word);

  const DataType types[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};
  const DataType type = types[static_cast<int>(call.element)];
  const PluginTensorDesc sequence = describe({kBatch, kTokens, kChannels}, type);
  const std::vector<PluginTensorDesc> descs{sequence, sequence, sequence, describe({kTokens, kTokens}, type),
                                            describe({kBatch}, DataType::kINT64)};
  std::vector<DynamicPluginTensorDesc> profile;
  for (const PluginTensorDesc& desc : descs) profile.push_back({desc, desc.dims, desc.dims, desc.dims});
  const auto count = static_cast<int32_t>(descs.size());
  Buffer output(bytes), workspace(plugin.build->getWorkspaceSize(profile.data(), count, profile.data(), 1));

  const aft::Sequence& s = call;
  const void* const inputs[] = {s.query, s.key, s.value, call.position_bias, s.lengths};
  void* const outputs[] = {output.data()};
  if (plugin.runtime->onShapeChange(descs.data(), count, &sequence, 1) != 0 ||
      plugin.runtime->enqueue(descs.data(), &sequence, inputs, outputs, workspace.data(), nullptr) != 0)
    stop("the plugin refuses the call");
  return bits_of(output);
}

}  // namespace

int main() {
  const Plugins plugins;
  IPluginCreatorV3One& creator = plugins.creator("AftFull");
  int failures = 0;
  for (Element element : {Element::kFloat32, Element::kFloat16, Element::kBfloat16}) {
    const Case c{0,     kBatch,       kTokens,        kChannels,       1, element, false, Gate::kSigmoid,
                 Data::kSmall, Layout::kPacked, {kTokens, 20}};
    Problem problem(c, {}, kChannels);
    Numbers bias;
    const void* const data = problem.input(kTokens * kTokens, 1.0f, bias);
    const aft::AftFull call{problem.sequence, c.gate, 0.0f, {}, {}, data, kTokens, false, nullptr};
    const size_t bytes = static_cast<size_t>(kBatch * kTokens * kChannels) * element_size(element);

    const std::string exact = by_kernel(call, kFloat32, bytes);
    if (element != Element::kFloat32 && by_kernel(call, kBFloat16, bytes) == exact) stop("bfloat16 tells nothing");
    if (element == Element::kFloat16)
      for (aft::Precision other : {kFloat32, kBFloat16})
        if (by_kernel(call, kFloat16, bytes) == by_kernel(call, other, bytes)) stop("float16 tells nothing");
    for (const Choice& choice : kChoices) {
      if (by_plugin(creator, call, choice.word, bytes) == by_kernel(call, choice.by_element[static_cast<int>(element)], bytes)) continue;
      std::printf("FAILED: element %d, precision %s\n", static_cast<int>(element), choice.word ? choice.word : "not given");
      ++failures;
    }
  }
  std::printf("%d failures\n", failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
