// AFT-conv against its formula.

#include "problem.h"

// Two cases are so long that the scan of the sums outside the windows has two levels.
static Case lengthened(Case c) {
  if (c.tokens != 257 || c.channels != 8 || c.element != Element::kFloat32) return c;
  c.batch = 1;
  c.tokens = 4400;
  c.data = Data::kSmall;
  c.lengths = {4395};
  return c;
}

static int check(Problem& problem, int64_t heads, int64_t taps) {
  const Case& c = problem.c;
  Numbers filter;
  // exp of large ones, relative to the largest, is 0 in float32.
  const void* data = problem.input(heads * taps, 1.2f * c.range(), filter);
  const aft::AftConv call{problem.sequence, c.gate, 0.0f, data, heads, taps};
  return problem.check(call, aft_cuda_aft_conv_workspace, aft_cuda_aft_conv, [&](const oracle::Document& d) {
    return oracle::aft_conv(d, formula_gate(c.gate), heads, filter.data(), taps);
  });
}

static int try_case(const Case& drawn, const Bounds& bounds) {
  const Case c = lengthened(drawn);
  const int64_t some_taps[] = {1, 2, 3, 4, 7, 8, 9, 31, 64, 127, 150};
  const int64_t taps = some_taps[c.draw(11, 30)];
  const int64_t heads = c.draw(8, 31) ? c.heads : c.channels;
  Problem problem(c, bounds, heads);
  return check(problem, heads, taps);
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, try_case, [](const Bounds& bounds) {
    int failures = 0;
    for (int64_t channels : {64, 8})
      for (int64_t taps : {1, 9})
        failures += check_later_values(channels, 2, bounds, [&](Problem& problem) { return check(problem, 2, taps); });
    return failures;
  });
}
