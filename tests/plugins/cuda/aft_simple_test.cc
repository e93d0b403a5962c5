// AFT-simple against its formula.

#include "problem.h"

static int check(Problem& problem, const std::function<oracle::Values(const oracle::Document&)>& formula) {
  const aft::AftSimple call{problem.sequence, problem.c.gate, 0, 0.0f};
  return problem.check(call, aft_cuda_aft_simple_workspace, aft_cuda_aft_simple, formula);
}

static int check(Problem& problem) {
  return check(problem, [&](const oracle::Document& d) { return oracle::aft_simple(d, formula_gate(problem.c.gate)); });
}

// References that round by more than the keys differ, and a mask by value that no weight may come from.
static int check_large_keys(const Bounds& bounds) {
  int failures = 0;
  for (Element element : {Element::kFloat32, Element::kFloat16, Element::kBfloat16})
    for (bool causal : {false, true}) {
      const Case c = short_document(700, element, causal, Gate::kSigmoid);
      device::doing = "large keys, " + c.name();
      for (float offset : {1e4f, -1e4f, 1e6f, -1e8f}) {
        if (element == Element::kFloat16 && std::fabs(offset) > 6e4f) continue;
        Problem problem(c, bounds, c.channels);
        const float spread = std::max(1.0f, std::fabs(offset) / 1e6f);
        change_keys(problem, [&](int64_t, float key) { return offset + spread * key; });
        failures += check(problem);
      }
      if (element == Element::kFloat16) continue;
      Problem problem(c, bounds, c.channels);
      change_keys(problem, [&](int64_t i, float key) {
        const int64_t t = i / c.channels, channel = i % c.channels;
        return t > 0 && t < 600 ? -1e30f * static_cast<float>(channel + 1) : key;
      });
      failures += check(problem);
    }
  return failures;
}

// More chunks than threads that share their records, by running sums, since the formula takes T x T steps.
static int check_many_chunks(const Bounds& bounds) {
  int failures = 0;
  for (bool causal : {false, true}) {
    const Case c = short_document(16385, Element::kFloat32, causal, Gate::kNone);
    device::doing = "many chunks, " + c.name();
    Problem problem(c, bounds, c.channels);
    failures += check(problem, [](const oracle::Document& d) {
      oracle::Values means(d.tokens * d.channels);
      for (int64_t channel = 0; channel < d.channels; ++channel) {
        double numerator = 0.0, denominator = 0.0;
        for (int64_t t = 0; t < d.length; ++t) {
          const int64_t i = t * d.channels + channel;
          numerator += std::exp(d.key[i]) * d.value[i];
          denominator += std::exp(d.key[i]);
          means[i] = numerator / denominator;
        }
        for (int64_t t = 0; t < d.length && !d.causal; ++t)
          means[t * d.channels + channel] = numerator / denominator;
      }
      return means;
    });
  }
  return failures;
}

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  return check(problem);
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, try_case,
                   [](const Bounds& bounds) { return check_large_keys(bounds) + check_many_chunks(bounds); });
}
