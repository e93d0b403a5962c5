// The launches of linear and Efficient Attention.
#pragma once

#include "mechanisms/shared/head_causal.cuh"
#include "mechanisms/shared/head_merge.cuh"
#include "mechanisms/shared/head_passes.cuh"
#include "mechanisms/shared/head_tensor_causal.cuh"
#include "mechanisms/shared/head_tensor_passes.cuh"

namespace aft::cuda {

// The kernels of a mechanism, which call the passes.
template <class Mechanism>
struct HeadKernels {
  void (*sum)(HeadParams<Mechanism>);
  void (*merge)(float*, int, int, bool);
  void (*apply)(HeadParams<Mechanism>);
  void (*causal)(HeadParams<Mechanism>);
};

// Their blocks, by whether operands are bfloat16. Causal ones fill a GPU with what it holds at once, as each block has
// much shared memory.
template <bool bfloat, int kWidth>
struct HeadLaunch {
  static constexpr int kThreads = kTensorThreads, kTokens = kTileTokens, kBlocks = kMostChunks, kCausalBlocks = 384;
  using Sum = TensorSumShared<kWidth>;
  using Apply = TensorApplyShared<kWidth>;
  using Causal = TensorCausalShared<kWidth>;
};
template <int kWidth>
struct HeadLaunch<false, kWidth> {
  static constexpr int kThreads = kBlockThreads, kTokens = HeadSizes<kWidth>::kQueries, kBlocks = kMostChunks;
  static constexpr int kCausalBlocks = 256;
  using Sum = SumShared<kWidth>;
  using Apply = ApplyShared<kWidth>;
  using Causal = CausalShared<kWidth>;
};

// Cuts the work and enqueues the kernels.
template <class T, int kWidth, class Mechanism>
int enqueue(const AftCudaSequence& s, const Mechanism& mechanism, int64_t heads, void* workspace, cudaStream_t stream,
            const HeadKernels<Mechanism>& kernels) {
  using Launch = HeadLaunch<kBfloat<T, Mechanism>, kWidth>;
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
  if (summed > 0)
    status = launch<typename Launch::Sum>(kernels.sum, grid(summed), Launch::kThreads, stream, params);
  if (status == 0 && chunks > 1)
    status = launch<MergeShared>(kernels.merge, dim3(static_cast<unsigned>(all_heads * kWidth)), kMergeThreads, stream,
                                 params.states, kWidth, params.chunks, s.causal != 0);
  if (status) return status;
  if (s.causal)
    return launch<typename Launch::Causal>(kernels.causal, grid(chunks), Launch::kThreads, stream, params);
  return launch<typename Launch::Apply>(kernels.apply, grid(chunks), Launch::kThreads, stream, params);
}

}  // namespace aft::cuda
