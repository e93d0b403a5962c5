// The passes of linear and Efficient Attention over tiles of tokens of one head with tf32 operands; the causal pass is
// in head_causal.cuh.
//
// Computes: sum_context:   S and the sums of the weights over a chunk's keys, in the workspace
//           apply_context: a chunk's queries times the whole S
// Method:   tiles lie in shared memory as float32. Products of float32 tensors split them into two tf32 operands, see
//           block_product.cuh; tf32 holds every float16 number exactly.
// See:      head_context.cuh, head_causal.cuh, head_launch.cuh; with bfloat16 operands: head_tensor_passes.cuh
//
// A mechanism, which the .cu file defines, has these members. kLanes neighboring lanes hold a query row, this one
// the channels first, first + apart, ...
//
// | member                             | meaning                                                         |
// |------------------------------------|-----------------------------------------------------------------|
// | kSoftmax                           | keys have the weight exp(key - reference), queries the softmax  |
// |                                    | over channels; S is divided by sums of weights                  |
// | kNormalized                        | a row is divided by the sum of its weights, query * (sum of key |
// |                                    | weights)                                                        |
// | kAverages                          | a row is an average of values, so no larger than they           |
// | compute_key_weight(key, reference) | the weight of one number of a key                               |
// | compute_query_weights<kLanes>      | replaces a query by its weights, returns their sum for kSoftmax |
// |     (query, first, apart, width)   |                                                                 |
// | row_scale(sum, keys)               | the factor of a row with that sum                               |
#pragma once

#include "sums/head_context.cuh"

namespace aft::cuda {

// Whether a tile is loaded during the work on the tile before, which takes more registers.
template <class T, int kWidth>
constexpr bool kAhead = sizeof(T) * kWidth <= 256;

// Whether products need both parts of their operands.
template <class T>
constexpr bool kExact = sizeof(T) == 4;

template <int kWidth>
struct SumShared {
  using Sizes = HeadSizes<kWidth>;
  alignas(16) float keys[Sizes::kTokens][kWidth + 8];
  alignas(16) float values[Sizes::kTokens][Sizes::kValues + 8];
  float partial[Sizes::kGroups][kWidth], factor[kWidth];
};

template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ void sum_context(const HeadParams<Mechanism>& p) {
  using Sizes = HeadSizes<kWidth>;
  constexpr int kTokens = Sizes::kTokens, kGroupTokens = kTokens / Sizes::kGroups, kValues = Sizes::kValues;
  auto& shared = shared_memory<SumShared<kWidth>>();
  const StridedSequence& s = p.sequence;
  const HeadPlace<kWidth> place(p, s.causal ? p.chunks - 1 : p.chunks);
  const int end = place.end < place.length ? place.end : place.length;
  const int channel = place.head * p.width;
  const int column = threadIdx.x % kWidth, group = threadIdx.x / kWidth, first_row = group * kGroupTokens;

  TileRows<T, kTokens, kWidth> keys;
  TileRows<T, kTokens, kValues> values;
  const auto load = [&](int t) {
    const int count = at_most(end - t, kTokens);
    keys.load(s.key, place.batch, t, count, channel, p.width, p.vectors);
    values.load(s.value, place.batch, t, count, channel + place.first_value, p.width - place.first_value, p.vectors);
  };
  Product<kWidth, kValues> context;
  context.clear();
  float maximum = Mechanism::kSoftmax ? kNoKey : 0.0f, sum = 0.0f;
  if constexpr (kAhead<T, kWidth>) load(place.begin);
  for (int t = place.begin; t < end; t += kTokens) {
    const int count = at_most(end - t, kTokens) - first_row;  // of this thread's keys
    if constexpr (!kAhead<T, kWidth>) load(t);
    keys.store_to(shared.keys);
    values.store_to(shared.values);
    if constexpr (kAhead<T, kWidth>) load(t + kTokens);
    __syncthreads();
    float key[kGroupTokens];
#pragma unroll
    for (int i = 0; i < kGroupTokens; ++i) key[i] = shared.keys[first_row + i][column];
    if constexpr (Mechanism::kSoftmax) {
      float new_maximum = kNoKey;
#pragma unroll
      for (int i = 0; i < kGroupTokens; ++i)
        if (i < count) new_maximum = fmaxf(new_maximum, key[i]);
      shared.partial[group][column] = new_maximum;
      __syncthreads();
      new_maximum = maximum;
#pragma unroll
      for (int g = 0; g < Sizes::kGroups; ++g) new_maximum = fmaxf(new_maximum, shared.partial[g][column]);
      const float factor = machine::fast_exp(maximum - new_maximum);
      if (group == 0) shared.factor[column] = factor;
      sum *= factor;
      maximum = new_maximum;
    }
#pragma unroll
    for (int i = 0; i < kGroupTokens; ++i) {
      const float weight = i < count ? p.mechanism.compute_key_weight(key[i], maximum) : 0.0f;
      sum += weight;
      shared.keys[first_row + i][column] = weight;
    }
    __syncthreads();
    if constexpr (Mechanism::kSoftmax) context.for_each([&](int r, int, float& x) { x *= shared.factor[r]; });
    context.template add<kExact<T>, kExact<T>>(
        kTokens, [&](int r, int k) { return shared.keys[k][r]; }, [&](int k, int c) { return shared.values[k][c]; });
    __syncthreads();
  }

  float* matrix = place.state + place.first_value;
  context.for_each([&](int r, int c, float& x) { matrix[r * kWidth + c] = x; });
  shared.partial[group][column] = sum;
  __syncthreads();
  if (place.first_value != 0 || group != 0) return;
#pragma unroll
  for (int g = 1; g < Sizes::kGroups; ++g) sum += shared.partial[g][column];
  place.state[kWidth * kWidth + column] = sum;
  place.state[kWidth * kWidth + kWidth + column] = maximum;
}

// The number of lanes that share a row of a tile of kRows rows, and that row.
template <int kRows, int kWidth>
struct RowLanes {
  static constexpr int kLanes = kBlockThreads / kRows, kMine = kWidth / kLanes;
  int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
};

// Makes weights of the queries in a tile; returns the sum of the weights of this thread's row.
template <int kRows, int kWidth, int kStride, class Mechanism>
__device__ __forceinline__ float compute_tile_weights(const HeadParams<Mechanism>& p, float (&tile)[kRows][kStride],
                                                      const float* key_sums) {
  using Lanes = RowLanes<kRows, kWidth>;
  const Lanes lanes;
  float query[Lanes::kMine];
#pragma unroll
  for (int i = 0; i < Lanes::kMine; ++i) query[i] = tile[lanes.row][lanes.lane + i * Lanes::kLanes];
  float sum = p.mechanism.template compute_query_weights<Lanes::kLanes>(query, lanes.lane, Lanes::kLanes, p.width);
  if constexpr (Mechanism::kNormalized) {
#pragma unroll
    for (int i = 0; i < Lanes::kMine; ++i) sum += query[i] * key_sums[lanes.lane + i * Lanes::kLanes];
    sum = sum_lanes<Lanes::kLanes>(sum);
  }
#pragma unroll
  for (int i = 0; i < Lanes::kMine; ++i) tile[lanes.row][lanes.lane + i * Lanes::kLanes] = query[i];
  return sum;
}

template <int kWidth>
struct ApplyShared {
  using Sizes = HeadSizes<kWidth>;
  alignas(16) float context[kWidth][Sizes::kValues + 8];
  alignas(16) float queries[Sizes::kQueries][kWidth + 4];  // and then the results
  float key_sums[kWidth], scale[Sizes::kQueries];
};

template <class T, int kWidth, class Mechanism>
__device__ __forceinline__ void apply_context(const HeadParams<Mechanism>& p) {
  using Sizes = HeadSizes<kWidth>;
  using Lanes = RowLanes<Sizes::kQueries, kWidth>;
  constexpr int kQueries = Sizes::kQueries, kValues = Sizes::kValues;
  auto& shared = shared_memory<ApplyShared<kWidth>>();
  const StridedSequence& s = p.sequence;
  const HeadPlace<kWidth> place(p, p.chunks);
  const int channel = place.head * p.width;
  const int depth = round_up(p.width, 8);
  const float *state = place.state - place.chunk * state_floats(kWidth), *key_sums = state + kWidth * kWidth;

  TileRows<T, kQueries, kWidth> queries;
  const auto load = [&](int t) {
    queries.load(s.query, place.batch, t, at_most(place.end - t, kQueries), channel, p.width, p.vectors);
  };
  if constexpr (kAhead<T, kWidth>) load(place.begin);
  for (int c = threadIdx.x; c < kWidth; c += kBlockThreads) shared.key_sums[c] = key_sums[c];
  for (int unit = threadIdx.x * 4; unit < kWidth * kValues; unit += kBlockThreads * 4) {
    const int c = unit / kValues, column = unit % kValues;
    const Raw<float, 4> raw(state + c * kWidth + place.first_value + column);
    float factor = 1.0f;
    if constexpr (Mechanism::kSoftmax) factor = key_sums[c] == 0.0f ? 0.0f : 1.0f / key_sums[c];
    const float x[4] = {raw[0] * factor, raw[1] * factor, raw[2] * factor, raw[3] * factor};
    store(&shared.context[c][column], x);
  }

  for (int t = place.begin; t < place.end; t += kQueries) {
    const int count = at_most(place.end - t, kQueries);
    if constexpr (!kAhead<T, kWidth>) load(t);
    queries.store_to(shared.queries);
    if constexpr (kAhead<T, kWidth>) load(t + kQueries);
    __syncthreads();
    const Lanes lanes;
    const float sum = compute_tile_weights<kQueries, kWidth>(p, shared.queries, shared.key_sums);
    if (lanes.lane == 0) shared.scale[lanes.row] = p.mechanism.row_scale(sum, place.length);
    __syncthreads();
    Product<kQueries, kValues> result;
    result.clear();
    result.template add<kExact<T>, kExact<T>>(
        depth, [&](int r, int k) { return shared.queries[r][k]; }, [&](int k, int c) { return shared.context[k][c]; });
    __syncthreads();
    result.for_each([&](int r, int c, float& x) { shared.queries[r][c] = x * shared.scale[r]; });
    __syncthreads();
    write_rows<T, kValues>(s, shared.queries, place.batch, t, 0, count, channel + place.first_value,
                           p.width - place.first_value, p.vectors);
    __syncthreads();
  }
}

}  // namespace aft::cuda
