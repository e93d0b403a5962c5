// The launches of linear and Efficient Attention.
#pragma once

#include "mechanisms/shared/head_causal.cuh"
#include "mechanisms/shared/head_passes.cuh"

namespace aft::cuda {

// Cuts the work and enqueues the kernels, which call the passes above and merge_states.
template <class T, int kWidth, class Mechanism>
int enqueue(const AftCudaSequence& s, const Mechanism& mechanism, int64_t heads, void* workspace, cudaStream_t stream,
            void (*sum)(HeadParams<Mechanism>), void (*merge)(float*, int64_t, int, int, bool),
            void (*apply)(HeadParams<Mechanism>), void (*causal)(HeadParams<Mechanism>), int64_t blocks) {
  const int64_t all_heads = s.batch * heads, width = s.channels / heads;
  const int64_t chunk = round_up<int64_t>(ceil_div(s.tokens, most_chunks(s.tokens, all_heads, kWidth, blocks)),
                                          HeadSizes<kWidth>::kQueries);
  const int64_t chunks = ceil_div(s.tokens, chunk);
  const HeadParams<Mechanism> params{s,
                                     mechanism,
                                     static_cast<int>(heads),
                                     static_cast<int>(width),
                                     static_cast<int>(chunk),
                                     static_cast<int>(chunks),
                                     width % kVector<T> == 0 && all_aligned<T>(s),
                                     static_cast<float*>(workspace)};
  const auto grid = [&](int64_t chunks) {
    return dim3(static_cast<unsigned>(all_heads * chunks * HeadSizes<kWidth>::kSlices));
  };
  const int64_t summed = s.causal ? chunks - 1 : chunks;
  if (summed > 0)
    if (const int status = launch<SumShared<kWidth>>(sum, grid(summed), kBlockThreads, stream, params)) return status;
  if (chunks > 1) {
    const dim3 rows(static_cast<unsigned>(ceil_div<int64_t>(all_heads * kWidth, kBlockWarps)));
    if (const int status =
            launch(merge, rows, kBlockThreads, stream, params.states, all_heads, kWidth, params.chunks, s.causal != 0))
      return status;
  }
  if (s.causal) return launch<CausalShared<kWidth>>(causal, grid(chunks), kBlockThreads, stream, params);
  return launch<ApplyShared<kWidth>>(apply, grid(chunks), kBlockThreads, stream, params);
}

}  // namespace aft::cuda
