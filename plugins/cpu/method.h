// The methods that compute a matrix product. A precision is a bound on the error; a method is the arithmetic.
//
// A new method takes a line in Method and in kMethods, and a product in matmul/select_product.h.
#pragma once

namespace aft {

// The precision of the operands of a product. Sums and everything outside of the product are float32; products of
// integers are summed exactly first. A later precision allows a larger error.
enum class Precision {
  kFloat32,
  kFloat16,  // the CPU kernels compute in float32 instead
  kBfloat16,
  kInt8,
};

// In the order that decides between methods of nearly the same time: by error, the smallest first.
enum class Method { kFloat32, kInt16, kBfloat16, kAmxBfloat16, kInt8, kAmxInt8 };

struct MethodFacts {
  Method method;
  const char* name;
  Precision finest;  // keeps the error bound of this precision and of all later ones
};

// Errors are relative to the largest result, at 700 products a sum; tests/plugins/native/encoder_test.cc checks them.
constexpr MethodFacts kMethods[] = {
    {Method::kFloat32, "fp32", Precision::kFloat32},    // 1e-6
    {Method::kInt16, "int16", Precision::kBfloat16},    // 1e-3, weights scaled by column, rows of the left side by row
    {Method::kBfloat16, "bf16", Precision::kBfloat16},  // 4e-3
    {Method::kAmxBfloat16, "amx_bf16", Precision::kBfloat16},
    {Method::kInt8, "int8", Precision::kInt8},  // 1.2e-2, scaled as int16
    {Method::kAmxInt8, "amx_int8", Precision::kInt8},
};
constexpr int kMethodCount = sizeof kMethods / sizeof kMethods[0];

// Methods that keep a precision's bound on this machine, the preferred first. None stands for float32.
struct MethodOrder {
  Method methods[kMethodCount];
  int count;
};

}  // namespace aft
