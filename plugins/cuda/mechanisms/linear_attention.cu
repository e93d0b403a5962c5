// Linear attention (Katharopoulos et al., arXiv 2006.16236, equations 5 and 9), heads of width d.
//
// Computes: Y[t] = phi(Q[t]) S / (phi(Q[t]) z + eps),  S = sum_u phi(K[u]) V[u]^T,  z = sum_u phi(K[u])   causal: u <=
//           t
// Cost:     floor: 4BTD elements moved and 4BTDd FLOPs, which three products for one make 12BTDd in float32. Bound by
//           memory for heads to some 150 channels in 16 bits, 100 in float32 (sm_80: tf32 at 156 TFLOP/s beside 2
//           TB/s), by tensor cores from there. Taken: 4BTD and the states of the chunks, d + 2 floats a channel and
//           chunk, no more than their keys; causal 6BTD, keys and values being read twice. Heads of over 64 channels
//           have 2 or 8 blocks with a slice of the values each, which read the same keys and queries, mostly from the
//           second-level cache.
// Method:   not causal: sum_context for the chunks, merge_states, apply_context (shared/head_passes.cuh). Causal:
//           sum_context, merge_states as a scan, causal_context (shared/head_causal.cuh).
// Numerics: phi is never negative, so z does not cancel. In float32 operands are split (device/block_product.cuh).
// Rejected: one block that takes a head from its first token to its last, as the recurrence is written, leaves a GPU
// idle
//           at B = 1. Atomic additions into S need no merge, but their order, and so the last bits, depend on the
//           scheduler. 16-bit operands for the products, twice as fast, lose digits of phi, and float16 its range.
// See:      shared/head_context.cuh, shared/head_passes.cuh, shared/head_causal.cuh, shared/head_launch.cuh

#include "mechanisms/shared/head_launch.cuh"

namespace aft::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads == kBlockThreads, "");
constexpr int64_t kBlocks = 512, kCausalBlocks = 256;

// A smaller eps counts as this one: MIN_EPS of mechanisms/linear_attention.py.
constexpr float kMinEps = 1e-20f;

struct Linear {
  static constexpr bool kSoftmax = false, kNormalized = true;
  AftCudaFeatureMap map;
  float eps;

  __device__ __forceinline__ float feature(float x) const {
    const float positive = x < 0.0f ? 0.0f : x;  // NaN, too, where fmaxf gives 0
    return map == AFT_CUDA_RELU ? positive : positive + machine::fast_exp(fminf(x, 0.0f));
  }

  __device__ __forceinline__ float compute_key_weight(float key, float) const { return feature(key); }

  template <int kLanes, int N>
  __device__ __forceinline__ float compute_query_weights(float (&query)[N], int lane, int width,
                                                         const float* key_sums) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int c = lane + i * kLanes;
      query[i] = c < width ? feature(query[i]) : 0.0f;
      sum += query[i] * key_sums[c];
    }
    return sum_lanes<kLanes>(sum);
  }

  __device__ __forceinline__ float row_scale(float sum, int64_t) const { return 1.0f / (sum + fmaxf(eps, kMinEps)); }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2) sum_kernel(const HeadParams<Linear> p) {
  sum_context<T, kWidth>(p);
}
__global__ void __launch_bounds__(kThreads, 4)
    merge_kernel(float* states, int64_t heads, int width, int chunks, bool scan) {
  merge_states(states, heads, width, chunks, scan);
}
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2) apply_kernel(const HeadParams<Linear> p) {
  apply_context<T, kWidth>(p);
}
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2) causal_kernel(const HeadParams<Linear> p) {
  causal_context<T, kWidth>(p);
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_linear_attention_workspace(const AftCudaLinearAttention* call) {
  return aft::cuda::head_workspace(call->sequence, call->heads, aft::cuda::kBlocks);
}

int aft_cuda_linear_attention(const AftCudaLinearAttention* call, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  const AftCudaSequence& s = call->sequence;
  if (s.batch * s.tokens * s.channels == 0) return 0;
  return with_element(s.element, [&](auto element) {
    return with_width(s.channels / call->heads, [&](auto width) {
      using T = decltype(element);
      constexpr int kWidth = decltype(width)::value;
      return enqueue<T, kWidth>(s, Linear{call->feature_map, call->eps}, call->heads, workspace, stream,
                                sum_kernel<T, kWidth>, merge_kernel, apply_kernel<T, kWidth>, causal_kernel<T, kWidth>,
                                s.causal ? kCausalBlocks : kBlocks);
    });
  });
}
