// Running lambdas on the caller's threads, memory for the tasks, and choosing template arguments.
#pragma once

#include "kernels.h"
#include "scratch.h"
#include "simd/load_store.h"

namespace aft::AFT_ISA {

template <class Body>
void parallel_for(const Parallel& parallel, int64_t tasks, const Body& body) {
  if (tasks == 1) return body(0);
  parallel.run(
      parallel.pool, static_cast<size_t>(tasks),
      [](void* context, size_t task) { (*static_cast<const Body*>(context))(static_cast<int64_t>(task)); },
      const_cast<Body*>(&body));
}

// Floats that a thread passes over in about the time that waking another one takes.
constexpr int64_t kFloatsPerWake = 1 << 15;

// The same for tasks that pass over so many floats together: where that is little, this thread does all of them.
template <class Body>
void parallel_for(const Parallel& parallel, int64_t tasks, int64_t floats, const Body& body) {
  if (floats > kFloatsPerWake) return parallel_for(parallel, tasks, body);
  for (int64_t task = 0; task < tasks; ++task) body(task);
}

// Valid tokens of document b.
template <class Params>
int64_t length_of(const Params& p, int64_t b) {
  return max(0, min(p.lengths[b], p.tokens));
}

inline int64_t key_tokens_of(const GroupedHeads& s) { return s.key_lengths ? s.key_tokens : s.tokens; }
// Valid keys of document b.
inline int64_t key_length_of(const GroupedHeads& s, int64_t b) {
  return s.key_lengths ? max(0, min(s.key_lengths[b], s.key_tokens)) : length_of(s, b);
}

// Calls f with a value of the tensors' C++ type.
template <class F>
void with_element(Element element, const F& f) {
  if (element == Element::kFloat16)
    f(Half{});
  else
    f(float{});
}

// The same, with causal(element) or otherwise(element) in place of f.
template <class Causal, class Otherwise>
void with_element_and_causality(const Sequence& s, const Causal& causal, const Otherwise& otherwise) {
  with_element(s.element, [&](auto element) {
    if (s.causal)
      causal(element);
    else
      otherwise(element);
  });
}

template <auto constant>
struct Constant {
  static constexpr auto value = constant;
};
// Calls f with the gate as a compile-time constant.
template <class F>
void with_gate(Gate gate, const F& f) {
  switch (gate) {
    case Gate::kSigmoid: return f(Constant<Gate::kSigmoid>{});
    case Gate::kTanh: return f(Constant<Gate::kTanh>{});
    case Gate::kNone: return f(Constant<Gate::kNone>{});
    case Gate::kRelu: return f(Constant<Gate::kRelu>{});
  }
}

}  // namespace aft::AFT_ISA
