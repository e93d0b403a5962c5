// The gate of a call, as the formulas name it.
#pragma once

#include "../../oracles/mechanisms.h"
#include "kernels.h"

inline oracle::Gate gate(AftCudaGate kind) {
  if (kind == AFT_CUDA_SIGMOID) return oracle::Gate::kSigmoid;
  return kind == AFT_CUDA_TANH ? oracle::Gate::kTanh : oracle::Gate::kNone;
}
