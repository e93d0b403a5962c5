// Efficient Attention (Shen et al., arXiv 1812.01243), heads of width d.
//
// Computes: Y[t] = scale * rho(Q[t]) sum_u w[u] V[u]^T                                                 causal: u <= t
//           softmax: w[u,c] = exp(K[u,c]) / sum_v exp(K[v,c]) over the tokens, rho the softmax over the channels
//           scaling: w = K / n, rho = identity, n keys
// Cost:     as linear_attention.cu: 4BTD elements and 4BTDd FLOPs (12 in float32), causal 6BTD elements; an exponential
//           for each key and query beside some d multiply-adds is not a bound.
// Method:   that of shared/head_passes.cuh and shared/head_causal.cuh. The softmax of the keys is over all tokens, so
//           its maximum is known only at the end. A chunk keeps a running maximum of each channel and scales its rows
//           of S down when that grows; chunks are merged relative to the larger one. Causal, every row divides by the
//           sums up to its own.
// Numerics: weights are relative to the running maximum. Causal, the maximum stays for a tile, and grows within one
//           only for a key so far above it that its weight would leave float32's range.
// Rejected: a pass for the maxima before one for the sums needs no scaling, and reads the keys once more, 5BTD. One
//           maximum for all channels of a head saves d of them, and a channel whose keys all lie 90 below the largest
//           would have no weights at all.
// See:      shared/head_context.cuh, shared/head_passes.cuh, shared/head_causal.cuh, shared/head_launch.cuh

#include "mechanisms/shared/head_launch.cuh"

namespace aft::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads == kBlockThreads, "");
constexpr int64_t kBlocks = 512, kCausalBlocks = 256;

struct Softmax {
  static constexpr bool kSoftmax = true, kNormalized = false;
  float scale;

  __device__ __forceinline__ float compute_key_weight(float key, float maximum) const {
    return machine::fast_exp(key - maximum);
  }

  template <int kLanes, int N>
  __device__ __forceinline__ float compute_query_weights(float (&query)[N], int lane, int width, const float*) const {
    float maximum = kNoKey, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (lane + i * kLanes < width) maximum = fmaxf(maximum, query[i]);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      query[i] = lane + i * kLanes < width ? machine::fast_exp(query[i] - maximum) : 0.0f;
      sum += query[i];
    }
    return sum_lanes<kLanes>(sum);
  }

  __device__ __forceinline__ float row_scale(float sum, int64_t) const { return scale / sum; }
};

struct Scaling {
  static constexpr bool kSoftmax = false, kNormalized = false;
  float scale;

  __device__ __forceinline__ float compute_key_weight(float key, float) const { return key; }

  template <int kLanes, int N>
  __device__ __forceinline__ float compute_query_weights(float (&)[N], int, int, const float*) const {
    return 0.0f;
  }

  __device__ __forceinline__ float row_scale(float, int64_t keys) const {
    return scale / static_cast<float>(keys > 1 ? keys : 1);
  }
};

template <class T, int kWidth, class Normalization>
__global__ void __launch_bounds__(kThreads, 2) sum_kernel(const HeadParams<Normalization> p) {
  sum_context<T, kWidth>(p);
}
__global__ void __launch_bounds__(kThreads, 4)
    merge_kernel(float* states, int64_t heads, int width, int chunks, bool scan) {
  merge_states(states, heads, width, chunks, scan);
}
template <class T, int kWidth, class Normalization>
__global__ void __launch_bounds__(kThreads, 2) apply_kernel(const HeadParams<Normalization> p) {
  apply_context<T, kWidth>(p);
}
template <class T, int kWidth, class Normalization>
__global__ void __launch_bounds__(kThreads, 2) causal_kernel(const HeadParams<Normalization> p) {
  causal_context<T, kWidth>(p);
}

template <class Normalization>
int run(const AftCudaEfficientAttention& call, const Normalization& normalization, void* workspace,
        cudaStream_t stream) {
  const AftCudaSequence& s = call.sequence;
  return with_element(s.element, [&](auto element) {
    return with_width(s.channels / call.heads, [&](auto width) {
      using T = decltype(element);
      constexpr int kWidth = decltype(width)::value;
      return enqueue<T, kWidth>(s, normalization, call.heads, workspace, stream, sum_kernel<T, kWidth, Normalization>,
                                merge_kernel, apply_kernel<T, kWidth, Normalization>,
                                causal_kernel<T, kWidth, Normalization>, s.causal ? kCausalBlocks : kBlocks);
    });
  });
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_efficient_attention_workspace(const AftCudaEfficientAttention* call) {
  return aft::cuda::head_workspace(call->sequence, call->heads, aft::cuda::kBlocks);
}

int aft_cuda_efficient_attention(const AftCudaEfficientAttention* call, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  const AftCudaSequence& s = call->sequence;
  if (s.batch * s.tokens * s.channels == 0) return 0;
  if (call->normalization == AFT_CUDA_SOFTMAX) return run(*call, Softmax{call->scale}, workspace, stream);
  return run(*call, Scaling{call->scale}, workspace, stream);
}
