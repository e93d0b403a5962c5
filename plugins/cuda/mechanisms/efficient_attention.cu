// Efficient Attention (Shen et al., arXiv 1812.01243), heads of width d.
//
// Computes: Y[t] = scale * rho(Q[t]) sum_u w[u] V[u]^T                                                 causal: u <= t
//           softmax: w[u,c] = exp(K[u,c]) / sum_v exp(K[v,c]) over the tokens, rho the softmax over the channels
//           scaling: w = K / n, rho = identity, n keys
// Cost:     as linear_attention.cu: 4BTD elements and 4BTDd FLOPs (12 in float32), causal 6BTD elements; an exponential
//           for each key and query beside some d multiply-adds is not a bound.
// Method:   that of linear_attention.cu. The softmax of the keys is over all tokens, so its maximum is known only at
//           the end. A chunk keeps a reference of each channel, a running maximum or an earlier key, and scales its
//           rows of S down when that grows; chunks are merged relative to the larger one. Causal, every row divides by
//           the sums up to its own.
// Numerics: weights are relative to the reference. With bfloat16 operands, and in causal form, it grows only for a key
//           so far above it that its weight would leave float32's range. Scaling of float16 tensors takes tf32
//           operands, as its results are not averages.
// Rejected: a pass for the maxima before one for the sums needs no scaling, and reads the keys once more, 5BTD. One
//           maximum for all channels of a head saves d of them, and a channel whose keys all lie 90 below the largest
//           would have no weights at all.
// See:      sums/head_context.cuh, sums/head_launch.cuh

#include "sums/head_launch.cuh"

namespace aft::cuda {
namespace {

struct Softmax {
  static constexpr bool kSoftmax = true, kNormalized = false, kAverages = true;
  float scale;

  __device__ __forceinline__ float compute_key_weight(float key, float maximum) const {
    return machine::fast_exp(key - maximum);
  }

  template <int kLanes, int N>
  __device__ __forceinline__ float compute_query_weights(float (&query)[N], int first, int apart, int width) const {
    float maximum = kNoKey, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (first + i * apart < width) maximum = fmaxf(maximum, query[i]);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, distance));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      query[i] = first + i * apart < width ? machine::fast_exp(query[i] - maximum) : 0.0f;
      sum += query[i];
    }
    return sum_lanes<kLanes>(sum);
  }

  __device__ __forceinline__ float row_scale(float sum, int64_t) const { return machine::fast_divide(scale, sum); }
};

struct Scaling {
  static constexpr bool kSoftmax = false, kNormalized = false, kAverages = false;
  float scale;

  __device__ __forceinline__ float compute_key_weight(float key, float) const { return key; }

  template <int kLanes, int N>
  __device__ __forceinline__ float compute_query_weights(float (&)[N], int, int, int) const {
    return 0.0f;
  }

  __device__ __forceinline__ float row_scale(float, int64_t keys) const {
    return machine::fast_divide(scale, static_cast<float>(keys > 1 ? keys : 1));
  }
};

template <class Normalization>
int run(const Strided<EfficientAttention>& call, const Normalization& normalization, void* workspace,
        cudaStream_t stream) {
  const StridedSequence& s = call.sequence;
  return with_element(s.element, [&](auto element) {
    return with_width(s.channels / call.heads, [&](auto width) {
      using T = decltype(element);
      constexpr int kWidth = decltype(width)::value;
      return enqueue<T, kWidth>(s, normalization, call.heads, workspace, stream);
    });
  });
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_efficient_attention_workspace(const aft::EfficientAttention* params) {
  return aft::cuda::head_workspace(*params, params->heads);
}

int aft_cuda_efficient_attention(const aft::EfficientAttention* params, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (is_empty(*params)) return 0;
  const auto call = strided(*params);
  if (call.normalization == aft::Normalization::kSoftmax) return run(call, Softmax{call.scale}, workspace, stream);
  return run(call, Scaling{call.scale}, workspace, stream);
}
