// Prints all of TensorRT's interface that plugins and their tests rely on: places in virtual tables, signatures,
// sizes, offsets, enumerators. Built with TensorRT's headers it must print what it prints with our declaration.

#include <cstdio>
#include <cstring>
#include <typeinfo>

#include "runtime_abi.h"

// With our declaration, the version to list is an argument to the compiler.
#if NV_TENSORRT_MAJOR >= 11
using nvinfer1::v_1_0::ILogger, nvinfer1::v_1_0::ILoggerFinder;
#else
using nvinfer1::ILogger, nvinfer1::ILoggerFinder;
#endif

using namespace nvinfer1;

namespace {

// A pointer to a virtual function is its offset in the table, as the Itanium C++ ABI has it.
template <class Function>
size_t slot(Function function) {
  size_t offset;
  std::memcpy(&offset, &function, sizeof offset);
  return offset / sizeof(void*);
}

template <class Interface>
struct Longer : Interface {
  virtual void after_all_others() {}
};

template <class Interface>
void list_class(const char* name) {
  std::printf("%s: %zu bytes, %zu virtual functions\n", name, sizeof(Interface),
              slot(&Longer<Interface>::after_all_others));
}

template <class Function>
void list_function(const char* name, Function function) {
  std::printf("  %zu %s %s\n", slot(function), name, typeid(function).name());
}

template <class Number>
void list_number(const char* name, Number number) {
  std::printf("  %s = %lld\n", name, static_cast<long long>(number));
}

}  // namespace

#define CLASS(name) list_class<name>(#name)
#define FUNCTION(name) list_function(#name, &name)
#define STRUCT(name) std::printf("%s: %zu bytes, aligned to %zu\n", #name, sizeof(name), alignof(name))
#define MEMBER(type, name) list_number(#type "::" #name " offset", offsetof(type, name))
#define ENUMERATOR(name) list_number(#name, name)

int main() {
  CLASS(IVersionedInterface);
  FUNCTION(IVersionedInterface::getAPILanguage);
  FUNCTION(IVersionedInterface::getInterfaceInfo);
  CLASS(IPluginCapability);
  CLASS(IPluginCreatorInterface);
  CLASS(IPluginV3);
  FUNCTION(IPluginV3::getCapabilityInterface);
  FUNCTION(IPluginV3::clone);
  CLASS(IPluginV3OneCore);
  FUNCTION(IPluginV3OneCore::getPluginName);
  FUNCTION(IPluginV3OneCore::getPluginVersion);
  FUNCTION(IPluginV3OneCore::getPluginNamespace);
  CLASS(IPluginV3OneBuild);
  FUNCTION(IPluginV3OneBuild::configurePlugin);
  FUNCTION(IPluginV3OneBuild::getOutputDataTypes);
  FUNCTION(IPluginV3OneBuild::getOutputShapes);
  FUNCTION(IPluginV3OneBuild::supportsFormatCombination);
  FUNCTION(IPluginV3OneBuild::getNbOutputs);
  FUNCTION(IPluginV3OneBuild::getWorkspaceSize);
  FUNCTION(IPluginV3OneBuild::getValidTactics);
  FUNCTION(IPluginV3OneBuild::getNbTactics);
  FUNCTION(IPluginV3OneBuild::getTimingCacheID);
  FUNCTION(IPluginV3OneBuild::getFormatCombinationLimit);
  FUNCTION(IPluginV3OneBuild::getMetadataString);
  CLASS(apiv::VExprBuilder);
  FUNCTION(apiv::VExprBuilder::operation);
  STRUCT(IExprBuilder);
  CLASS(IPluginV3OneRuntime);
  FUNCTION(IPluginV3OneRuntime::setTactic);
  FUNCTION(IPluginV3OneRuntime::onShapeChange);
  FUNCTION(IPluginV3OneRuntime::enqueue);
  FUNCTION(IPluginV3OneRuntime::attachToContext);
  FUNCTION(IPluginV3OneRuntime::getFieldsToSerialize);
  CLASS(IPluginCreatorV3One);
  FUNCTION(IPluginCreatorV3One::createPlugin);
  FUNCTION(IPluginCreatorV3One::getFieldNames);
  FUNCTION(IPluginCreatorV3One::getPluginName);
  FUNCTION(IPluginCreatorV3One::getPluginVersion);
  FUNCTION(IPluginCreatorV3One::getPluginNamespace);

  STRUCT(Dims);
  MEMBER(Dims, nbDims);
  MEMBER(Dims, d);
  ENUMERATOR(Dims::MAX_DIMS);
  STRUCT(DimsExprs);
  MEMBER(DimsExprs, nbDims);
  MEMBER(DimsExprs, d);
  STRUCT(PluginTensorDesc);
  MEMBER(PluginTensorDesc, dims);
  MEMBER(PluginTensorDesc, type);
  MEMBER(PluginTensorDesc, format);
  MEMBER(PluginTensorDesc, scale);
  STRUCT(DynamicPluginTensorDesc);
  MEMBER(DynamicPluginTensorDesc, desc);
  MEMBER(DynamicPluginTensorDesc, min);
  MEMBER(DynamicPluginTensorDesc, max);
  MEMBER(DynamicPluginTensorDesc, opt);
  STRUCT(PluginField);
  MEMBER(PluginField, name);
  MEMBER(PluginField, data);
  MEMBER(PluginField, type);
  MEMBER(PluginField, length);
  STRUCT(PluginFieldCollection);
  MEMBER(PluginFieldCollection, nbFields);
  MEMBER(PluginFieldCollection, fields);
  STRUCT(InterfaceInfo);
  MEMBER(InterfaceInfo, kind);
  MEMBER(InterfaceInfo, major);
  MEMBER(InterfaceInfo, minor);

  STRUCT(APILanguage);
  ENUMERATOR(APILanguage::kCPP);
  STRUCT(DataType);
  ENUMERATOR(DataType::kFLOAT);
  ENUMERATOR(DataType::kHALF);
  ENUMERATOR(DataType::kBF16);
  ENUMERATOR(DataType::kINT64);
  STRUCT(TensorFormat);
  ENUMERATOR(TensorFormat::kLINEAR);
  STRUCT(PluginFieldType);
  ENUMERATOR(PluginFieldType::kFLOAT32);
  ENUMERATOR(PluginFieldType::kFLOAT64);
  ENUMERATOR(PluginFieldType::kINT32);
  ENUMERATOR(PluginFieldType::kINT64);
  ENUMERATOR(PluginFieldType::kCHAR);
  ENUMERATOR(PluginFieldType::kUNKNOWN);
  STRUCT(TensorRTPhase);
  ENUMERATOR(TensorRTPhase::kBUILD);
  ENUMERATOR(TensorRTPhase::kRUNTIME);
  STRUCT(DimensionOperation);
  ENUMERATOR(DimensionOperation::kSUM);
  STRUCT(PluginCapabilityType);
  ENUMERATOR(PluginCapabilityType::kCORE);
  ENUMERATOR(PluginCapabilityType::kBUILD);
  ENUMERATOR(PluginCapabilityType::kRUNTIME);

  CLASS(::ILogger);
  FUNCTION(::ILogger::log);
  STRUCT(::ILogger::Severity);
  ENUMERATOR(::ILogger::Severity::kERROR);
  CLASS(::ILoggerFinder);
  FUNCTION(::ILoggerFinder::findLogger);
#if NV_TENSORRT_MAJOR >= 11
  CLASS(IPluginRegistry);
  FUNCTION(IPluginRegistry::loadLibrary);
  FUNCTION(IPluginRegistry::deregisterLibrary);
  FUNCTION(IPluginRegistry::getAllCreators);
  FUNCTION(IPluginRegistry::getCreator);
#endif
}
