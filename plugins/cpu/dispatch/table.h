// Every kernel once, with the instruction sets it is compiled for, and the macros that make a dispatcher of a list.
//
// | list                | instruction sets                                 | dispatcher    | in CMakeLists.txt   |
// |---------------------|--------------------------------------------------|---------------|---------------------|
// | AFT_KERNELS         | baseline, avx2, avx512                           | mechanisms.cc | AFT_KERNEL_SOURCES  |
// | AFT_PRODUCT_KERNELS | baseline, avx2, avx512, avx512_vnni, avx512_bf16 | products.cc   | AFT_PRODUCT_SOURCES |
// |                     | on aarch64: neon_dotprod, neon_i8mm_bf16         |               |                     |
//
// Only matrix products gain from the instructions for bfloat16 and 8-bit integers. The set avx512_amx has no copy of its
// own: its products by tiles are two methods more in the copy for avx512_bf16, whose other code has no tiles.
//
// With the macro AFT_ONLY_ISA, as under sanitizers, every kernel has the copy of that name only.
#pragma once

// X(isa, kernel, its parameters)
#define AFT_KERNELS(X, isa)                                    \
  X(isa, aft_simple, AftSimple)                                \
  X(isa, aft_local, AftLocal)                                  \
  X(isa, aft_conv, AftConv)                                    \
  X(isa, efficient_attention, EfficientAttention)              \
  X(isa, linear_attention, LinearAttention)                    \
  X(isa, fastformer, Fastformer)                               \
  X(isa, recurrent_linear_attention, RecurrentLinearAttention) \
  X(isa, causal_depthwise_conv, CausalDepthwiseConv)

#define AFT_PRODUCT_KERNELS(X, isa)                     \
  X(isa, aft_full, AftFull)                             \
  X(isa, softmax_attention, SoftmaxAttention)           \
  X(isa, layer_norm_linear, LayerNormLinear)            \
  X(isa, layer_norm_feed_forward, LayerNormFeedForward) \
  X(isa, linear_residual, LinearResidual)               \
  X(isa, layer_norm_fastformer, LayerNormFastformer)

// The copy for one instruction set, a pointer to one of the copies, and an entry of the table of pointers.
#define AFT_DECLARE(isa, name, Params) void name(const Params&, const Parallel&);
#define AFT_POINTER(isa, name, Params) void (*name)(const Params&, const Parallel&);
#define AFT_ENTRY(isa, name, Params) isa::name,

// The function of the interface, which calls the copy in table().
#define AFT_FORWARD(isa, name, Params) \
  void name(const Params& params, const Parallel& parallel) { table().name(params, parallel); }
