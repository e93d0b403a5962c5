// The gates of the AFT mechanisms: gate(query) * context.
#pragma once

#include <type_traits>

#include "device/device.cuh"
#include "kernels.h"

namespace aft::cuda {

template <Gate gate>
__device__ __forceinline__ float gated(float query, float context) {
  if constexpr (gate == Gate::kSigmoid)
    return machine::fast_divide(context, 1.0f + machine::fast_exp(-query));
  else if constexpr (gate == Gate::kTanh)
    return context * tanhf(query);
  else
    return context;
}

// Calls f with a constant of the gate's value; returns the result of f. A kernel with the gate as a template argument
// holds the code of one gate only.
template <class F>
int with_gate(Gate gate, const F& f) {
  switch (gate) {
    case Gate::kSigmoid: return f(std::integral_constant<Gate, Gate::kSigmoid>{});
    case Gate::kTanh: return f(std::integral_constant<Gate, Gate::kTanh>{});
    case Gate::kNone: return f(std::integral_constant<Gate, Gate::kNone>{});
    case Gate::kRelu: break;
  }
  return 1;  // cudaErrorInvalidValue
}

}  // namespace aft::cuda
