// Attributes as the operators check them, by a table of the runtime's functions that gives one number.

#include "onnxruntime/checks.h"

#include <cmath>
#include <limits>
#include <string>

#include "support.h"

namespace {

float given = 0;

ort::Status* give(const ort::KernelInfo*, const char*, float* number) {
  *number = given;
  return nullptr;
}

// Returns the error, empty where the number is taken.
std::string refusal_of(float eps) {
  constexpr int kFloatAttribute = 85;  // its place, as ort_api.h has it
  void (*table[278])() = {};
  table[kFloatAttribute] = reinterpret_cast<void (*)()>(give);
  given = eps;
  try {
    const float read = ops::read_eps({reinterpret_cast<const ort::Api&>(table), nullptr}, 1e-6f);
    expect(read == eps, "eps " + std::to_string(eps) + " is read as " + std::to_string(read));
    return "";
  } catch (const ort::Error& error) {
    return error.what();
  }
}

void check_eps() {
  for (float eps : {0.0f, std::numeric_limits<float>::denorm_min(), 1e-6f, std::numeric_limits<float>::max()})
    expect(refusal_of(eps).empty(), "eps " + std::to_string(eps) + " is refused");
  const float infinity = std::numeric_limits<float>::infinity(), not_a_number = std::nanf("");
  for (const auto& [eps, text] : {std::pair<float, const char*>{-0.5f, "-0.5"},
                                  {infinity, "inf"},
                                  {-infinity, "-inf"},
                                  {not_a_number, "nan"}}) {
    const std::string expected = std::string("eps is ") + text + ", expected a finite number of at least 0";
    const std::string found = refusal_of(eps);
    expect(found == expected, "expected the error \"" + expected + "\", got \"" + found + "\"");
  }
}

}  // namespace

int main() {
  check_eps();
  std::printf("%d failures\n", failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
