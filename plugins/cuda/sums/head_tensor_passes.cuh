// The passes of linear and Efficient Attention over tiles of 64 tokens of one head with bfloat16 operands, for tensors
// of 16 bits.
//
// Computes: sum_tiles:   S and z of a chunk's keys, in the workspace
//           apply_state: a chunk's queries times the whole S
// Method:   tiles are copied one ahead. Weights relative to a reference of their channel, an earlier key, stay in range
//           until a key lies far above it; then the reference is raised and the sums are scaled.
// See:      head_tiles.cuh, head_state.cuh, head_tensor_causal.cuh; the members of a mechanism: head_passes.cuh
#pragma once

#include "sums/head_state.cuh"

namespace aft::cuda {

// Stages of shared memory for tiles of keys and values.
template <int kWidth>
struct TensorSumShared {
  alignas(16) HeadTile<kWidth> keys[2];
  alignas(16) HeadTile<HeadSizes<kWidth>::kValues> values[2];
  float reference[kWidth], factor[kWidth];
  int cuts[kTensorWarps];
};

template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ void sum_tiles(const HeadParams<Mechanism>& p) {
  constexpr int kValues = HeadSizes<kWidth>::kValues;
  auto& shared = shared_memory<TensorSumShared<kWidth>>();
  const StridedSequence& s = p.sequence;
  const HeadPlace<kWidth> place(p, s.causal ? p.chunks - 1 : p.chunks);
  const int end = place.end < place.length ? place.end : place.length;
  const int channel = place.head * p.width;
  const auto copy_keys = [&](int stage, int t) {
    copy_rows<T, kWidth>(shared.keys[stage], s.key, place.batch, t, at_most(end - t, kTileTokens), channel, p.width,
                         p.vectors);
  };
  const auto copy = [&](int stage, int t) {
    copy_keys(stage, t);
    copy_rows<T, kValues>(shared.values[stage], s.value, place.batch, t, at_most(end - t, kTileTokens),
                          channel + place.first_value, p.width - place.first_value, p.vectors);
    async_commit();
  };
  copy(0, place.begin);
  for (int c = threadIdx.x; c < kWidth; c += kTensorThreads) shared.reference[c] = Mechanism::kSoftmax ? kNoKey : 0.0f;
  __syncthreads();
  HeadState<kWidth> state;
  state.clear();
  for (int t = place.begin, stage = 0; t < end; t += kTileTokens, stage ^= 1) {
    const int count = at_most(end - t, kTileTokens);
    copy(stage ^ 1, t + kTileTokens);
    async_wait<1>();
    convert_values<T, kValues>(shared.values[stage]);
    int cut = weigh_keys<T, kWidth>(p, shared.keys[stage], shared.reference, 0, count);
    if constexpr (Mechanism::kSoftmax) publish_cut(shared.cuts, cut);
    __syncthreads();
    if constexpr (Mechanism::kSoftmax) {
      while ((cut = first_cut(shared.cuts)) < count) {
        raise_reference<T, kWidth>(p, place, t + cut, shared.reference, shared.factor);
        state.scale(shared.factor);
        copy_keys(stage, t);
        async_commit();
        async_wait<0>();
        publish_cut(shared.cuts, weigh_keys<T, kWidth>(p, shared.keys[stage], shared.reference, 0, count));
        __syncthreads();
      }
    }
    state.add(shared.keys[stage], shared.values[stage]);
    __syncthreads();
  }
  async_wait<0>();
  state.write(place.state, place.first_value);
  if (place.first_value != 0) return;
  for (int c = threadIdx.x; c < kWidth; c += kTensorThreads)
    place.state[kWidth * kWidth + kWidth + c] = shared.reference[c];
}

template <int kWidth>
struct TensorApplyShared {
  alignas(16) HeadTile<kWidth> queries[2];
  alignas(16) HeadOperands<kWidth> context;
  float row_sums[kTileTokens];
};

template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ void apply_state(const HeadParams<Mechanism>& p) {
  constexpr int kValues = HeadSizes<kWidth>::kValues;
  auto& shared = shared_memory<TensorApplyShared<kWidth>>();
  const StridedSequence& s = p.sequence;
  const HeadPlace<kWidth> place(p, p.chunks);
  const int channel = place.head * p.width;
  const float *state = place.state - place.chunk * state_floats(kWidth), *key_sums = state + kWidth * kWidth;
  const auto copy = [&](int stage, int t) {
    copy_rows<T, kWidth>(shared.queries[stage], s.query, place.batch, t, at_most(place.end - t, kTileTokens), channel,
                         p.width, p.vectors);
    async_commit();
  };
  copy(0, place.begin);
  for (int unit = threadIdx.x * 4; unit < kWidth * kValues; unit += kTensorThreads * 4) {
    const int c = unit / kValues, column = unit % kValues;
    const Raw<float, 4> raw(state + c * kWidth + place.first_value + column);
    const float sum = key_sums[c];
    const float factor = !Mechanism::kSoftmax ? 1.0f : sum == 0.0f ? 0.0f : 1.0f / sum;
    store(&shared.context[c][column], {raw[0] * factor, raw[1] * factor, raw[2] * factor, raw[3] * factor});
    if (column == 0) machine::store(&shared.context[c][kValues], split_key_sum(sum));
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * kWarpTokens;
  for (int t = place.begin, stage = 0; t < place.end; t += kTileTokens, stage ^= 1) {
    copy(stage ^ 1, t + kTileTokens);
    async_wait<1>();
    weigh_queries<T, kWidth>(p, shared.queries[stage], shared.row_sums);
    __syncwarp();
    float results[kValues / 8][4] = {}, normalizer[4] = {};
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      uint32_t a[4];
      load_left(a, shared.queries[stage], row, k);
      add_state_products<Mechanism>(results, normalizer, a, shared.context, k);
    }
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      scale[half] = scale_of_row(p, normalizer, shared.row_sums, row + lane / 4, half, place.length);
    write_results<T, kValues, kWidth>(s, results, scale, shared.queries[stage], place.batch, t, 0,
                                      at_most(place.end - t, kTileTokens), channel + place.first_value,
                                      p.width - place.first_value, p.vectors);
  }
  async_wait<0>();
}

}  // namespace aft::cuda
