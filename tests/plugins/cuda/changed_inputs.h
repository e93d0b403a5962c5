// Inputs that the table of cases does not have: changed after a problem was made of them.
#pragma once

#include "problem.h"

// A small document of 8 channels that is one token shorter than its row.
inline Case short_document(int64_t tokens, AftCudaElement element, bool causal, AftCudaGate gate, int index = 0) {
  return {index, 1, tokens, 8, 1, element, causal, gate, Data::kSmall, Layout::kPacked, {tokens - 1}};
}

// The first `count` numbers of a packed input become change(i, number), rounded to their type.
template <class Change>
void change_numbers(const void* data, Numbers& numbers, int64_t count, AftCudaElement element, const Change& change) {
  const size_t size = element_size(element);
  auto* const to = static_cast<unsigned char*>(const_cast<void*>(data));
  for (int64_t i = 0; i < count; ++i) {
    unsigned char bytes[4];
    encode(change(i, static_cast<float>(numbers[i])), element, bytes);
    device::write(to + i * size, bytes, size);
    numbers[i] = decode(bytes, element);
  }
}

// In causal form, the value of a token is NaN or infinite, which earlier rows must not see. `check` checks a problem.
inline int check_later_values(int64_t channels, int64_t heads, const Bounds& bounds,
                              const std::function<int(Problem&)>& check) {
  int failures = 0;
  for (AftCudaElement element : {AFT_CUDA_FLOAT32, AFT_CUDA_FLOAT16, AFT_CUDA_BFLOAT16})
    for (int64_t token : {1, 7, 8, 31, 127, 128}) {
      const Case c{0, 1, 140, channels, heads, element, true, AFT_CUDA_SIGMOID, Data::kSmall, Layout::kPacked, {140}};
      device::doing = "later value, " + c.name();
      for (float late : {NAN, INFINITY}) {
        Problem problem(c, bounds, heads > 1 ? heads : channels);
        problem.compared_rows = token;
        change_numbers(problem.sequence.value.data, problem.value, c.tokens * channels, element,
                       [&](int64_t i, float value) { return i / channels == token ? late : value; });
        failures += check(problem);
      }
    }
  return failures;
}

// Those of keys that count.
template <class Change>
void change_keys(Problem& problem, const Change& change) {
  const Case& c = problem.c;
  change_numbers(problem.sequence.key.data, problem.key, c.lengths[0] * c.channels, c.element, change);
}
