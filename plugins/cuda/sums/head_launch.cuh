// The kernels of linear and Efficient Attention, and their launches.
#pragma once

#include "sums/head_causal.cuh"
#include "sums/head_merge.cuh"
#include "sums/head_passes.cuh"
#include "sums/head_tensor_causal.cuh"
#include "sums/head_tensor_passes.cuh"

namespace aft::cuda {

constexpr int kTensorKernelThreads = 128;
constexpr int kTf32KernelThreads = 256;
static_assert(kTensorKernelThreads == kTensorThreads && kTf32KernelThreads == kBlockThreads, "");
static_assert(kTf32KernelThreads == kMergeThreads, "");

template <class T, int kWidth, class Mechanism>
__global__ void __launch_bounds__(kTensorKernelThreads, 2) sum_kernel(const HeadParams<Mechanism> p) {
  sum_tiles<T, kWidth>(p);
}
template <class T, int kWidth, class Mechanism>
__global__ void __launch_bounds__(kTensorKernelThreads, 3) apply_kernel(const HeadParams<Mechanism> p) {
  apply_state<T, kWidth>(p);
}
template <class T, int kWidth, class Mechanism>
__global__ void __launch_bounds__(kTensorKernelThreads, 2) causal_kernel(const HeadParams<Mechanism> p) {
  causal_tiles<T, kWidth>(p);
}
template <class T, int kWidth, class Mechanism>
__global__ void __launch_bounds__(kTf32KernelThreads, 2) tf32_sum_kernel(const HeadParams<Mechanism> p) {
  sum_context<T, kWidth>(p);
}
template <class T, int kWidth, class Mechanism>
__global__ void __launch_bounds__(kTf32KernelThreads, 2) tf32_apply_kernel(const HeadParams<Mechanism> p) {
  apply_context<T, kWidth>(p);
}
template <class T, int kWidth, class Mechanism>
__global__ void __launch_bounds__(kTf32KernelThreads, 2) tf32_causal_kernel(const HeadParams<Mechanism> p) {
  causal_context<T, kWidth>(p);
}
static __global__ void __launch_bounds__(kTf32KernelThreads, 3)
    merge_kernel(float* states, int width, int chunks, bool scan) {
  merge_states(states, width, chunks, scan);
}

// The kernels of a mechanism and their blocks, by whether operands are bfloat16. A launch of causal ones has as many
// blocks as a GPU holds at once, which their shared memory limits.
template <class T, int kWidth, class Mechanism, bool bfloat = kBfloat<T, Mechanism>>
struct HeadLaunch {
  static constexpr int kThreads = kTensorThreads, kTokens = kTileTokens, kBlocks = kMostChunks, kCausalBlocks = 384;
  using Sum = TensorSumShared<kWidth>;
  using Apply = TensorApplyShared<kWidth>;
  using Causal = TensorCausalShared<kWidth>;
  static constexpr auto sum = sum_kernel<T, kWidth, Mechanism>;
  static constexpr auto apply = apply_kernel<T, kWidth, Mechanism>;
  static constexpr auto causal = causal_kernel<T, kWidth, Mechanism>;
};
template <class T, int kWidth, class Mechanism>
struct HeadLaunch<T, kWidth, Mechanism, false> {
  static constexpr int kThreads = kBlockThreads, kTokens = HeadSizes<kWidth>::kQueries, kBlocks = kMostChunks;
  static constexpr int kCausalBlocks = 256;
  using Sum = SumShared<kWidth>;
  using Apply = ApplyShared<kWidth>;
  using Causal = CausalShared<kWidth>;
  static constexpr auto sum = tf32_sum_kernel<T, kWidth, Mechanism>;
  static constexpr auto apply = tf32_apply_kernel<T, kWidth, Mechanism>;
  static constexpr auto causal = tf32_causal_kernel<T, kWidth, Mechanism>;
};

// Cuts the work and enqueues the kernels.
template <class T, int kWidth, class Mechanism>
int enqueue(const StridedSequence& s, const Mechanism& mechanism, int64_t heads, void* workspace, cudaStream_t stream) {
  using Launch = HeadLaunch<T, kWidth, Mechanism>;
  constexpr int64_t kSlices = HeadSizes<kWidth>::kSlices;
  const int64_t all_heads = s.batch * heads, width = s.channels / heads;
  const int64_t blocks = s.causal ? Launch::kCausalBlocks : Launch::kBlocks;
  const int64_t most = most_chunks(s.tokens, all_heads, kWidth, kSlices, blocks);
  const int64_t chunk = round_up<int64_t>(ceil_div(s.tokens, most), Launch::kTokens);
  const int64_t chunks = ceil_div(s.tokens, chunk);
  const HeadParams<Mechanism> params{s,
                                     mechanism,
                                     static_cast<int>(heads),
                                     static_cast<int>(width),
                                     static_cast<int>(chunk),
                                     static_cast<int>(chunks),
                                     width % kVector<T> == 0 && all_aligned<T>(s),
                                     static_cast<float*>(workspace)};
  const auto grid = [&](int64_t chunks) { return dim3(static_cast<unsigned>(all_heads * chunks * kSlices)); };
  const int64_t summed = s.causal ? chunks - 1 : chunks;
  int status = 0;
  if (summed > 0) status = launch<typename Launch::Sum>(Launch::sum, grid(summed), Launch::kThreads, stream, params);
  if (status == 0 && chunks > 1)
    status = launch<MergeShared>(merge_kernel, dim3(static_cast<unsigned>(all_heads * kWidth)), kMergeThreads, stream,
                                 params.states, kWidth, params.chunks, s.causal != 0);
  if (status) return status;
  if (s.causal) return launch<typename Launch::Causal>(Launch::causal, grid(chunks), Launch::kThreads, stream, params);
  return launch<typename Launch::Apply>(Launch::apply, grid(chunks), Launch::kThreads, stream, params);
}

}  // namespace aft::cuda
