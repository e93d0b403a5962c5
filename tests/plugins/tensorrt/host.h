// Plays TensorRT: loads the plugin library, itself or by a real registry, finds creators, listens to the log.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime_abi.h"

using namespace nvinfer1;

// Keeps the last error of those a plugin or a runtime logs.
template <class Logger>
class ErrorLog final : public Logger {
 public:
  void log(typename Logger::Severity severity, const char* message) noexcept override {
    if (severity == Logger::Severity::kERROR) last_ = message;
  }
  std::string take() { return std::exchange(last_, ""); }

 private:
  std::string last_;
};

// What a runtime gives a plugin library to find its logger with.
template <class Finder, class Logger>
class Finds final : public Finder {
 public:
  explicit Finds(Logger& logger) : logger_(logger) {}
  Logger* findLogger() override { return &logger_; }

 private:
  Logger& logger_;
};

[[noreturn]] inline void stop(const std::string& why) {
  std::printf("FAILED: %s\n", why.c_str());
  std::exit(EXIT_FAILURE);
}

// A shared library that stays loaded as long as the program runs.
class SharedLibrary {
 public:
  explicit SharedLibrary(const char* path) : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) stop(dlerror());
  }

  template <class Signature>
  Signature* function(const char* name) const {
    void* found = dlsym(handle_, name);
    if (!found) stop(dlerror());
    return reinterpret_cast<Signature*>(found);
  }

 private:
  void* handle_;
};

// The plugin library that AFT_TENSORRT_LIBRARY names; loaded by the registry of the TensorRT that
// AFT_TENSORRT_RUNTIME names, or where it names none, by this program in its place.
class Plugins {
 public:
  Plugins() {
    const char* path = std::getenv("AFT_TENSORRT_LIBRARY");
    if (!path) stop("AFT_TENSORRT_LIBRARY is not set");
    int32_t count = 0;
    IPluginCreatorInterface* const* all = nullptr;
    if (const char* runtime = std::getenv("AFT_TENSORRT_RUNTIME")) {
      runtime_ = std::make_unique<SharedLibrary>(runtime);
      registry_ = runtime_->function<IPluginRegistry*()>("getPluginRegistry")();
      library_ = registry_->loadLibrary(path);
      if (!library_) stop(std::string("the registry does not load ") + path);
      all = registry_->getAllCreators(&count);
    } else {
      plugins_ = std::make_unique<SharedLibrary>(path);
      all = plugins_->function<IPluginCreatorInterface* const*(int32_t&)>("getCreators")(count);
    }
    for (int32_t i = 0; i < count; ++i) {
      if (std::string(all[i]->getInterfaceInfo().kind) != "PLUGIN CREATOR_V3ONE") continue;  // a runtime's own
      auto* creator = static_cast<IPluginCreatorV3One*>(all[i]);
      if (std::string(creator->getPluginNamespace()) == "ai.aftexport") creators_.push_back(creator);
    }
  }

  const std::vector<IPluginCreatorV3One*>& creators() const { return creators_; }

  IPluginCreatorV3One& creator(const std::string& name) const {
    if (registry_) {
      if (auto* found = registry_->getCreator(name.c_str(), "1", "ai.aftexport"))
        return static_cast<IPluginCreatorV3One&>(*found);
      stop("the registry does not find " + name);
    }
    for (IPluginCreatorV3One* creator : creators_)
      if (creator->getPluginName() == name) return *creator;
    stop("the library has no " + name);
  }

  const SharedLibrary* runtime() const { return runtime_.get(); }
  void set_logger_finder(void* finder) { plugins_->function<void(void*)>("setLoggerFinder")(finder); }

  // Whether a registry that has unloaded the library has forgotten its plugins.
  bool unload() {
    if (!registry_) return true;
    registry_->deregisterLibrary(library_);
    return !registry_->getCreator("AftFull", "1", "ai.aftexport");
  }

 private:
  std::unique_ptr<SharedLibrary> runtime_, plugins_;  // one of the two
  IPluginRegistry* registry_ = nullptr;
  void* library_ = nullptr;
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
