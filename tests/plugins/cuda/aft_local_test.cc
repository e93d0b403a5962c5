// AFT-local against its formula.

#include "problem.h"

static int check(Problem& problem, int64_t window, int64_t band_rows) {
  const Case& c = problem.c;
  const int64_t width = c.causal ? window : 2 * window - 1;
  Numbers band;
  const void* data = problem.input(band_rows * width, c.range(), band);
  const aft::AftLocal call{problem.sequence, c.gate, 0.0f, data, band_rows, window};
  return problem.check(call, aft_cuda_aft_local_workspace, aft_cuda_aft_local, [&](const oracle::Document& d) {
    return oracle::aft_local(d, formula_gate(c.gate), band.data(), band_rows, window);
  });
}

static int try_case(const Case& c, const Bounds& bounds) {
  const int64_t windows[] = {1, 2, 3, 5, 12, 33, 64, 130};
  const int64_t window = windows[c.draw(8, 30)];
  Problem problem(c, bounds, c.channels);
  return check(problem, window, c.draw(2, 31) ? c.tokens : 1);
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, try_case, [](const Bounds& bounds) {
    return check_later_values(64, 1, bounds, [](Problem& problem) { return check(problem, 12, 1); });
  });
}
