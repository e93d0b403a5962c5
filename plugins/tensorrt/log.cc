#include "log.h"

#include <cxxabi.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <typeinfo>

namespace {

constexpr int32_t kErrorSeverity = 1;  // ILogger::Severity::kERROR

std::atomic<void*> logger_finder{nullptr};

using Function = void (*)();
const void* const* virtual_table(const void* object) { return *static_cast<const void* const* const*>(object); }

bool derives_from(const std::type_info* type, const char* name) {
  if (std::strcmp(type->name(), name) == 0) return true;
  const auto* single = dynamic_cast<const abi::__si_class_type_info*>(type);
  return single && derives_from(single->__base_type, name);
}

// ILoggerFinder and ILogger have one function each. Up to TensorRT 10 it comes first in the virtual table; then
// both became versioned interfaces, whose four functions come before. Which of the two a runtime has can only
// be read from the type of the finder it gave. -1: from no runtime we know.
int slot_in_virtual_table(const void* finder) {
  const auto* type = static_cast<const std::type_info*>(virtual_table(finder)[-1]);
  if (!type) return -1;
  return derives_from(type, "N8nvinfer119IVersionedInterfaceE") ? 4 : 0;
}

template <class Signature>
Signature* function(const void* object, int slot) {
  return reinterpret_cast<Signature*>(reinterpret_cast<Function>(const_cast<void*>(virtual_table(object)[slot])));
}

}  // namespace

void log_error(const std::string& message) noexcept {
  if (void* finder = logger_finder)
    if (const int slot = slot_in_virtual_table(finder); slot >= 0)
      if (void* logger = function<void*(void*)>(finder, slot)(finder)) {
        function<void(void*, int32_t, const char*)>(logger, slot)(logger, kErrorSeverity, message.c_str());
        return;
      }
  std::fprintf(stderr, "%s\n", message.c_str());
}

// TensorRT calls this once after it has loaded the library, with an ILoggerFinder.
extern "C" __attribute__((visibility("default"))) void setLoggerFinder(void* finder) { logger_finder = finder; }
