// The plugins around the matrix product of AFT-full: for every element and gate their outputs have the bits of the
// kernels.

#include "../cuda/problem.h"
#include "host.h"

namespace {

constexpr int64_t kBatch = 2, kTokens = 33, kChannels = 16;

std::string bits_of(Buffer& buffer) {
  if (!buffer.read()) stop("writes behind a buffer");
  return {reinterpret_cast<const char*>(buffer.host()), buffer.bytes};
}

// Runs a plugin, whose workspace is what it asks for.
void enqueue(IPluginCreatorV3One& creator, const std::vector<PluginField>& fields,
             const std::vector<PluginTensorDesc>& descs, const std::vector<const void*>& inputs, void* output) {
  Instance plugin(create(creator, fields, TensorRTPhase::kRUNTIME));
  std::vector<DynamicPluginTensorDesc> profile;
  for (const PluginTensorDesc& desc : descs) profile.push_back({desc, desc.dims, desc.dims, desc.dims});
  const auto count = static_cast<int32_t>(descs.size());
  Buffer workspace(plugin.build->getWorkspaceSize(profile.data(), count, profile.data(), 1));
  if (plugin.runtime->onShapeChange(descs.data(), count, descs.data(), 1) != 0 ||
      plugin.runtime->enqueue(descs.data(), descs.data(), inputs.data(), &output, workspace.data(), nullptr) != 0)
    stop("the plugin refuses the call");
  if (!workspace.read()) stop("the plugin writes behind its workspace");
}

}  // namespace

int main() {
  const Plugins plugins;
  IPluginCreatorV3One &prepare = plugins.creator("AftFullPrepare"), &finish = plugins.creator("AftFullFinish");
  const DataType types[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};
  const char* const gates[] = {"sigmoid", "tanh", "none"};
  int failures = 0;
  for (int index : {0, 1, 2}) {
    const auto element = static_cast<Element>(index);
    const Gate gate = static_cast<Gate>(index);  // each gate once
    const Case c{0,    kBatch,       kTokens,        kChannels,       1, element, false, gate,
                 Data::kSmall, Layout::kPacked, {kTokens, 20}};
    Problem problem(c, {}, kChannels);
    Numbers numbers;
    const void* const bias = problem.input(kTokens * kTokens, 1.0f, numbers);
    const auto precision = static_cast<aft::Precision>(index);  // of the element
    const aft::AftFull call{problem.sequence, gate, 0.0f, precision, {}, bias, kTokens, false, nullptr};
    const aft::Sequence& s = call;
    const size_t bytes = static_cast<size_t>(kBatch * kTokens * kChannels) * element_size(element);
    Buffer workspace(aft_cuda_aft_full_prepare_workspace(&call)), entries(2 * bytes), plugin_entries(2 * bytes);
    if (aft_cuda_aft_full_prepare(&call, entries.data(), workspace.data(), nullptr) != 0) stop("prepare refuses");

    const DataType type = types[index];
    const PluginTensorDesc sequence = describe({kBatch, kTokens, kChannels}, type),
                           lengths = describe({kBatch}, DataType::kINT64);
    enqueue(prepare, {}, {sequence, sequence, lengths}, {s.key, s.value, s.lengths}, plugin_entries.data());
    const std::string made = bits_of(entries);
    if (made.find_first_not_of(made.front()) == std::string::npos) stop("the entries tell nothing");
    failures += made != bits_of(plugin_entries);

    // The entries are also products, those of biases that are -infinity but on the diagonal.
    Buffer output(bytes), plugin_output(bytes);
    aft::AftFull finished = call;
    finished.output = output.data();
    if (aft_cuda_aft_full_finish(&finished, entries.data(), nullptr) != 0) stop("finish refuses");
    const std::vector<PluginField> fields{
        {"gate", gates[index], PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(gates[index]))}};
    enqueue(finish, fields,
            {sequence, sequence, sequence, describe({kTokens, kTokens}, type),
             describe({kBatch, kTokens, 2 * kChannels}, type), lengths},
            {s.query, s.key, s.value, call.position_bias, entries.data(), s.lengths},
            plugin_output.data());
    failures += bits_of(output) != bits_of(plugin_output);
  }
  std::printf("%d failures\n", failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
