/* The fused CUDA kernels: for every mechanism a parameter struct, the workspace it needs, and the call.
 *
 * No runtime is involved: plain C, device pointers, memory from the caller. The caller has checked shapes
 * and values; the kernels assume them. float16 and bfloat16 are read and written as such and computed in
 * float32. Key u of document b counts if u < lengths[b], and in causal form only for rows t >= u; what lies
 * in keys and values that do not count is never used. Padded rows get finite numbers.
 *
 * A call enqueues work on the stream and returns a cudaError_t as an int, 0 for success. It allocates
 * nothing, waits for nothing and reads nothing on the host that lies on the device, so it can be captured in
 * a CUDA graph. Which kernels run, and how the work is cut, follows from the shapes alone: the same input
 * gives the same bits, on every device.
 *
 * The workspace is device memory aligned to 256 bytes; its content before the call does not matter, and it is
 * free again once the stream has passed the call. The size needed depends on element, shapes and settings,
 * never on pointers, and does not shrink where batch, tokens or channels grow: asked for the largest
 * shapes, it serves all. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* cudaStream_t;

typedef enum { AFT_CUDA_FLOAT32, AFT_CUDA_FLOAT16, AFT_CUDA_BFLOAT16 } AftCudaElement;
typedef enum { AFT_CUDA_SIGMOID, AFT_CUDA_TANH, AFT_CUDA_NO_GATE } AftCudaGate;
typedef enum { AFT_CUDA_SOFTMAX, AFT_CUDA_SCALING } AftCudaNormalization;
typedef enum { AFT_CUDA_ELU, AFT_CUDA_RELU } AftCudaFeatureMap;

/* A [batch, tokens, channels] input: element [b, t, c] lies b * batch_stride + t * token_stride + c elements
 * after `data`. So query, key and value may be slices of one product. */
typedef struct {
  const void* data;
  int64_t batch_stride, token_stride;
} AftCudaTensor;

/* What all mechanisms share. `element` is the type of every tensor but lengths. */
typedef struct {
  AftCudaElement element;
  int causal;
  int64_t batch, tokens, channels;
  AftCudaTensor query, key, value;
  const int64_t* lengths; /* [batch] */
  void* output;           /* [batch, tokens, channels], packed */
} AftCudaSequence;

typedef struct {
  AftCudaSequence sequence;
  AftCudaGate gate;
} AftCudaAftSimple;

typedef struct {
  AftCudaSequence sequence;
  AftCudaGate gate;
  const void* position_bias;   /* row t, column u */
  int64_t position_bias_width; /* elements from one row to the next, >= tokens */
} AftCudaAftFull;

typedef struct {
  AftCudaSequence sequence;
  AftCudaGate gate;
  const void* band;  /* band[t, j] is the bias of key t + j - (window - 1) */
  int64_t band_rows; /* 1 (the same row for every t) or >= tokens */
  int64_t window;    /* s; a row has 2s-1 entries, s in causal form */
} AftCudaAftLocal;

typedef struct { /* key is [batch, tokens, heads] */
  AftCudaSequence sequence;
  AftCudaGate gate;
  const void* filter; /* [heads, taps] */
  int64_t heads, taps;
} AftCudaAftConv;

typedef struct {
  AftCudaSequence sequence;
  AftCudaNormalization normalization;
  int64_t heads;
  float scale;
} AftCudaEfficientAttention;

typedef struct {
  AftCudaSequence sequence;
  AftCudaFeatureMap feature_map;
  int64_t heads;
  float eps;
} AftCudaLinearAttention;

typedef struct {
  AftCudaSequence sequence;
  const void *alpha_weight, *beta_weight; /* [channels, heads] */
  int64_t heads;
} AftCudaFastformer;

size_t aft_cuda_aft_simple_workspace(const AftCudaAftSimple*);
int aft_cuda_aft_simple(const AftCudaAftSimple*, void* workspace, cudaStream_t);

size_t aft_cuda_aft_full_workspace(const AftCudaAftFull*);
int aft_cuda_aft_full(const AftCudaAftFull*, void* workspace, cudaStream_t);

size_t aft_cuda_aft_local_workspace(const AftCudaAftLocal*);
int aft_cuda_aft_local(const AftCudaAftLocal*, void* workspace, cudaStream_t);

size_t aft_cuda_aft_conv_workspace(const AftCudaAftConv*);
int aft_cuda_aft_conv(const AftCudaAftConv*, void* workspace, cudaStream_t);

size_t aft_cuda_efficient_attention_workspace(const AftCudaEfficientAttention*);
int aft_cuda_efficient_attention(const AftCudaEfficientAttention*, void* workspace, cudaStream_t);

size_t aft_cuda_linear_attention_workspace(const AftCudaLinearAttention*);
int aft_cuda_linear_attention(const AftCudaLinearAttention*, void* workspace, cudaStream_t);

size_t aft_cuda_fastformer_workspace(const AftCudaFastformer*);
int aft_cuda_fastformer(const AftCudaFastformer*, void* workspace, cudaStream_t);

#ifdef __cplusplus
}
#endif
