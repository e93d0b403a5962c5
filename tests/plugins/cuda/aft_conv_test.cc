// AFT-conv against its definition.

#include "gate.h"
#include "problem.h"

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) {
    const int64_t some_taps[] = {1, 2, 3, 4, 7, 8, 9, 31, 64, 127, 150};
    const int64_t taps = some_taps[c.draw(11, 30)], left = c.causal ? taps - 1 : (taps - 1) / 2;
    const int64_t heads = c.draw(8, 31) ? c.heads : c.channels, width = c.channels / heads;
    Problem problem(c, bounds, heads);
    Numbers filter;
    // exp of large ones, relative to the largest, is 0 in float32.
    const void* data = problem.input(heads * taps, 1.2f * c.range(), filter);
    const AftCudaAftConv call{problem.sequence, c.gate, data, heads, taps};
    return problem.check(call, aft_cuda_aft_conv_workspace, aft_cuda_aft_conv,
                         [&](int64_t b, int64_t t, int64_t channel) {
                           const int64_t head = channel / width;
                           const auto logit = [&](int64_t u) {
                             const int64_t j = u - t + left;
                             return problem.key(b, u, head) + (j < 0 || j >= taps ? 0.0 : filter[head * taps + j]);
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
