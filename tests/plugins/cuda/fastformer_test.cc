// Fastformer against its definition.

#include "heads.h"

// Softmax-weighted means of the rows of x, one softmax per head, over all keys or up to each row.
struct Pooling {
  const Case& c;
  int64_t width = c.channels / c.heads;

  // x and the result are [tokens, channels]; weight is [channels, heads].
  std::vector<double> operator()(const std::vector<double>& x, const Numbers& weight, int64_t length) const {
    std::vector<double> means(c.tokens * c.channels, 0.0), logits(length);
    for (int64_t head = 0; head < c.heads; ++head) {
      for (int64_t t = 0; t < length; ++t) {
        logits[t] = 0.0;
        for (int64_t k = 0; k < c.channels; ++k) logits[t] += x[t * c.channels + k] * weight[k * c.heads + head];
        logits[t] /= std::sqrt(static_cast<double>(width));
      }
      double maximum = -INFINITY, sum = 0.0;
      std::vector<double> total(width, 0.0);
      for (int64_t t = 0; t < length; ++t) {
        const double highest = std::max(maximum, logits[t]), kept = std::exp(maximum - highest);
        const double share = std::exp(logits[t] - highest);
        maximum = highest;
        sum = sum * kept + share;
        for (int64_t k = 0; k < width; ++k) {
          total[k] = total[k] * kept + share * x[t * c.channels + head * width + k];
          means[t * c.channels + head * width + k] = total[k] / sum;
        }
      }
      for (int64_t t = 0; t < length && !c.causal; ++t)
        for (int64_t k = 0; k < width; ++k) means[t * c.channels + head * width + k] = total[k] / sum;
    }
    return means;
  }
};

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  Numbers alpha, beta;
  const void* alpha_weight = problem.input(c.channels * c.heads, 0.5f, alpha);
  const void* beta_weight = problem.input(c.channels * c.heads, 0.5f, beta);
  const AftCudaFastformer call{problem.sequence, alpha_weight, beta_weight, c.heads};
  std::vector<double> global_key;
  return problem.check(call, aft_cuda_fastformer_workspace, aft_cuda_fastformer,
                       [&](int64_t b, int64_t t, int64_t channel) {
                         if (t == 0 && channel == 0) {
                           const Pooling pool{c};
                           std::vector<double> rows(c.tokens * c.channels);
                           for (int64_t i = 0; i < c.tokens * c.channels; ++i)
                             rows[i] = problem.query(b, i / c.channels, i % c.channels);
                           rows = pool(rows, alpha, c.lengths[b]);
                           for (int64_t i = 0; i < c.tokens * c.channels; ++i)
                             rows[i] *= problem.key(b, i / c.channels, i % c.channels);
                           global_key = pool(rows, beta, c.lengths[b]);
                         }
                         const double result = global_key[t * c.channels + channel] * problem.value(b, t, channel);
                         const double most = c.element == AFT_CUDA_FLOAT16 ? 65504.0 : INFINITY;
                         return std::clamp(result, -most, most);
                       });
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) { return with_more_widths(c, bounds, try_case); });
}
