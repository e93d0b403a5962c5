// Tensors and results of the operators with a state, with the checks that their tests share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../oracles/mechanisms.h"
#include "guarded.h"
#include "random.h"
#include "support.h"

// A tensor as the kernel sees it and in double precision, and the same before the kernel ran.
struct Tensor {
  std::unique_ptr<Guarded> buffer;
  std::vector<char> before;
  oracle::Values values;

  const void* data() const { return buffer ? buffer->data() : nullptr; }
  const double* document(int64_t b, int64_t batch) const {
    return buffer ? values.data() + b * static_cast<int64_t>(values.size()) / batch : nullptr;
  }
};

// Tensors are aligned as a rule, but a kernel may not need it.
inline size_t shift(Random& random, aft::Element element) {
  return random.one_in(2) ? 0 : element_size(element) * random.between(1, 31);
}

inline Tensor tensor(Random& random, aft::Element element, int64_t count, const std::function<double()>& draw) {
  Numbers numbers(count);
  for (float& number : numbers) number = static_cast<float>(draw());
  Tensor made{nullptr, encode(numbers, element), {}};
  made.buffer = std::make_unique<Guarded>(made.before.size(), shift(random, element));
  std::copy(made.before.begin(), made.before.end(), made.buffer->data());
  made.values = decode(*made.buffer, element);
  return made;
}

// The rows of a [batch, tokens, width] tensor past the lengths become NaN.
inline void spoil_padding(Tensor& x, int64_t tokens, const std::vector<int64_t>& lengths) {
  const size_t row = x.before.size() / (lengths.size() * tokens);
  for (size_t b = 0; b < lengths.size(); ++b)
    for (int64_t t = lengths[b]; t < tokens; ++t) {
      std::memset(x.buffer->data() + (b * tokens + t) * row, '\xff', row);
      std::memset(x.before.data() + (b * tokens + t) * row, '\xff', row);
    }
}

inline void expect_unchanged(const Tensor& x, const std::string& what) {
  if (!x.buffer) return;
  expect(std::equal(x.before.begin(), x.before.end(), x.buffer->data()) && x.buffer->bands_untouched(),
         what + ": changed an input or what is around it");
}

// The largest difference of any number of a document's result, relative to the largest size in it and to `terms`.
inline double error_of(const double* actual, const oracle::Values& expected, double terms, aft::Element element) {
  double largest = terms, worst = 0;
  for (double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double most = element == aft::Element::kFloat16 ? 65504.0 : INFINITY;  // beyond it, both are infinite
    const double got = std::clamp(actual[i], -most, most), meant = std::clamp(expected[i], -most, most);
    if (!(std::abs(got - meant) <= worst)) worst = std::abs(got - meant);
    if (!std::isfinite(got)) return INFINITY;
  }
  return worst / std::max(largest, 1e-30);
}

struct Results {
  std::unique_ptr<Guarded> output, state;

  // Results of 8 MiB in float32 go past the cache, where they are aligned.
  static bool is_long(int64_t outputs) { return outputs >= 2 << 20; }

  Results(Random& random, aft::Element element, int64_t outputs, int64_t states)
      : output(std::make_unique<Guarded>(outputs * element_size(element),
                                         is_long(outputs) ? 0 : shift(random, element))),
        state(std::make_unique<Guarded>(states * element_size(element), shift(random, element))) {
    std::memset(output->data(), '\xff', output->size());
    std::memset(state->data(), '\xff', state->size());
  }
  void expect_bands(const std::string& what) const {
    expect(output->bands_untouched() && state->bands_untouched(), what + ": wrote outside of a result");
  }
  bool same_output_as(const Results& other) const {
    return std::memcmp(output->data(), other.output->data(), output->size()) == 0;
  }
  bool same_as(const Results& other) const {
    return same_output_as(other) && std::memcmp(state->data(), other.state->data(), state->size()) == 0;
  }
};

// Another number of threads for a second run.
inline int other_threads(int threads) { return 1 + threads % 3; }
