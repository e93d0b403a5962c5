// Calls of the CUDA kernels with the parameters that operators.h makes.
#pragma once

#include "cuda/kernels.h"
#include "operators/operators.h"

namespace ops {

// Packed query, key and value. Keys have as many channels as queries, or one for each of `key_channels` heads.
AftCudaSequence to_cuda(const aft::Sequence&, int64_t key_channels);

size_t workspace_size(const Params&);

// Enqueues the kernel. Returns a cudaError_t, 0 for success.
int enqueue(const Params&, void* workspace, cudaStream_t);

}  // namespace ops
