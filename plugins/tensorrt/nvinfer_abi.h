// The part of TensorRT's interface that a plugin library touches, declared here because no package registry
// has TensorRT's C++ headers. What counts is the order of virtual functions and of members, which is the same
// in TensorRT 10.0 to 11.1 but for the loggers (log.cc); unused enumerators are left out, and arguments a
// plugin only passes on stay incomplete. tests/plugins/tensorrt/test_nvinfer_abi.py compares all this with the
// real headers.
#pragma once

#include <cstddef>
#include <cstdint>

typedef struct CUstream_st* cudaStream_t;

namespace nvinfer1 {

class IDimensionExpr;
class IPluginResourceContext;

using AsciiChar = char;

enum class APILanguage : int32_t { kCPP = 0 };
enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kBF16 = 7, kINT64 = 8 };
enum class TensorFormat : int32_t { kLINEAR = 0 };
enum class PluginFieldType : int32_t {
  kFLOAT32 = 1,
  kFLOAT64 = 2,
  kINT32 = 5,
  kCHAR = 6,
  kUNKNOWN = 8,
  kINT64 = 10
};
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class DimensionOperation : int32_t { kSUM = 0 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };

struct Dims {
  static constexpr int32_t MAX_DIMS = 8;
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};

struct DimsExprs {
  int32_t nbDims;
  const IDimensionExpr* d[Dims::MAX_DIMS];
};

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min, max, opt;
};

struct PluginField {
  const AsciiChar* name = nullptr;
  const void* data = nullptr;
  PluginFieldType type = PluginFieldType::kUNKNOWN;
  int32_t length = 0;

  PluginField(const AsciiChar* name, const void* data, PluginFieldType type, int32_t length) noexcept
      : name(name), data(data), type(type), length(length) {}
};

struct PluginFieldCollection {
  int32_t nbFields = 0;
  const PluginField* fields = nullptr;
};

struct InterfaceInfo {
  const char* kind;
  int32_t major, minor;
};

namespace apiv {
class VExprBuilder {
 public:
  virtual ~VExprBuilder() noexcept = default;
  virtual const IDimensionExpr* constant(int64_t) = 0;
  virtual const IDimensionExpr* operation(DimensionOperation, const IDimensionExpr&, const IDimensionExpr&) = 0;
  virtual const IDimensionExpr* declareSizeTensor(int32_t output, const IDimensionExpr& best,
                                                  const IDimensionExpr& most) = 0;
};
}  // namespace apiv

// Not a versioned interface: calls go to an implementation that TensorRT keeps.
class IExprBuilder {
 public:
  const IDimensionExpr* operation(DimensionOperation op, const IDimensionExpr& first,
                                  const IDimensionExpr& second) noexcept {
    return mImpl->operation(op, first, second);
  }

 protected:
  virtual ~IExprBuilder() noexcept = default;
  apiv::VExprBuilder* mImpl;
};

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;
};

// The namespaces are TensorRT's: they are part of the types' names in type information.
namespace v_1_0 {

class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual const AsciiChar* getPluginName() const noexcept = 0;
  virtual const AsciiChar* getPluginVersion() const noexcept = 0;
  virtual const AsciiChar* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual int32_t configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                  const DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                     int32_t input_count) const noexcept = 0;
  virtual int32_t getOutputShapes(const DimsExprs* inputs, int32_t input_count, const DimsExprs* shape_inputs,
                                  int32_t shape_input_count, DimsExprs* outputs, int32_t output_count,
                                  IExprBuilder&) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors,
                                         int32_t input_count, int32_t output_count) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                                  int32_t) const noexcept {
    return 0;
  }
  virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual const char* getTimingCacheID() noexcept { return nullptr; }
  virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
  virtual const char* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc* outputs,
                                int32_t output_count) noexcept = 0;
  virtual int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                          const void* const* inputs, void* const* outputs, void* workspace,
                          cudaStream_t) noexcept = 0;
  virtual IPluginV3* attachToContext(IPluginResourceContext*) noexcept = 0;
  virtual const PluginFieldCollection* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual IPluginV3* createPlugin(const AsciiChar* name, const PluginFieldCollection*, TensorRTPhase) noexcept = 0;
  virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
  virtual const AsciiChar* getPluginName() const noexcept = 0;
  virtual const AsciiChar* getPluginVersion() const noexcept = 0;
  virtual const AsciiChar* getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

using v_1_0::IPluginCapability;
using v_1_0::IPluginCreatorInterface;
using v_1_0::IPluginCreatorV3One;
using v_1_0::IPluginV3;
using v_1_0::IPluginV3OneBuild;
using v_1_0::IPluginV3OneCore;
using v_1_0::IPluginV3OneRuntime;

}  // namespace nvinfer1
