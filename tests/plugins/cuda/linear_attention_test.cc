// Linear attention against its formula.

#include "problem.h"

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  const auto map = static_cast<aft::FeatureMap>(c.draw(2, 30));
  // relu may leave no weight above 0, and then eps alone is the denominator; below 1e-20 it counts as that.
  const float eps = c.draw(2, 31) ? 1e-6f : map == aft::FeatureMap::kRelu ? 1e-30f : 0.5f;
  const aft::LinearAttention call{{problem.sequence, c.heads, 0, 0, c.tokens, nullptr}, map, {}, eps};
  return problem.check(
      call, aft_cuda_linear_attention_workspace, aft_cuda_linear_attention,
      [&](const oracle::Document& d) {
        return oracle::linear_attention(d, {d, c.heads}, static_cast<oracle::FeatureMap>(map), eps);
      });
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, with_more_widths(try_case));
}
