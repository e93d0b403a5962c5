// Efficient Attention against its formula.

#include "heads.h"

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  const bool softmax = c.draw(3, 30) > 0;
  const float scale = c.draw(2, 31) ? 1.0f : 0.37f;
  const AftCudaEfficientAttention call{problem.sequence, softmax ? AFT_CUDA_SOFTMAX : AFT_CUDA_SCALING, c.heads,
                                       scale};
  const auto normalization = softmax ? oracle::Normalization::kSoftmax : oracle::Normalization::kScaling;
  return problem.check(
      call, aft_cuda_efficient_attention_workspace, aft_cuda_efficient_attention,
      [&](const oracle::Document& d) { return oracle::efficient_attention(d, {d, c.heads}, normalization, scale); });
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) { return with_more_widths(c, bounds, try_case); });
}
