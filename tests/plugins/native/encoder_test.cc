// The encoder's operators on threads of our own and buffers of exact size, for the sanitizers. Values are checked
// against definitions by test_encoder_ops.py; here results must be finite and the same for any number of threads.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "encoder.h"
#include "support.h"

namespace {

struct Shape {
  int64_t rows, width, other;
};

using Call = std::function<void(float* output, const aft::Parallel&)>;

void check(const std::string& what, int64_t outputs, const Call& call) {
  Numbers first;
  for (int threads : {1, 3}) {
    Numbers output(outputs, NAN);
    call(output.data(), {run_on_threads, &threads, 3});
    bool finite = true;
    for (float value : output) finite = finite && std::isfinite(value);
    expect(finite, what + " is not finite");
    if (threads == 1) first = output;
    expect(output == first, what + " depends on the number of threads");
  }
}

void check_all(const Shape& s, aft::Precision precision, float scale) {
  const std::string what = " on [" + std::to_string(s.rows) + ", " + std::to_string(s.width) + "] x " +
                           std::to_string(s.other) + " in precision " + std::to_string(static_cast<int>(precision));
  const Numbers x = numbers(s.rows * s.width, scale, 1), residual = numbers(s.rows * s.other, scale, 2);
  const Numbers norm_weight = numbers(s.width, 1, 3), norm_bias = numbers(s.width, 1, 4);
  const Numbers bias_in = numbers(s.other, 1, 5), bias_out = numbers(s.width, 1, 6);
  const aft::LayerNorm norm{norm_weight.data(), norm_bias.data(), 1e-5f};
  const auto weight_in = aft::pack_weight(numbers(s.width * s.other, scale, 7).data(), s.width, s.other, precision);
  const auto weight_out = aft::pack_weight(numbers(s.width * s.other, scale, 8).data(), s.other, s.width, precision);

  check("layer_norm_linear" + what, s.rows * s.other, [&](float* output, const aft::Parallel& parallel) {
    aft::layer_norm_linear({aft::Element::kFloat32, s.rows, x.data(), norm, weight_in.get(), bias_in.data(), output}, parallel);
  });
  check("layer_norm_feed_forward" + what, s.rows * s.width, [&](float* output, const aft::Parallel& parallel) {
    aft::layer_norm_feed_forward(
        {aft::Element::kFloat32, s.rows, x.data(), norm, weight_in.get(), bias_in.data(), weight_out.get(),
         bias_out.data(), output},
        parallel);
  });
  check("linear_residual" + what, s.rows * s.other, [&](float* output, const aft::Parallel& parallel) {
    aft::linear_residual({aft::Element::kFloat32, s.rows, x.data(), weight_in.get(), bias_in.data(), residual.data(),
                          output},
                         parallel);
  });
}

}  // namespace

int main() {
  const Shape shapes[] = {{1, 1, 1},     {5, 16, 16},    {13, 17, 33},    {12, 31, 65},
                          {300, 48, 24}, {50, 300, 530}, {25, 1100, 1090}};
  for (const Shape& shape : shapes)
    for (aft::Precision precision : {aft::Precision::kFloat32, aft::Precision::kBfloat16, aft::Precision::kInt8})
      for (float scale : {1.0f, 200.0f}) check_all(shape, precision, scale);
  std::printf("%s, %d failures\n", aft::product_instruction_set(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
