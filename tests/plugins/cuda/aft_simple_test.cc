// AFT-simple against its formula.

#include "gate.h"
#include "problem.h"

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) {
    Problem problem(c, bounds, c.channels);
    const AftCudaAftSimple call{problem.sequence, c.gate};
    return problem.check(call, aft_cuda_aft_simple_workspace, aft_cuda_aft_simple,
                         [&](const oracle::Document& d) { return oracle::aft_simple(d, gate(c.gate)); });
  });
}
