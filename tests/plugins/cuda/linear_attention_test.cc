// Linear attention against its formula.

#include "heads.h"

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  const auto map = static_cast<AftCudaFeatureMap>(c.draw(2, 30));
  // relu may leave no weight above 0, and then eps alone is the denominator; below 1e-20 it counts as that.
  const float eps = c.draw(2, 31) ? 1e-6f : map == AFT_CUDA_RELU ? 1e-30f : 0.5f;
  const AftCudaLinearAttention call{problem.sequence, map, c.heads, eps};
  const auto feature_map = map == AFT_CUDA_RELU ? oracle::FeatureMap::kRelu : oracle::FeatureMap::kElu;
  return problem.check(
      call, aft_cuda_linear_attention_workspace, aft_cuda_linear_attention,
      [&](const oracle::Document& d) { return oracle::linear_attention(d, {d, c.heads}, feature_map, eps); });
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) { return with_more_widths(c, bounds, try_case); });
}
