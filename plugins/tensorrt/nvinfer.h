// TensorRT's plugin interface: its own header where the build has it (AFT_NVINFER_HEADERS), else ours. Plugins
// built with either are the same to TensorRT.
#pragma once

#ifdef AFT_NVINFER_HEADERS
#include <NvInferRuntime.h>
#else
#include "nvinfer_abi.h"
#endif
