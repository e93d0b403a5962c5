// Compiled as CUDA: CUDA's own words for a status, of the runtime that is linked here.
#include <cuda_runtime.h>

#include "kernels.h"

extern "C" const char* aft_cuda_error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
