// One operator as a TensorRT plugin (IPluginV3). All operators are this class; operators/operators.h has
// their differences.
#pragma once

#include <string>
#include <vector>

#include "fields.h"
#include "nvinfer.h"
#include "operators/operators.h"

constexpr char kNamespace[] = "ai.aftexport";
constexpr char kVersion[] = "1";

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  Plugin(const ops::Mechanism& op, bool causal, const ops::Values& values);

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType) noexcept override;
  Plugin* clone() noexcept override;

  const char* getPluginName() const noexcept override { return name_.c_str(); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t getOutputDataTypes(nvinfer1::DataType*, int32_t, const nvinfer1::DataType*, int32_t) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs*, int32_t, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs*, int32_t, nvinfer1::IExprBuilder&) noexcept override;
  bool supportsFormatCombination(int32_t, const nvinfer1::DynamicPluginTensorDesc*, int32_t,
                                 int32_t) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                          int32_t) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                          int32_t) const noexcept override;
  const char* getTimingCacheID() noexcept override { return description_.c_str(); }
  const char* getMetadataString() noexcept override { return description_.c_str(); }

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc*, int32_t, const nvinfer1::PluginTensorDesc*,
                        int32_t) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc*, const nvinfer1::PluginTensorDesc*, const void* const*,
                  void* const*, void* workspace, cudaStream_t) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  void expect_counts(int32_t inputs, int32_t outputs) const;
  void check_types(const nvinfer1::DataType*) const;
  void check(const std::vector<ops::Shape>&) const;
  ops::Call call(const std::vector<ops::Shape>& shapes, nvinfer1::DataType) const;

  const ops::Mechanism& op_;
  const bool causal_;
  const ops::Values values_;
  const std::string name_, description_;
  std::vector<nvinfer1::PluginField> fields_;  // these two are filled when asked for, and point into values_
  nvinfer1::PluginFieldCollection collection_;
};
