// Plays TensorRT: loads the plugin library, finds creators, listens to its log.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nvinfer_abi.h"

using namespace nvinfer1;

// The loggers as TensorRT 11 has them, by the names it gives their types.
namespace nvinfer1 {
namespace v_1_0 {
class ILogger : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
  virtual void log(int32_t severity, const char* message) noexcept = 0;
};
class ILoggerFinder : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
  virtual ILogger* findLogger() = 0;
};
}  // namespace v_1_0

// As TensorRT 10 has them.
class ILogger {
 public:
  virtual void log(int32_t severity, const char* message) noexcept = 0;
  virtual ~ILogger() = default;
};
class ILoggerFinder {
 public:
  virtual ILogger* findLogger() = 0;
  virtual ~ILoggerFinder() = default;
};
}  // namespace nvinfer1

// What a version's finder finds: a logger that keeps the last error.
template <class Finder, class Logger>
class Log final : public Finder {
 public:
  Logger* findLogger() override { return &logger_; }
  std::string take() { return std::exchange(logger_.last, ""); }

 private:
  struct : Logger {
    void log(int32_t severity, const char* message) noexcept override {
      last = severity == 1 ? message : "not logged as an error";
    }
    std::string last;
  } logger_;
};
using Log10 = Log<nvinfer1::ILoggerFinder, nvinfer1::ILogger>;
using Log11 = Log<nvinfer1::v_1_0::ILoggerFinder, nvinfer1::v_1_0::ILogger>;

[[noreturn]] inline void stop(const std::string& why) {
  std::printf("FAILED: %s\n", why.c_str());
  std::exit(EXIT_FAILURE);
}

// The library that AFT_TENSORRT_LIBRARY names.
class Library {
 public:
  Library() {
    const char* path = std::getenv("AFT_TENSORRT_LIBRARY");
    handle_ = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!handle_) stop(path ? dlerror() : "AFT_TENSORRT_LIBRARY is not set");
    int32_t count = 0;
    auto* const* all = function<IPluginCreatorInterface* const*(int32_t&)>("getCreators")(count);
    for (int32_t i = 0; i < count; ++i) creators_.push_back(static_cast<IPluginCreatorV3One*>(all[i]));
  }

  void set_logger_finder(void* finder) { function<void(void*)>("setLoggerFinder")(finder); }
  const std::vector<IPluginCreatorV3One*>& creators() const { return creators_; }

  IPluginCreatorV3One& creator(const std::string& name) const {
    for (IPluginCreatorV3One* creator : creators_)
      if (creator->getPluginName() == name) return *creator;
    stop("the library has no " + name);
  }

 private:
  template <class Signature>
  Signature* function(const char* name) {
    void* found = dlsym(handle_, name);
    if (!found) stop(dlerror());
    return reinterpret_cast<Signature*>(found);
  }

  void* handle_;
  std::vector<IPluginCreatorV3One*> creators_;
};

// A plugin with its three interfaces.
struct Instance {
  std::unique_ptr<IPluginV3> plugin;
  IPluginV3OneCore* core = nullptr;
  IPluginV3OneBuild* build = nullptr;
  IPluginV3OneRuntime* runtime = nullptr;

  explicit Instance(IPluginV3* made) : plugin(made) {
    if (!plugin) return;
    core = static_cast<IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
    build = static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    runtime = static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  }
};

inline IPluginV3* create(IPluginCreatorV3One& creator, const std::vector<PluginField>& fields, TensorRTPhase phase) {
  const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
  return creator.createPlugin("node", &collection, phase);
}

// What an engine file keeps of a plugin, apart from the plugin.
class Serialized {
 public:
  explicit Serialized(IPluginV3OneRuntime& plugin) {
    const PluginFieldCollection& fields = *plugin.getFieldsToSerialize();
    for (int32_t i = 0; i < fields.nbFields; ++i) {
      const PluginField& field = fields.fields[i];
      const size_t bytes = static_cast<size_t>(field.length) * (field.type == PluginFieldType::kCHAR ? 1 : 4);
      names_.push_back(std::make_unique<std::string>(field.name));
      data_.push_back(std::make_unique<std::string>(static_cast<const char*>(field.data), bytes));
      fields_.emplace_back(names_.back()->c_str(), data_.back()->data(), field.type, field.length);
    }
  }

  const std::vector<PluginField>& fields() const { return fields_; }

 private:
  std::vector<std::unique_ptr<std::string>> names_, data_;
  std::vector<PluginField> fields_;
};

inline Dims to_dims(const std::vector<int64_t>& shape) {
  Dims dims{static_cast<int32_t>(shape.size()), {}};
  for (size_t i = 0; i < shape.size(); ++i) dims.d[i] = shape[i];
  return dims;
}

inline PluginTensorDesc describe(const std::vector<int64_t>& shape, DataType type) {
  return {to_dims(shape), type, TensorFormat::kLINEAR, 1.0f};
}
