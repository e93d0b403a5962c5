// The gates of the AFT mechanisms in float64.
#pragma once

#include <cmath>

#include "kernels.h"

inline double gate(AftCudaGate kind, double query) {
  if (kind == AFT_CUDA_SIGMOID) return 1.0 / (1.0 + std::exp(-query));
  return kind == AFT_CUDA_TANH ? std::tanh(query) : 1.0;
}
