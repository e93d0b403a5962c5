// Linear attention (Katharopoulos et al., arXiv 2006.16236, equations 5 and 9), heads of width d.
//
// Computes: Y[t] = phi(Q[t]) S / (phi(Q[t]) z + eps),  S = sum_u phi(K[u]) V[u]^T,  z = sum_u phi(K[u])
//           causal: u <= t
// Cost:     floor: 4BTD elements moved and 4BTDd FLOPs, which three products for one make 12BTDd in float32. Bound by
//           memory; in float32 by tensor cores from some 100 channels on (sm_80: tf32 at 156 TFLOP/s beside 2 TB/s).
//           Taken: 4BTD and the states of the chunks, d + 2 floats a channel and chunk, no more than their keys. Causal
//           6BTD, because keys and values are read twice. Heads of over 64 channels have 2 or 8 blocks with a slice of
//           the values each, which read the same keys and queries, mostly from the second-level cache.
// Method:   sums of the chunks, merge_states (sums/head_merge.cuh), and the chunks' queries: not causal times the
//           whole S, causal times S before each tile and times the keys in it. In 16 bits sum_tiles, apply_state and
//           causal_tiles with bfloat16 operands (sums/head_tensor_passes.cuh, head_tensor_causal.cuh), in float32
//           sum_context, apply_context and causal_context with split tf32 operands (sums/head_passes.cuh,
//           head_causal.cuh).
// Numerics: phi is never negative, so z does not cancel. In 16 bits z sums the same rounded weights as S, and their
//           errors of 2^-9 even out in the average. In float32 operands are split (device/block_product.cuh).
// Rejected: one block that takes a head from its first token to its last, as the recurrence is written, leaves a GPU
//           idle at B = 1. Atomic additions into S need no merge, but their order, and so the last bits, depend on the
//           scheduler. float16 operands for float16 tensors keep two more bits of phi, but lose its range.
// See:      sums/head_context.cuh, sums/head_launch.cuh

#include "sums/head_launch.cuh"

namespace aft::cuda {
namespace {

// A smaller eps counts as this one: MIN_EPS of mechanisms/linear_attention.py.
constexpr float kMinEps = 1e-20f;

struct Linear {
  static constexpr bool kSoftmax = false, kNormalized = true, kAverages = true;
  float eps;
  // phi(x) is 2^(log2(e) x + exponent) below 0, and x + offset from there on.
  float exponent, offset;

  Linear(FeatureMap map, float eps)
      : eps(eps < kMinEps ? kMinEps : eps),
        exponent(map == FeatureMap::kRelu ? -1e30f : 0.0f),
        offset(map == FeatureMap::kRelu ? 0.0f : 1.0f) {}

  __device__ __forceinline__ float feature(float x) const {
    const float below = machine::fast_exp2(fmaf(x, machine::kLog2E, exponent));
    return x < 0.0f ? below : x + offset;  // NaN is not below, and stays
  }

  __device__ __forceinline__ float compute_key_weight(float key, float) const { return feature(key); }

  template <int kLanes, int N>
  __device__ __forceinline__ float compute_query_weights(float (&query)[N], int first, int apart, int width) const {
#pragma unroll
    for (int i = 0; i < N; ++i) query[i] = first + i * apart < width ? feature(query[i]) : 0.0f;
    return 0.0f;
  }

  __device__ __forceinline__ float row_scale(float sum, int64_t) const { return machine::fast_divide(1.0f, sum + eps); }
};

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_linear_attention_workspace(const aft::LinearAttention* params) {
  return aft::cuda::head_workspace(*params, params->heads);
}

int aft_cuda_linear_attention(const aft::LinearAttention* params, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  if (is_empty(*params)) return 0;
  if (params->feature_map == aft::FeatureMap::kIdentity) return 1;  // cudaErrorInvalidValue
  return with_element(params->element, [&](auto element) {
    return with_width(params->channels / params->heads, [&](auto width) {
      using T = decltype(element);
      constexpr int kWidth = decltype(width)::value;
      const Linear linear(params->feature_map, params->eps);
      return enqueue<T, kWidth>(strided(*params).sequence, linear, params->heads, workspace, stream);
    });
  });
}
