// The causal pass of linear and Efficient Attention with tf32 operands.
//
// Computes: a chunk's queries times S as it is at each of them.
// Method:   tile by tile: the product with S as it was before the tile, and within the tile the masked product of
//           queries and keys.
// See:      head_passes.cuh
#pragma once

#include "sums/head_passes.cuh"

namespace aft::cuda {

template <int kWidth>
struct CausalShared {
  using Sizes = HeadSizes<kWidth>;
  alignas(16) float context[kWidth][Sizes::kValues + 8];
  alignas(16) float queries[Sizes::kCausalTokens][kWidth + 4];  // then the scores, then the results
  alignas(16) float keys[Sizes::kCausalTokens][kWidth + 4];
  alignas(16) float values[Sizes::kCausalTokens][Sizes::kValues + 8];
  float partial[Sizes::kGroups][kWidth], new_maximum[Sizes::kGroups][kWidth], factor[kWidth], key_sums[kWidth];
  float next_key[kWidth], scale[Sizes::kCausalTokens];
  int cut[kBlockWarps];
};

// Returns the first row in [first, end) that has a key too far above the maximum in some channel.
template <int kWidth, int kGroupTokens>
__device__ __forceinline__ int first_too_high(CausalShared<kWidth>& shared, const float (&key)[kGroupTokens],
                                              float maximum, int first_row, int first, int end) {
  int cut = HeadSizes<kWidth>::kCausalTokens;
#pragma unroll
  for (int i = kGroupTokens - 1; i >= 0; --i)
    if (first_row + i >= first && first_row + i < end && key[i] - maximum > kSafeSpread) cut = first_row + i;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int other = __shfl_xor_sync(~0u, cut, distance);
    cut = other < cut ? other : cut;
  }
  if (threadIdx.x % kWarp == 0) shared.cut[threadIdx.x / kWarp] = cut;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kBlockWarps; ++warp) cut = shared.cut[warp] < cut ? shared.cut[warp] : cut;
  return cut;
}

template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ void causal_context(const HeadParams<Mechanism>& p) {
  using Sizes = HeadSizes<kWidth>;
  using Lanes = RowLanes<Sizes::kCausalTokens, kWidth>;
  constexpr int kTokens = Sizes::kCausalTokens, kValues = Sizes::kValues;
  constexpr int kGroups = Sizes::kGroups, kGroupTokens = kTokens / kGroups;
  auto& shared = shared_memory<CausalShared<kWidth>>();
  const StridedSequence& s = p.sequence;
  const HeadPlace<kWidth> place(p, p.chunks);
  const int channel = place.head * p.width;
  const int column = threadIdx.x % kWidth, group = threadIdx.x / kWidth, first_row = group * kGroupTokens;
  const int depth = round_up(p.width, 8);

  TileRows<T, kTokens, kWidth> queries, keys;
  TileRows<T, kTokens, kValues> values;
  const auto load = [&](int t) {
    const int rows = at_most(place.end - t, kTokens), counted = at_most(place.length - t, rows);
    queries.load(s.query, place.batch, t, rows, channel, p.width, p.vectors);
    keys.load(s.key, place.batch, t, counted, channel, p.width, p.vectors);
    values.load(s.value, place.batch, t, counted, channel + place.first_value, p.width - place.first_value, p.vectors);
  };
  if constexpr (kAhead<T, kWidth>) load(place.begin);

  // Begin with the sums of all chunks before this one.
  float maximum = Mechanism::kSoftmax ? kNoKey : 0.0f, key_sum = 0.0f;
  if (place.chunk > 0) {
    key_sum = place.state[kWidth * kWidth + column];
    if constexpr (Mechanism::kSoftmax) maximum = place.state[kWidth * kWidth + kWidth + column];
  }
  for (int at = threadIdx.x; at < kWidth * kValues; at += kBlockThreads) {
    const int c = at / kValues, e = at % kValues;
    shared.context[c][e] = place.chunk > 0 ? place.state[c * kWidth + place.first_value + e] : 0.0f;
  }
  if (group == 0) shared.key_sums[column] = key_sum;

  for (int t = place.begin; t < place.end; t += kTokens) {
    const int rows = at_most(place.end - t, kTokens), counted = at_most(place.length - t, rows);
    if constexpr (!kAhead<T, kWidth>) load(t);
    queries.store_to(shared.queries);
    keys.store_to(shared.keys);
    values.store_to(shared.values);
    if constexpr (kAhead<T, kWidth>) load(t + kTokens);
    __syncthreads();
    const Lanes lanes;
    const float query_sum = compute_tile_weights<kTokens, kWidth>(p, shared.queries, shared.key_sums);
    float key[kGroupTokens];
#pragma unroll
    for (int i = 0; i < kGroupTokens; ++i) key[i] = shared.keys[first_row + i][column];
    if constexpr (Mechanism::kSoftmax) {
      if (group == 0) shared.next_key[column] = key[0];
      __syncthreads();
    }

    // Take the rows [first, last) together: the rest of the tile, or the rows before a key far above the maximum.
    for (int first = 0, last = rows; first < rows; first = last) {
      if constexpr (Mechanism::kSoftmax) {
        last = first_too_high(shared, key, maximum, first_row, first, counted);
        last = last < rows ? last : rows;
        if (last == first) {  // raise the maximum to the next key
          const float new_maximum = fmaxf(maximum, shared.next_key[column]);
          const float factor = machine::fast_exp(maximum - new_maximum);
          maximum = new_maximum;
          key_sum *= factor;
          if (group == 0) shared.factor[column] = factor;
          __syncthreads();
          for (int at = threadIdx.x; at < kWidth * kValues; at += kBlockThreads)
            shared.context[at / kValues][at % kValues] *= shared.factor[at / kValues];
          __syncthreads();
          continue;
        }
      }

      // Compute the weights of the keys and, for each channel, their running sum over the rows.
      const int end = last < counted ? last : counted;
      float sum = 0.0f, new_maximum = maximum;
#pragma unroll
      for (int i = 0; i < kGroupTokens; ++i) {
        const int r = first_row + i;
        const bool counts = r >= first && r < end;
        const float weight = counts ? p.mechanism.compute_key_weight(key[i], maximum) : 0.0f;
        if (counts) new_maximum = fmaxf(new_maximum, key[i]);
        shared.keys[r][column] = weight;
        sum += weight;
      }
      shared.partial[group][column] = sum;
      if constexpr (Mechanism::kSoftmax) {
        shared.new_maximum[group][column] = new_maximum;
#pragma unroll
        for (int i = 0; i < kGroupTokens; ++i)
          if (first_row + i == last) shared.next_key[column] = key[i];
      }
      __syncthreads();
      float before = 0.0f, all = 0.0f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (g < group) before += shared.partial[g][column];
        all += shared.partial[g][column];
        if constexpr (Mechanism::kSoftmax) new_maximum = fmaxf(new_maximum, shared.new_maximum[g][column]);
      }
      if constexpr (Mechanism::kSoftmax) {
#pragma unroll 2
        for (int i = 0; i < kGroupTokens; ++i) {
          const int r = first_row + i;
          before += shared.keys[r][column];
          const float total = key_sum + before;
          const float query = shared.queries[r][column];
          if (r >= first && r < last) shared.queries[r][column] = total == 0.0f ? 0.0f : query / total;
        }
        const float factor = machine::fast_exp(maximum - new_maximum);
        if (group == 0) shared.factor[column] = factor;
        key_sum = (key_sum + all) * factor;
        maximum = new_maximum;
      } else {
        key_sum += all;
        if (group == 0) shared.key_sums[column] = key_sum;
      }
      __syncthreads();

      Product<kTokens, kValues> result;
      Product<kTokens, kTokens> scores;
      const auto query_at = [&](int r, int k) { return shared.queries[r][k]; };
      const auto value_at = [&](int k, int c) { return shared.values[k][c]; };
      result.clear();
      // Leave out kRounded: these products have few steps, and no registers are left for it.
      result.template add<kExact<T>, kExact<T>, false>(depth, query_at,
                                                       [&](int k, int c) { return shared.context[k][c]; });
      scores.clear();
      scores.template add<kExact<T>, kExact<T>, false>(depth, query_at,
                                                       [&](int k, int c) { return shared.keys[c][k]; });
      __syncthreads();
      scores.for_each([&](int r, int c, float& x) {
        if (r >= first && r < last) shared.queries[r][c] = c <= r ? x : 0.0f;
      });
      __syncthreads();
      {
        float row_sum = query_sum;
        if constexpr (Mechanism::kNormalized) {
          float within = 0.0f;
#pragma unroll
          for (int i = lanes.lane; i < kTokens; i += Lanes::kLanes) within += shared.queries[lanes.row][i];
          row_sum += sum_lanes<Lanes::kLanes>(within);
        }
        const int keys_seen = t + lanes.row + 1 < place.length ? t + lanes.row + 1 : place.length;
        if (lanes.lane == 0) shared.scale[lanes.row] = p.mechanism.row_scale(row_sum, keys_seen);
      }
      result.template add<kExact<T>, kExact<T>, false>(kTokens, query_at, value_at);
      Product<kWidth, kValues> context;  // only the tile's, so that the sum over tiles is rounded
      context.clear();
      context.template add<kExact<T>, kExact<T>, false>(
          kTokens, [&](int r, int k) { return shared.keys[k][r]; }, value_at);
      context.for_each([&](int r, int c, float& x) {
        x += shared.context[r][c];
        if constexpr (Mechanism::kSoftmax) x *= shared.factor[r];
        shared.context[r][c] = x;
      });
      __syncthreads();
      result.for_each([&](int r, int c, float& x) {
        if (r >= first && r < last) shared.queries[r][c] = x * shared.scale[r];
      });
      __syncthreads();
      write_rows<T, kValues>(s, shared.queries, place.batch, t, first, last, channel + place.first_value,
                             p.width - place.first_value, p.vectors);
      __syncthreads();
    }
  }
}

}  // namespace aft::cuda
