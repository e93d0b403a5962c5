// Efficient Attention against its formula.

#include "problem.h"

static int check(Problem& problem, bool softmax, float scale) {
  const Case& c = problem.c;
  const auto normalization = softmax ? aft::Normalization::kSoftmax : aft::Normalization::kScaling;
  const aft::EfficientAttention call{{problem.sequence, c.heads, 0, 0, c.tokens, nullptr}, normalization, scale};
  return problem.check(
      call, aft_cuda_efficient_attention_workspace, aft_cuda_efficient_attention,
      [&](const oracle::Document& d) {
        return oracle::efficient_attention(d, {d, c.heads}, static_cast<oracle::Normalization>(normalization), scale);
      });
}

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  return check(problem, c.draw(3, 30) > 0, c.draw(2, 31) ? 1.0f : 0.37f);
}

// Keys whose product with log2(e) rounds by more than their spread: all of them, or those from one token on.
static int check_large_keys(const Bounds& bounds) {
  int failures = 0;
  for (Element element : {Element::kFloat32, Element::kBfloat16})
    for (bool causal : {false, true}) {
      const Case c = short_document(200, element, causal, Gate::kNone);
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
  return run_cases(argc, argv, with_more_widths(try_case), check_large_keys);
}
