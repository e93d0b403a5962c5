// Efficient Attention against its definition.

#include "heads.h"

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  const bool softmax = c.draw(3, 30) > 0;
  const float scale = c.draw(2, 31) ? 1.0f : 0.37f;
  const AftCudaEfficientAttention call{problem.sequence, softmax ? AFT_CUDA_SOFTMAX : AFT_CUDA_SCALING, c.heads,
                                       scale};
  const int64_t width = c.channels / c.heads;
  // Sums over the keys that count so far, by channel and key channel of its head. exp of +-100 needs no maximum.
  std::vector<double> numerators(c.channels * width), denominators(c.channels);
  int64_t seen = 0;
  const auto add_keys = [&](int64_t b, int64_t visible) {
    for (; seen < visible; ++seen)
      for (int64_t channel = 0; channel < c.channels; ++channel) {
        const double own = problem.key(b, seen, channel);
        denominators[channel] += softmax ? std::exp(own) : 1.0;
        for (int64_t k = 0; k < width; ++k) {
          const double key = problem.key(b, seen, channel / width * width + k);
          numerators[channel * width + k] += (softmax ? std::exp(key) : key) * problem.value(b, seen, channel);
        }
      }
  };
  return problem.check(call, aft_cuda_efficient_attention_workspace, aft_cuda_efficient_attention,
                       [&](int64_t b, int64_t t, int64_t channel) {
                         if (t == 0 && channel == 0) {
                           std::fill(numerators.begin(), numerators.end(), 0.0);
                           std::fill(denominators.begin(), denominators.end(), 0.0);
                           seen = 0;
                         }
                         add_keys(b, problem.visible(b, t));
                         const int64_t first = channel / width * width;
                         double result = 0.0, sum = 0.0;
                         for (int64_t k = 0; k < width; ++k) {
                           const double query = problem.query(b, t, first + k);
                           const double weight = softmax ? std::exp(query) : query;
                           result += weight * numerators[channel * width + k] / denominators[first + k];
                           sum += weight;
                         }
                         result *= softmax ? scale / sum : scale;
                         // Scaling multiplies three numbers of the inputs' size.
                         const double most = c.element == AFT_CUDA_FLOAT16 ? 65504.0 : INFINITY;
                         return std::clamp(result, -most, most);
                       });
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) { return with_more_widths(c, bounds, try_case); });
}
