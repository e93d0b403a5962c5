// AFT-local against its formula.

#include "gate.h"
#include "problem.h"

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) {
    const int64_t windows[] = {1, 2, 3, 5, 12, 33, 64, 130};
    const int64_t window = windows[c.draw(8, 30)], width = c.causal ? window : 2 * window - 1;
    const int64_t band_rows = c.draw(2, 31) ? c.tokens : 1;
    Problem problem(c, bounds, c.channels);
    Numbers band;
    const void* data = problem.input(band_rows * width, c.range(), band);
    const AftCudaAftLocal call{problem.sequence, c.gate, data, band_rows, window};
    return problem.check(call, aft_cuda_aft_local_workspace, aft_cuda_aft_local, [&](const oracle::Document& d) {
      return oracle::aft_local(d, gate(c.gate), band.data(), band_rows, window);
    });
  });
}
