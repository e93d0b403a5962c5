// exp, sigmoid, tanh and gelu of float32 against those of float64: all over their range, at its edges, and beyond. And the
// ends of float16.

#include "math_functions.h"

#include <algorithm>
#include <limits>

#include "support.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();

const aft::MathFunctions& functions() {
  const std::string isa = aft::instruction_set();
#if defined(__x86_64__)
  if (isa == "avx2") return aft::avx2::math_functions;
  if (isa == "avx512") return aft::avx512::math_functions;
#endif
  return aft::baseline::math_functions;
}

// Between -limit and limit: every size of number, and an even grid.
Numbers range(float limit) {
  Numbers values = {0.0f, -0.0f, limit, -limit};
  for (float size = limit; size > 1e-30f; size *= 0.9997f)
    for (float value : {size, -size}) values.push_back(value);
  constexpr int kGrid = 1 << 18;
  for (int i = -kGrid; i <= kGrid; ++i) values.push_back(limit * static_cast<float>(i) / kGrid);
  return values;
}

// `tolerance(x, exact)` is how far the result may be off.
template <class Exact, class Tolerance>
void check(const char* name, aft::MathFunctions::Function function, const Numbers& x, const Exact& exact,
           const Tolerance& tolerance) {
  Numbers y(x.size());
  function(x.data(), static_cast<int64_t>(x.size()), y.data());
  double worst = 0.0;
  size_t at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = exact(static_cast<double>(x[i]));
    const double error = std::fabs(y[i] - expected) / tolerance(static_cast<double>(x[i]), expected);
    if (!(error <= worst)) worst = error, at = i;  // NaN too
  }
  expect(worst <= 1.0, std::string(name) + " of " + std::to_string(x[at]) + " is " + std::to_string(y[at]) + ", " +
                           std::to_string(worst) + " times as far off as it may be");
}

float one(aft::MathFunctions::Function function, float x) {
  float y;
  function(&x, 1, &y);
  return y;
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double gelu(double x) { return x * 0.5 * std::erfc(-x / std::sqrt(2.0)); }
double gelu_tanh(double x) { return x * sigmoid(2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)); }

}  // namespace

int main() {
  if (instructions_missing()) return kSkipped;
  const aft::MathFunctions& f = functions();
  const auto relative = [](double x, double exact) { return (1.5e-7 + 2.7e-9 * std::fabs(x)) * std::fabs(exact); };

  Numbers x = range(88.0f);
  x.erase(std::remove_if(x.begin(), x.end(), [](float value) { return value < -87.3f; }), x.end());
  check("exp", f.exp, x, [](double v) { return std::exp(v); }, relative);
  expect(one(f.exp, 0.0f) == 1.0f, "exp(0) is not 1");
  for (float low : {-87.4f, -95.0f, -104.0f, -1e30f, -kInfinity})
    expect(one(f.exp, low) >= 0.0f && one(f.exp, low) <= 1.2e-38f, "exp(" + std::to_string(low) + ") is not next to 0");
  expect(one(f.exp, -kInfinity) == 0.0f, "exp(-infinity) is not 0");

  check("sigmoid", f.sigmoid, range(87.0f), sigmoid, [&](double v, double exact) { return 2.0 * relative(v, exact); });
  check("sigmoid", f.sigmoid, {-1e30f, -kInfinity, -200.0f, 200.0f, 1e30f, kInfinity}, sigmoid,
        [](double, double) { return 1e-38; });

  const auto tiny = [](double, double exact) { return 4e-7 * std::fabs(exact) + 1e-37; };
  check("tanh", f.tanh, range(100.0f), [](double v) { return std::tanh(v); }, tiny);
  check("tanh", f.tanh, {-kInfinity, -1e30f, 1e30f, kInfinity}, [](double v) { return std::tanh(v); }, tiny);

  const auto largest_of_one = [](double v) { return std::max(1.0, std::fabs(v)); };
  check("gelu", f.gelu, range(100.0f), gelu, [&](double v, double) { return 1.6e-7 * largest_of_one(v); });
  check("coarse gelu", f.coarse_gelu, range(100.0f), gelu, [&](double v, double) { return 1.2e-5 * largest_of_one(v); });
  const auto close = [&](double v, double) { return 4e-7 * largest_of_one(v); };
  check("gelu by tanh", f.gelu_tanh, range(100.0f), gelu_tanh, close);
  check("silu", f.silu, range(100.0f), [](double v) { return v * sigmoid(v); }, close);
  check("silu, far", f.silu, {-1e4f, 1e4f, 1e30f}, [](double v) { return v > 0 ? v : 0.0; }, close);
  const auto equal = [](double, double) { return std::numeric_limits<double>::min(); };
  check("relu", f.relu, range(100.0f), [](double v) { return std::max(0.0, v); }, equal);
  for (const auto& function : {f.gelu, f.coarse_gelu})
    expect(one(function, -kInfinity) == 0.0f && one(function, -1e30f) == 0.0f, "gelu far below zero is not 0");

  for (float sign : {1.0f, -1.0f}) {
    for (float held : {65504.0f, 65519.996f})
      expect(one(f.half, sign * held) == sign * 65504.0f, "the largest float16 is not held");
    for (float beyond : {65520.0f, 131072.0f, 9e9f, std::numeric_limits<float>::max(), kInfinity})
      expect(one(f.half, sign * beyond) == sign * kInfinity, "a number beyond float16 is not infinite");
  }

  for (float nan : {kNaN, -kNaN})
    for (const auto& function : {f.exp, f.sigmoid, f.tanh, f.gelu, f.coarse_gelu, f.gelu_tanh, f.relu, f.silu, f.half})
      expect(std::isnan(one(function, nan)), "a function hides what is no number");
  std::printf("%s, %d failures\n", aft::instruction_set(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
