// The part of ONNX Runtime's C interface that a custom-op library needs, declared here so that building
// needs no headers of the runtime. OrtApi is a table of functions that only ever grows at its end, so an
// entry is its position; kApiVersion is the oldest version that has all of them, and any later runtime
// hands out its table for it. tests/plugins/test_ort_api.py compares all this with the real header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kApiVersion = 18;

struct Allocator;
struct CustomOp;
struct CustomOpDomain;
struct KernelContext;
struct KernelInfo;
struct MemoryInfo;
struct SessionOptions;
struct ShapeInferContext;
struct Status;
struct TensorShape;  // OrtTensorTypeAndShapeInfo
struct Value;

enum class ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum class ElementType : int { kFloat = 1, kInt64 = 7, kFloat16 = 10, kBfloat16 = 16 };
enum class Arity : int { kRequired = 0, kOptional = 1 };
enum class MemoryType : int { kDefault = 0 };

// Every entry: name, position in OrtApi, type. X(name, slot, result, arguments...)
#define ORT_API_ENTRIES(X)                                                                              \
  X(CreateStatus, 0, Status*, ErrorCode, const char*)                                                   \
  X(GetErrorMessage, 2, const char*, const Status*)                                                     \
  X(CreateCustomOpDomain, 26, Status*, const char*, CustomOpDomain**)                                   \
  X(CustomOpDomain_Add, 27, Status*, CustomOpDomain*, const CustomOp*)                                  \
  X(AddCustomOpDomain, 28, Status*, SessionOptions*, CustomOpDomain*)                                   \
  X(GetTensorMutableData, 51, Status*, Value*, void**)                                                  \
  X(GetDimensionsCount, 61, Status*, const TensorShape*, size_t*)                                       \
  X(GetDimensions, 62, Status*, const TensorShape*, int64_t*, size_t)                                   \
  X(GetSymbolicDimensions, 63, Status*, const TensorShape*, const char**, size_t)                       \
  X(GetTensorTypeAndShape, 65, Status*, const Value*, TensorShape**)                                    \
  X(AllocatorAlloc, 75, Status*, Allocator*, size_t, void**)                                            \
  X(AllocatorFree, 76, Status*, Allocator*, void*)                                                      \
  X(KernelInfoGetAttribute_float, 85, Status*, const KernelInfo*, const char*, float*)                  \
  X(KernelInfoGetAttribute_int64, 86, Status*, const KernelInfo*, const char*, int64_t*)                \
  X(KernelInfoGetAttribute_string, 87, Status*, const KernelInfo*, const char*, char*, size_t*)         \
  X(KernelContext_GetInput, 90, Status*, const KernelContext*, size_t, const Value**)                   \
  X(KernelContext_GetOutput, 91, Status*, KernelContext*, size_t, const int64_t*, size_t, Value**)      \
  X(ReleaseStatus, 93, void, Status*)                                                                   \
  X(ReleaseTensorTypeAndShapeInfo, 99, void, TensorShape*)                                              \
  X(ReleaseCustomOpDomain, 101, void, CustomOpDomain*)                                                  \
  X(GetAvailableProviders, 125, Status*, char***, int*)                                                 \
  X(ReleaseAvailableProviders, 126, Status*, char**, int)                                               \
  X(ReleaseAllocator, 132, void, Allocator*)                                                            \
  X(KernelContext_GetGPUComputeStream, 193, Status*, const KernelContext*, void**)                      \
  X(GetTensorMemoryInfo, 194, Status*, const Value*, const MemoryInfo**)                                \
  X(KernelInfoGetConstantInput_tensor, 249, Status*, const KernelInfo*, size_t, int*, const Value**)    \
  X(KernelContext_GetAllocator, 253, Status*, const KernelContext*, const MemoryInfo*, Allocator**)     \
  X(ShapeInferContext_GetInputTypeShape, 268, Status*, const ShapeInferContext*, size_t, TensorShape**) \
  X(ShapeInferContext_SetOutputTypeShape, 270, Status*, const ShapeInferContext*, size_t, const TensorShape*) \
  X(KernelContext_ParallelFor, 274, Status*, const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*) \
  X(KernelContext_GetScratchBuffer, 277, Status*, const KernelContext*, const MemoryInfo*, size_t, void**)

// OrtApi: its table, with a typed accessor per entry used.
struct Api {
  void (*const table[278])();

#define ORT_ACCESSOR(name, slot, Result, ...)                    \
  template <class... Arguments>                                  \
  Result name(Arguments... arguments) const {                    \
    return reinterpret_cast<Result (*)(__VA_ARGS__)>(table[slot])(arguments...); \
  }
  ORT_API_ENTRIES(ORT_ACCESSOR)
#undef ORT_ACCESSOR
};

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// OrtCustomOp as of version 18; the runtime reads no field later than `version` knows.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  ElementType (*GetInputType)(const CustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const CustomOp*);
  ElementType (*GetOutputType)(const CustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void* kernel, KernelContext*);
  void (*KernelDestroy)(void* kernel);
  Arity (*GetInputCharacteristic)(const CustomOp*, size_t index);
  Arity (*GetOutputCharacteristic)(const CustomOp*, size_t index);
  MemoryType (*GetInputMemoryType)(const CustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, KernelContext*);
  Status* (*InferOutputShapeFn)(const CustomOp*, ShapeInferContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // namespace ort
