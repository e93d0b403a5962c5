// AFT-full as it is defined, and the parameters only it has.
#pragma once

#include "gate.h"
#include "problem.h"

// One way of multiplying of those that the case's element allows, and a bias whose rows have a range of 2, 16,
// 80 or, with keys as large, 200: from what every precision is made for to what none can hold.
struct AftFull {
  Problem& problem;
  Numbers bias;
  int64_t width;
  AftCudaAftFull call;

  explicit AftFull(Problem& problem) : problem(problem) {
    const Case& c = problem.c;
    const AftCudaExpPrecision own =
        c.element == AFT_CUDA_FLOAT16 ? AFT_CUDA_EXP_FLOAT16 : AFT_CUDA_EXP_BFLOAT16;
    const AftCudaExpPrecision choices[] = {own, own, AFT_CUDA_EXP_BFLOAT16, AFT_CUDA_EXP_FLOAT32};
    const float ranges[] = {1.0f, 8.0f, 40.0f, c.range()};
    width = (c.tokens + 7) / 8 * 8 + c.draw(2, 21);
    call = {problem.sequence, c.gate, problem.input((c.tokens - 1) * width + c.tokens, ranges[c.draw(4, 22)], bias),
            width, c.element == AFT_CUDA_FLOAT32 ? AFT_CUDA_EXP_FLOAT32 : choices[c.draw(4, 23)]};
    fill(weights, c.tokens * c.tokens, [&](int64_t i) { return bias[i / c.tokens * width + i % c.tokens]; });
    fill(factors, c.batch * c.tokens * c.channels, [&](int64_t i) { return problem.key[i]; });
  }

  double operator()(int64_t b, int64_t t, int64_t channel) const {
    const Case& c = problem.c;
    double numerator = 0.0, denominator = 0.0;
    for (int64_t u = 0; u < problem.visible(b, t); ++u) {
      const double weight = weights[t * c.tokens + u] * factors[(b * c.tokens + u) * c.channels + channel];
      numerator += weight * problem.value(b, u, channel);
      denominator += weight;
    }
    return gate(c.gate, problem.query(b, t, channel)) * numerator / denominator;
  }

 private:
  // exp(w) and exp(K): within +-100 each, and so their products, are nothing to float64.
  template <class F>
  static void fill(std::vector<double>& exponentials, int64_t count, const F& f) {
    for (int64_t i = 0; i < count; ++i) exponentials.push_back(std::exp(f(i)));
  }
  std::vector<double> weights, factors;
};
