// AFT-simple against its definition.

#include "gate.h"
#include "problem.h"

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) {
    Problem problem(c, bounds, c.channels);
    const AftCudaAftSimple call{problem.sequence, c.gate};
    return problem.check(call, aft_cuda_aft_simple_workspace, aft_cuda_aft_simple,
                         [&](int64_t b, int64_t t, int64_t channel) {
                           double maximum = -INFINITY, numerator = 0.0, denominator = 0.0;
                           for (int64_t u = 0; u < problem.visible(b, t); ++u)
                             maximum = std::max(maximum, problem.key(b, u, channel));
                           for (int64_t u = 0; u < problem.visible(b, t); ++u) {
                             const double weight = std::exp(problem.key(b, u, channel) - maximum);
                             numerator += weight * problem.value(b, u, channel);
                             denominator += weight;
                           }
                           return gate(c.gate, problem.query(b, t, channel)) * numerator / denominator;
                         });
  });
}
