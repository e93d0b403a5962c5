// The fused CUDA kernels: for every mechanism of cpu/kernels.h the workspace it needs, and the call, on its parameters.
//
// No runtime is involved: C linkage, device pointers, memory from the caller. The caller has checked shapes
// and values; the kernels assume them, and that tokens and channels are below 2^30. float16 and bfloat16 are
// read and written as such and summed in float32. Key u of document b counts if u < lengths[b], and in causal
// form only for rows t >= u; other keys and values are never used. One exception: causal linear and Efficient
// Attention multiply later values of a tile by 0, so a NaN or infinite one reaches earlier rows of the tile. Padded
// rows get finite numbers where their queries are finite.
//
// The kernels lack some forms, which the caller refuses (operators/operators.cc): the gate relu, an eps of the AFT
// mechanisms, AFT-simple's keys by head, other feature maps and normalizers than elu, relu and add, heads that share
// keys or values, values of another width than keys, and keys of another number.
//
// A call enqueues work on the stream and returns a cudaError_t as an int, 0 for success. It allocates
// nothing, waits for nothing and reads nothing on the host that lies on the device, so it can be captured in
// a CUDA graph. Element, shapes, settings and alignment decide which kernels run and how the work is cut.
// The device decides neither. So the same input gives the same bits on every device of one architecture.
// Tensor cores of another architecture may add products in another order.
//
// The workspace is device memory aligned to 256 bytes; its content before the call does not matter, and it is
// free again once the stream has passed the call. The size needed depends on element, shapes and settings,
// never on pointers, and does not shrink where batch, tokens or channels grow: asked for the largest
// shapes, it serves all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"

typedef struct CUstream_st* cudaStream_t;

namespace aft::cuda {

// Heads of Efficient and linear attention have at most this many channels. A call with wider heads is refused.
constexpr int64_t kMaxHeadChannels = 256;

// More than a mechanism: query + Fastformer's layer of layer_norm(query); encoder/layer_norm_fastformer.cu has the
// formula. Not causal; key and value are not read. The weights are packed, of the tensors' element, and products that
// are taken for every token have their operands rounded to it.
struct LayerNormFastformer : Sequence {
  const void *norm_weight, *norm_bias;  // [channels]
  float epsilon;
  const void *query_weight, *query_bias, *key_weight, *key_bias;  // [channels, channels], [channels]
  const void *alpha_weight, *beta_weight;                         // [channels, heads]
  const void *weight, *bias;                                      // [channels, channels], [channels]
  int64_t heads;
};

}  // namespace aft::cuda

extern "C" {

size_t aft_cuda_aft_simple_workspace(const aft::AftSimple*);
int aft_cuda_aft_simple(const aft::AftSimple*, void* workspace, cudaStream_t);

// `precision` is that of the factors exp(position_bias) and exp(key), sums are float32: float32 for tensors of any
// element, float16 for those of float16, bfloat16 for those of 16 bits. Where tensors of the element cannot have a
// precision, the next takes its place that holds as large a range. A cell whose products have lost too much is summed
// again by the definition, which is slow where many cells are. The largest range of a row of position_bias (maximum -
// minimum) chooses: float16 up to 8, bfloat16 up to 75, float32 beyond. With float32 products and more than 2,048
// tokens the workspace holds sums of segments of keys as well: 64 KiB for every 128 tokens and 64 channels, about twice
// the output in float32.
size_t aft_cuda_aft_full_workspace(const aft::AftFull*);
int aft_cuda_aft_full(const aft::AftFull*, void* workspace, cudaStream_t);

// AFT-full, not causal, around a matrix product of the caller's. All matrices are packed, their elements those
// of `precision`:
//   prepare   entries [batch, tokens, 2 channels] = (exp(key - m) value, exp(key - m)), m the channel's largest
//             key; 0 for keys that do not count
//   caller    products[b] = exp(position_bias - its row maxima) entries[b]
//   finish    output = gate(query) * products[.., :channels] / products[.., channels:]
// The left side of the product is a constant that the caller makes once. Every pointer is a multiple of 16.
size_t aft_cuda_aft_full_prepare_workspace(const aft::AftFull*);
int aft_cuda_aft_full_prepare(const aft::AftFull*, void* entries, void* workspace, cudaStream_t);
int aft_cuda_aft_full_finish(const aft::AftFull*, const void* products, cudaStream_t);

// The caller's product is expected to be faster than the fused kernel from this many tokens on. A library's product
// runs nearer to the peak, because the fused kernel takes exponentials in its inner loop. Below this number, the
// entries' way through memory costs more than that gains. The number is an estimate; it was never measured on a GPU.
enum { AFT_CUDA_AFT_FULL_GEMM_TOKENS = 2048 };

size_t aft_cuda_aft_local_workspace(const aft::AftLocal*);
int aft_cuda_aft_local(const aft::AftLocal*, void* workspace, cudaStream_t);

size_t aft_cuda_aft_conv_workspace(const aft::AftConv*);
int aft_cuda_aft_conv(const aft::AftConv*, void* workspace, cudaStream_t);

size_t aft_cuda_efficient_attention_workspace(const aft::EfficientAttention*);
int aft_cuda_efficient_attention(const aft::EfficientAttention*, void* workspace, cudaStream_t);

size_t aft_cuda_linear_attention_workspace(const aft::LinearAttention*);
int aft_cuda_linear_attention(const aft::LinearAttention*, void* workspace, cudaStream_t);

size_t aft_cuda_fastformer_workspace(const aft::Fastformer*);
int aft_cuda_fastformer(const aft::Fastformer*, void* workspace, cudaStream_t);

size_t aft_cuda_layer_norm_fastformer_workspace(const aft::cuda::LayerNormFastformer*);
int aft_cuda_layer_norm_fastformer(const aft::cuda::LayerNormFastformer*, void* workspace, cudaStream_t);

// Returns CUDA's description of a status that a call returned, such as "no kernel image is available for execution on
// the device". The string is static.
const char* aft_cuda_error_text(int status);
}
