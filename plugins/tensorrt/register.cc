// getCreators: what TensorRT calls after it has loaded the library, to learn of its plugins.

#include <memory>

#include "log.h"
#include "plugin.h"

using namespace nvinfer1;

namespace {

class Creator final : public IPluginCreatorV3One {
 public:
  Creator(const ops::Mechanism& op, bool causal)
      : op_(op),
        causal_(causal),
        name_(std::string(causal ? "Causal" : "") + op.name),
        fields_(to_plugin_fields(op.attributes, defaults_)),
        collection_{static_cast<int32_t>(fields_.size()), fields_.data()} {}

  IPluginV3* createPlugin(const char*, const PluginFieldCollection* given, TensorRTPhase) noexcept override {
    return guarded(name_, static_cast<IPluginV3*>(nullptr),
                   [&] { return new Plugin(op_, causal_, read_values(op_.attributes, given)); });
  }

  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return name_.c_str(); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  const ops::Mechanism& op_;
  const bool causal_;
  const std::string name_;
  const ops::Values defaults_;
  const std::vector<PluginField> fields_;  // point into defaults_
  const PluginFieldCollection collection_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) IPluginCreatorInterface* const* getCreators(int32_t& count) {
  // Never destroyed: TensorRT keeps them for as long as the library is loaded.
  static const std::vector<IPluginCreatorInterface*>& creators = *[] {
    auto* made = new std::vector<IPluginCreatorInterface*>;
    for (const auto* mechanisms : {&ops::mechanisms(), &ops::cuda_mechanisms()})
      for (const ops::Mechanism& op : *mechanisms)
        for (const bool causal : {false, true})
          if (!causal || op.has_causal_form) made->push_back(new Creator(op, causal));
    return made;
  }();
  count = static_cast<int32_t>(creators.size());
  return creators.data();
}
