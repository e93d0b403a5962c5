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

// Those of keys that count.
template <class Change>
void change_keys(Problem& problem, const Change& change) {
  const Case& c = problem.c;
  change_numbers(problem.sequence.key.data, problem.key, c.lengths[0] * c.channels, c.element, change);
}
