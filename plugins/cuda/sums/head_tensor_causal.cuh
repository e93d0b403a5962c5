// The causal pass of linear and Efficient Attention for tensors of 16 bits.
//
// Computes: a chunk's queries times S as it is at each of them.
// Method:   tile by tile of 64 tokens: Q S, with S as it was before the tile, and the masked (Q K^T) V within it, whose
//           scores go from sums to operands in registers. In Efficient Attention a query's channel is divided by the
//           sum of weights up to its token, which a product of the tile's weights with a triangle of ones gives.
//           A tile with a key far above the reference of its channel is taken in parts, up to each such key.
// See:      head_tensor_passes.cuh
#pragma once

#include "sums/head_state.cuh"

namespace aft::cuda {

template <int kWidth>
struct TensorCausalShared {
  static constexpr int kStages = kWidth <= 64 ? 2 : 1;
  alignas(16) HeadTile<kWidth> queries[kStages];  // then the results
  alignas(16) HeadTile<kWidth> keys[kStages];
  alignas(16) HeadTile<HeadSizes<kWidth>::kValues> values[kStages];
  alignas(16) HeadOperands<kWidth> context;
  float key_sums[kWidth], reference[kWidth], factor[kWidth], row_sums[kTileTokens];
  int cuts[kTensorWarps];
};

// Divides queries, a fragment at depth `k`, by the sums of weights up to each, in all channels.
template <int kWidth>
__device__ __forceinline__ void divide_by_sums(uint32_t (&a)[4], const HeadTile<kWidth>& keys,
                                               const float (&key_sums)[kWidth], int k) {
  constexpr uint32_t kOne = 0x3f80u, kOnes = 0x3f803f80u;  // of bfloat16
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const uint32_t diagonal = 2 * t + 1 <= g ? kOnes : 2 * t <= g ? kOne : 0u;  // of 8 x 8
  float sums[2][4];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const Raw<float, 2> before(&key_sums[k + 8 * j + 2 * t]);
    sums[j][0] = sums[j][2] = before[0];
    sums[j][1] = sums[j][3] = before[1];
  }
  uint32_t b[4];
#pragma unroll 1
  for (int block = 0; block < warp; ++block) {
    load_right(b, keys, 16 * block, k);
    multiply_add_two(sums[0], sums[1], {kOnes, kOnes, kOnes, kOnes}, b);
  }
  load_right(b, keys, 16 * warp, k);
  multiply_add_two(sums[0], sums[1], {diagonal, kOnes, 0u, diagonal}, b);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // A sum of weights may be 0: then the state and the keys are 0 too, and the factor does not matter.
    const auto divide = [](float query, float sum) { return machine::fast_divide(query, fmaxf(sum, 1e-30f)); };
    a[i] = pack<BFloat16>(divide(__uint_as_float(a[i] << 16), sums[i / 2][i % 2 * 2]),
                          divide(__uint_as_float(a[i] & 0xffff0000u), sums[i / 2][i % 2 * 2 + 1]));
  }
}

// The products of the warp's 16 queries with S as it was before the tile, and with its z.
template <int kWidth, class Mechanism>
__device__ __forceinline__ void multiply_state(float (&results)[HeadSizes<kWidth>::kValues / 8][4],
                                               float (&normalizer)[4], TensorCausalShared<kWidth>& shared, int stage) {
  constexpr int kValues = HeadSizes<kWidth>::kValues;
  const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * kWarpTokens;
#pragma unroll(kWidth <= 64 ? kWidth / 16 : 1)
  for (int k = 0; k < kWidth; k += 16) {
    uint32_t a[4];
    load_left(a, shared.queries[stage], row, k);
    if constexpr (Mechanism::kSoftmax) {
      divide_by_sums<kWidth>(a, shared.keys[stage], shared.key_sums, k);
      __syncwarp();  // every lane has read the queries that others divide
#pragma unroll
      for (int i = 0; i < 4; ++i)
        machine::store(&shared.queries[stage][row + lane / 4 + i % 2 * 8][k + lane % 4 * 2 + i / 2 * 8], a[i]);
    }
    add_state_products<Mechanism>(results, normalizer, a, shared.context, k);
  }
  __syncwarp();
}

// The products of the queries with the keys of the tile up to each, and of these scores with the values.
template <int kWidth, class Mechanism>
__device__ __forceinline__ void multiply_keys(float (&results)[HeadSizes<kWidth>::kValues / 8][4],
                                              float (&normalizer)[4], const TensorCausalShared<kWidth>& shared,
                                              int stage) {
  constexpr int kValues = HeadSizes<kWidth>::kValues;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int block = 0; block <= warp; ++block) {
    uint32_t a[4], b[4];
    float scores[2][4] = {};
#pragma unroll(kWidth <= 64 ? kWidth / 16 : 4)
    for (int k = 0; k < kWidth; k += 16) {
      load_left(a, shared.queries[stage], warp * kWarpTokens, k);
      load_right_transposed(b, shared.keys[stage], k, 16 * block);
      multiply_add_two(scores[0], scores[1], a, b);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = i / 2 * 8 + lane % 4 * 2 + e, query = i % 2 * 8 + lane / 4;
        x[e] = block < warp || key <= query ? scores[i / 2][i % 2 * 2 + e] : 0.0f;
      }
      a[i] = pack<BFloat16>(x[0], x[1]);
    }
    if constexpr (Mechanism::kNormalized) add_row_sums(normalizer, a);
#pragma unroll
    for (int j = 0; j < kValues / 8; j += 2) {
      load_right(b, shared.values[stage], 16 * block, 8 * j);
      multiply_add_two(results[j], results[j + 1], a, b);
    }
  }
}

template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ void causal_tiles(const HeadParams<Mechanism>& p) {
  using Shared = TensorCausalShared<kWidth>;
  constexpr int kValues = HeadSizes<kWidth>::kValues, kStages = Shared::kStages;
  auto& shared = shared_memory<Shared>();
  const StridedSequence& s = p.sequence;
  const HeadPlace<kWidth> place(p, p.chunks);
  const int channel = place.head * p.width, lane = threadIdx.x % kWarp;
  const int row = threadIdx.x / kWarp * kWarpTokens + lane / 4;
  const auto copy_queries_and_keys = [&](int stage, int t) {
    const int rows = at_most(place.end - t, kTileTokens), counted = at_most(place.length - t, rows);
    copy_rows<T, kWidth>(shared.queries[stage], s.query, place.batch, t, rows, channel, p.width, p.vectors);
    copy_rows<T, kWidth>(shared.keys[stage], s.key, place.batch, t, counted, channel, p.width, p.vectors);
  };
  const auto copy = [&](int stage, int t) {
    const int counted = at_most(place.length - t, at_most(place.end - t, kTileTokens));
    copy_queries_and_keys(stage, t);
    copy_rows<T, kValues>(shared.values[stage], s.value, place.batch, t, counted, channel + place.first_value,
                          p.width - place.first_value, p.vectors);
    async_commit();
  };
  const auto copy_again = [&](int stage, int t) {
    copy_queries_and_keys(stage, t);
    async_commit();
    async_wait<0>();
  };
  copy(0, place.begin);

  HeadState<kWidth> state;
  state.clear();
  if (place.chunk > 0) state.load(place.state, place.first_value);
  for (int c = threadIdx.x; c < kWidth; c += kTensorThreads) {
    if constexpr (Mechanism::kSoftmax)
      shared.reference[c] = place.chunk > 0 ? place.state[kWidth * kWidth + kWidth + c] : kNoKey;
  }
  __syncthreads();
  state.publish(shared.context, shared.key_sums);

  for (int t = place.begin, stage = 0; t < place.end; t += kTileTokens, stage ^= kStages - 1) {
    const int rows = at_most(place.end - t, kTileTokens), counted = at_most(place.length - t, rows);
    if constexpr (kStages == 2) copy(stage ^ 1, t + kTileTokens);
    async_wait<kStages - 1>();
    convert_values<T, kValues>(shared.values[stage]);

    // Take the rows [first, last) together: the rest of the tile, or the rows before a key far above the reference.
    for (int first = 0, last = rows; first < rows;) {
      weigh_queries<T, kWidth>(p, shared.queries[stage], shared.row_sums);
      const int cut = weigh_keys<T, kWidth>(p, shared.keys[stage], shared.reference, first, counted);
      if constexpr (Mechanism::kSoftmax) publish_cut(shared.cuts, cut);
      __syncthreads();
      if constexpr (Mechanism::kSoftmax) {
        last = at_most(first_cut(shared.cuts), rows);
        if (last == first) {
          raise_reference<T, kWidth>(p, place, t + first, shared.reference, shared.factor);
          state.scale(shared.factor);
          state.publish(shared.context, shared.key_sums);
          copy_again(stage, t);
          continue;
        }
        if (last < rows) {
          clear_rows<kWidth>(shared.keys[stage], last);
          __syncthreads();
        }
      }
      float results[kValues / 8][4] = {}, normalizer[4] = {}, scale[2];
      multiply_state<kWidth, Mechanism>(results, normalizer, shared, stage);
      multiply_keys<kWidth, Mechanism>(results, normalizer, shared, stage);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int seen = at_most(place.length, t + row + 8 * half + 1);
        scale[half] = scale_of_row(p, normalizer, shared.row_sums, row, half, seen);
      }
      write_results<T, kValues, kWidth>(s, results, scale, shared.queries[stage], place.batch, t, first, last,
                                        channel + place.first_value, p.width - place.first_value, p.vectors);
      state.add(shared.keys[stage], shared.values[stage]);
      __syncthreads();
      state.publish(shared.context, shared.key_sums);
      first = last;
      if (Mechanism::kSoftmax && last < rows) copy_again(stage, t);
    }
    if constexpr (kStages == 1) copy(0, t + kTileTokens);
  }
  async_wait<0>();
}

}  // namespace aft::cuda
