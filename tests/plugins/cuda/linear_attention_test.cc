// Linear attention against its definition.

#include "heads.h"

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  const auto map = static_cast<AftCudaFeatureMap>(c.draw(2, 30));
  // relu may leave no weight above 0, and then eps alone is the denominator; below 1e-20 it counts as that.
  const float eps = c.draw(2, 31) ? 1e-6f : map == AFT_CUDA_RELU ? 1e-30f : 0.5f;
  const AftCudaLinearAttention call{problem.sequence, map, c.heads, eps};
  const int64_t width = c.channels / c.heads;
  const auto feature = [map](double x) {
    return map == AFT_CUDA_RELU ? std::max(x, 0.0) : x > 0.0 ? x + 1.0 : std::exp(x);
  };
  // The weights of one row, shared by the channels of a head.
  std::vector<double> weights(c.tokens);
  double denominator = 0.0;
  return problem.check(call, aft_cuda_linear_attention_workspace, aft_cuda_linear_attention,
                       [&](int64_t b, int64_t t, int64_t channel) {
                         const int64_t first = channel / width * width, visible = problem.visible(b, t);
                         if (channel == first) {
                           denominator = std::max(eps, 1e-20f);
                           for (int64_t u = 0; u < visible; ++u) {
                             weights[u] = 0.0;
                             for (int64_t k = first; k < first + width; ++k)
                               weights[u] += feature(problem.query(b, t, k)) * feature(problem.key(b, u, k));
                             denominator += weights[u];
                           }
                         }
                         double numerator = 0.0;
                         for (int64_t u = 0; u < visible; ++u) numerator += weights[u] * problem.value(b, u, channel);
                         return numerator / denominator;
                       });
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) { return with_more_widths(c, bounds, try_case); });
}
