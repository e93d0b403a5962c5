// Fastformer against its formula.

#include "problem.h"

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  Numbers alpha, beta;
  const void* alpha_weight = problem.input(c.channels * c.heads, 0.5f, alpha);
  const void* beta_weight = problem.input(c.channels * c.heads, 0.5f, beta);
  const aft::Fastformer call{problem.sequence, alpha_weight, beta_weight, c.heads};
  return problem.check(
      call, aft_cuda_fastformer_workspace, aft_cuda_fastformer,
      [&](const oracle::Document& d) { return oracle::fastformer(d, c.heads, alpha.data(), beta.data()); });
}

// In place of some cases, documents of more chunks than one launch merges, and rows of which 32 or 16 fit a tile.
static int try_sizes(const Case& c, const Bounds& bounds) {
  Case own = c;
  if (c.tokens == 700 && c.element == Element::kFloat32) {
    own.tokens = 16500;
    own.batch = 1;
    own.lengths = {16490};
  } else if (!c.causal && c.tokens == 127 && c.channels == 64) {
    own.channels = 512;
    own.heads = 8 * c.heads;
    own.layout = Layout::kPacked;
  } else if (!c.causal && c.tokens == 65 && c.channels == 72) {
    own.channels = 576;
    own.heads = 12;
    own.layout = Layout::kPacked;
  }
  return try_case(own, bounds);
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, with_more_widths(try_sizes));
}
