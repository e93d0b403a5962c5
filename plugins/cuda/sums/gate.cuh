// The gates of the AFT mechanisms: gate(query) * context.
#pragma once

#include <type_traits>

#include "device/device.cuh"
#include "kernels.h"

namespace aft::cuda {

template <AftCudaGate gate>
__device__ __forceinline__ float gated(float query, float context) {
  if constexpr (gate == AFT_CUDA_SIGMOID)
    return machine::fast_divide(context, 1.0f + machine::fast_exp(-query));
  else if constexpr (gate == AFT_CUDA_TANH)
    return context * tanhf(query);
  else
    return context;
}

// Calls f with a constant of the gate's value; returns the result of f. A kernel with the gate as a template argument
// holds the code of one gate only.
template <class F>
int with_gate(AftCudaGate gate, const F& f) {
  switch (gate) {
    case AFT_CUDA_SIGMOID: return f(std::integral_constant<AftCudaGate, AFT_CUDA_SIGMOID>{});
    case AFT_CUDA_TANH: return f(std::integral_constant<AftCudaGate, AFT_CUDA_TANH>{});
    case AFT_CUDA_NO_GATE: return f(std::integral_constant<AftCudaGate, AFT_CUDA_NO_GATE>{});
  }
  return 1;  // cudaErrorInvalidValue
}

}  // namespace aft::cuda
