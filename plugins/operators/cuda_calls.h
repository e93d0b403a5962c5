// Calls of the CUDA kernels with the parameters that operators.h makes.
#pragma once

#include "cuda/kernels.h"
#include "operators/operators.h"

namespace ops {

size_t workspace_size(const Params&);

// Enqueues the kernel. Returns a cudaError_t, 0 for success.
int enqueue(const Params&, void* workspace, cudaStream_t);

}  // namespace ops
