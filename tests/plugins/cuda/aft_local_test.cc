// AFT-local against its definition.

#include "gate.h"
#include "problem.h"

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) {
    const int64_t windows[] = {1, 2, 3, 5, 12, 33, 64, 130};
    const int64_t window = windows[c.draw(8, 30)], left = window - 1, right = c.causal ? 0 : left;
    const int64_t band_rows = c.draw(2, 31) ? c.tokens : 1, width = left + right + 1;
    Problem problem(c, bounds, c.channels);
    Numbers band;
    const void* data = problem.input(band_rows * width, c.range(), band);
    const AftCudaAftLocal call{problem.sequence, c.gate, data, band_rows, window};
    return problem.check(call, aft_cuda_aft_local_workspace, aft_cuda_aft_local,
                         [&](int64_t b, int64_t t, int64_t channel) {
                           const auto logit = [&](int64_t u) {
                             const int64_t j = u - t + left;
                             const double bias = j < 0 || j >= width ? 0.0 : band[(band_rows == 1 ? 0 : t * width) + j];
                             return problem.key(b, u, channel) + bias;
                           };
                           double maximum = -INFINITY, numerator = 0.0, denominator = 0.0;
                           for (int64_t u = 0; u < problem.visible(b, t); ++u) maximum = std::max(maximum, logit(u));
                           for (int64_t u = 0; u < problem.visible(b, t); ++u) {
                             const double weight = std::exp(logit(u) - maximum);
                             numerator += weight * problem.value(b, u, channel);
                             denominator += weight;
                           }
                           return gate(c.gate, problem.query(b, t, channel)) * numerator / denominator;
                         });
  });
}
