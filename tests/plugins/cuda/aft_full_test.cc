// AFT-full against its formula.

#include "aft_full.h"

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) {
    Problem problem(c, bounds, c.channels);
    const AftFull formula(problem);
    return problem.check(formula.call, aft_cuda_aft_full_workspace, aft_cuda_aft_full, formula);
  });
}
