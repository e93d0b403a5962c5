// AFT-full against its formula.

#include "aft_full.h"
#include "problem.h"

static int check(Problem& problem, const AftFull& formula) {
  return problem.check(formula.call, aft_cuda_aft_full_workspace, aft_cuda_aft_full, formula);
}

// References of keys and of rows of the bias that round by more than the numbers differ.
static int check_large_references(const Bounds& bounds) {
  int failures = 0;
  for (Element element : {Element::kFloat32, Element::kFloat16, Element::kBfloat16})
    for (float offset : {1e4f, -1e4f, 1e6f, 1e20f})
      for (int index = 0; index < 6; ++index) {
        if (element == Element::kFloat16 && std::fabs(offset) > 6e4f) continue;
        const Case c = short_document(130, element, index % 2 == 1, Gate::kSigmoid, index);
        device::doing = "references of " + std::to_string(offset) + ", " + c.name();
        Problem problem(c, bounds, c.channels);
        AftFull formula(problem);
        const auto shifted = [&](int64_t, float x) { return x + offset; };
        change_keys(problem, shifted);
        const auto count = static_cast<int64_t>(formula.bias.size());
        change_numbers(formula.call.position_bias, formula.bias, count, element, shifted);
        failures += check(problem, formula);
      }
  return failures;
}

static int try_case(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  return check(problem, AftFull(problem));
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, try_case, check_large_references);
}
