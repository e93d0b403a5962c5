// aftexport_describe_choice: the method that this library chooses, for programs that show it.

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "cpu/methods/choice.h"

namespace {

aft::Precision precision_of(const std::string& name) {
  if (name == "bf16") return aft::Precision::kBfloat16;
  if (name == "int8") return aft::Precision::kInt8;
  if (name == "fp32") return aft::Precision::kFloat32;
  if (name == "fp16") return aft::Precision::kFloat16;
  throw std::domain_error("expected the precision fp32, fp16, bf16 or int8, got " + name);
}

// Returns the length of the whole text, of which only the beginning may fit.
int64_t copy(const std::string& from, char* text, int64_t size) {
  const size_t fitting = std::min(from.size(), static_cast<size_t>(size) - 1);
  std::memcpy(text, from.data(), fitting);
  text[fitting] = '\0';
  return static_cast<int64_t>(from.size());
}

}  // namespace

// Writes the JSON of aft::describe_choice() and a zero byte to `text`, of `size` >= 1 bytes. Returns the length of the
// JSON, which is cut if that is not below `size`. On failure it writes the reason and returns a code:
//   -1  an environment variable names an unknown method or instruction set
//   -2  any other failure
extern "C" __attribute__((visibility("default"))) int64_t aftexport_describe_choice(const char* precision,
                                                                                    int64_t width, char* text,
                                                                                    int64_t size) {
  try {
    return copy(aft::describe_choice(precision_of(precision), width), text, size);
  } catch (const std::invalid_argument& error) {
    copy(error.what(), text, size);
    return -1;
  } catch (const std::exception& error) {
    copy(error.what(), text, size);
    return -2;
  }
}
