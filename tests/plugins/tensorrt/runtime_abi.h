// What a TensorRT runtime shows those who load plugins with it: the loggers of TensorRT 10 and 11 and the plugin
// registry of 11, each declared as its headers do. With headers (AFT_NVINFER_HEADERS), only what they have.
#pragma once

#include "nvinfer.h"

#ifndef AFT_NVINFER_HEADERS
namespace nvinfer1 {

class IErrorRecorder;
class IPluginResource;

// As TensorRT 10 has them.
class ILogger {
 public:
  enum class Severity : int32_t { kERROR = 1 };
  virtual void log(Severity, const AsciiChar* message) noexcept = 0;
  virtual ~ILogger() = default;
};
class ILoggerFinder {
 public:
  virtual ILogger* findLogger() = 0;
  virtual ~ILoggerFinder() = default;
};

// As TensorRT 11 has them.
namespace v_1_0 {
class ILogger : public IVersionedInterface {
 public:
  enum class Severity : int32_t { kERROR = 1 };
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
  virtual void log(Severity, const AsciiChar* message) noexcept = 0;
};
class ILoggerFinder : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILoggerFinder", 1, 0}; }
  virtual ILogger* findLogger() = 0;
};
}  // namespace v_1_0

class IPluginRegistry {
 public:
  virtual ~IPluginRegistry() noexcept = 0;
  virtual void setErrorRecorder(IErrorRecorder*) noexcept = 0;
  virtual IErrorRecorder* getErrorRecorder() const noexcept = 0;
  virtual bool isParentSearchEnabled() const = 0;
  virtual void setParentSearchEnabled(bool) = 0;
  virtual void* loadLibrary(const AsciiChar* path) noexcept = 0;
  virtual void deregisterLibrary(void*) noexcept = 0;
  virtual bool registerCreator(IPluginCreatorInterface&, const AsciiChar* space) noexcept = 0;
  virtual IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
  virtual IPluginCreatorInterface* getCreator(const AsciiChar* name, const AsciiChar* version,
                                              const AsciiChar* space) noexcept = 0;
  virtual bool deregisterCreator(const IPluginCreatorInterface&) noexcept = 0;
  virtual IPluginResource* acquirePluginResource(const AsciiChar* key, IPluginResource*) noexcept = 0;
  virtual int32_t releasePluginResource(const AsciiChar* key) noexcept = 0;
  virtual IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* count) noexcept = 0;
};

}  // namespace nvinfer1
#endif
