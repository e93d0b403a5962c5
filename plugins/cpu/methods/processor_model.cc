// The model of the processor, under which its rates are kept.

#include <cstdio>
#include <string>

#include "methods/rate_file.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstring>
#endif

namespace aft {
namespace {

#if defined(__x86_64__)
// The brand, and the signature of family, model and stepping: a virtual machine may have a general brand.
std::string read_model() {
  char brand[49] = {};
  unsigned registers[4];
  for (unsigned part = 0; part < 3; ++part)
    if (__get_cpuid(0x80000002 + part, registers, registers + 1, registers + 2, registers + 3))
      std::memcpy(brand + 16 * part, registers, sizeof registers);
  unsigned signature = 0, b, c, d;
  __get_cpuid(1, &signature, &b, &c, &d);
  return std::string(brand) + ", signature " + std::to_string(signature);
}
#else
std::string read_model() {
  std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1", "r");
  char model[32] = "";
  const bool is_read = file && std::fscanf(file, "%31s", model) == 1;
  if (file) std::fclose(file);
  return is_read ? "midr " + std::string(model) : "unknown";
}
#endif

}  // namespace

const std::string& processor_model() {
  static const std::string model = [] {
    std::string printable;
    for (char c : read_model()) printable += c >= ' ' && c <= '~' && c != '"' && c != '\\' ? c : '_';
    return printable;
  }();
  return model;
}

}  // namespace aft
