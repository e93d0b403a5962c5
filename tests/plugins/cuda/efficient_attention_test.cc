// Efficient Attention against its formula.

#include "changed_inputs.h"
#include "heads.h"

static int check(Problem& problem, bool softmax, float scale) {
  const Case& c = problem.c;
  const AftCudaEfficientAttention call{problem.sequence, softmax ? AFT_CUDA_SOFTMAX : AFT_CUDA_SCALING, c.heads,
                                       scale};
  const auto normalization = softmax ? oracle::Normalization::kSoftmax : oracle::Normalization::kScaling;
  return problem.check(
      call, aft_cuda_efficient_attention_workspace, aft_cuda_efficient_attention,
      [&](const oracle::Document& d) { return oracle::efficient_attention(d, {d, c.heads}, normalization, scale); });
}

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  return check(problem, c.draw(3, 30) > 0, c.draw(2, 31) ? 1.0f : 0.37f);
}

// Keys whose product with log2(e) rounds by more than their spread: all of them, or those from one token on.
static int check_large_keys(const Bounds& bounds) {
  int failures = 0;
  for (AftCudaElement element : {AFT_CUDA_FLOAT32, AFT_CUDA_BFLOAT16})
    for (bool causal : {false, true}) {
      const Case c = short_document(200, element, causal, AFT_CUDA_NO_GATE);
      device::doing = "large keys, " + c.name();
      for (float large : {1e4f, 7.55e8f, -7.55e8f, -9.56e8f, 1e9f, 1e30f, -1e30f})
        for (int64_t from : {0, 1, 37, 130}) {
          Problem problem(c, bounds, c.channels);
          change_keys(problem, [&](int64_t i, float key) { return i / c.channels >= from ? large : key; });
          failures += check(problem, true, 1.0f);
        }
    }
  return failures;
}

int main(int argc, char** argv) {
  const int status = run_cases(
      argc, argv, [](const Case& c, const Bounds& bounds) { return with_more_widths(c, bounds, try_case); });
  if (status != EXIT_SUCCESS || argc < 4) return status;  // without bounds only accesses are counted
  return check_large_keys({{std::atof(argv[1]), std::atof(argv[2]), std::atof(argv[3])}}) ? EXIT_FAILURE : EXIT_SUCCESS;
}
