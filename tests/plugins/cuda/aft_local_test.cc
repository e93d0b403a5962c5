// AFT-local against its formula.

#include "changed_inputs.h"
#include "gate.h"

static int check(Problem& problem, int64_t window, int64_t band_rows) {
  const Case& c = problem.c;
  const int64_t width = c.causal ? window : 2 * window - 1;
  Numbers band;
  const void* data = problem.input(band_rows * width, c.range(), band);
  const AftCudaAftLocal call{problem.sequence, c.gate, data, band_rows, window};
  return problem.check(call, aft_cuda_aft_local_workspace, aft_cuda_aft_local, [&](const oracle::Document& d) {
    return oracle::aft_local(d, gate(c.gate), band.data(), band_rows, window);
  });
}

static int try_case(const Case& c, const Bounds& bounds) {
  const int64_t windows[] = {1, 2, 3, 5, 12, 33, 64, 130};
  const int64_t window = windows[c.draw(8, 30)];
  Problem problem(c, bounds, c.channels);
  return check(problem, window, c.draw(2, 31) ? c.tokens : 1);
}

int main(int argc, char** argv) {
  const int status = run_cases(argc, argv, try_case);
  if (status != EXIT_SUCCESS || argc < 4) return status;  // without bounds only accesses are counted
  const Bounds bounds{{std::atof(argv[1]), std::atof(argv[2]), std::atof(argv[3])}};
  const auto check_window = [](Problem& problem) { return check(problem, 12, 1); };
  return check_later_values(64, 1, bounds, check_window) ? EXIT_FAILURE : EXIT_SUCCESS;
}
