// The gates of the AFT mechanisms: gate(query) * context.
#pragma once

#include "device/device.cuh"
#include "kernels.h"

namespace aft::cuda {

__device__ __forceinline__ float gated(AftCudaGate gate, float query, float context) {
  switch (gate) {
    case AFT_CUDA_SIGMOID: return context / (1.0f + machine::fast_exp(-query));
    case AFT_CUDA_TANH: return context * tanhf(query);
    case AFT_CUDA_NO_GATE: return context;
  }
  return context;
}

}  // namespace aft::cuda
