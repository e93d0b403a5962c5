// Merging of the sums of chunks that a pooling left in the workspace.
//
// Computes: the mean of all chunks, or the mean before each chunk.
// Method:   a warp has a channel of one group of at most kMergeChunks consecutive chunks, each lane a run of them, and
//           merges the lanes by shuffles. If there are more chunks, a launch of its own merges them group by group
//           first, which costs about 1.5 us; the other launch then merges the groups. So a lane merges at most
//           kMergeChunks / 32 chunks of a group in a row, and the order is fixed. Chunks of pool_tile.cuh are few, so
//           one launch merges them all.
// Cost:     each sum is read once, by a scan twice.
#pragma once

#include "sums/head_softmax_pool.cuh"

namespace aft::cuda {

constexpr int kMergeThreads = 256;
constexpr int kMergeWarps = kMergeThreads / kWarp;
constexpr int kMergeChunks = 256;
constexpr int kLaneChunks = kMergeChunks / kWarp;

// Chunks or groups of chunks.
__host__ __device__ constexpr int merge_groups(int chunks) { return ceil_div(chunks, kMergeChunks); }

// Reads and writes a channel's records of one document.
struct ChannelRecords {
  const PoolRecords& records;
  int64_t first;  // record of the document
  int64_t channels;
  int heads, channel, head;
  bool leads;  // writes the numbers that the head's channels share

  __device__ RunningSum operator[](int index) const {
    const int64_t at = (first + index) * heads + head;
    return {records.maxima[at], records.sums[(first + index) * channels + channel], records.denominators[at]};
  }
  __device__ void set(int index, const RunningSum& sum) const {
    const int64_t at = (first + index) * heads + head;
    records.sums[(first + index) * channels + channel] = sum.numerator;
    if (!leads) return;
    records.denominators[at] = sum.denominator;
    records.maxima[at] = sum.maximum;
  }
};

// The channel of this warp, and the group of chunks; every lane has the same.
struct MergePlace {
  int64_t batch, index;  // index of the channel among all documents'
  int channel, head, group;
  bool active, leads;

  __device__ MergePlace(const PoolParams& p, int groups) {
    const int64_t channels = p.sequence.channels;
    const unsigned blocks = static_cast<unsigned>(ceil_div<int64_t>(p.sequence.batch * channels, kMergeWarps));
    index = static_cast<int64_t>(blockIdx.x % blocks) * kMergeWarps + threadIdx.x / kWarp;
    group = static_cast<int>(blockIdx.x / blocks % groups);
    active = index < p.sequence.batch * channels;
    if (!active) index = 0;
    batch = index / channels;
    channel = static_cast<int>(index % channels);
    head = head_of(p, channel);
    leads = channel % p.width == 0;
  }

  __device__ ChannelRecords of(const PoolParams& p, const PoolRecords& records, int count) const {
    return {records, batch * count, p.sequence.channels, p.heads, channel, head, leads};
  }
};

// Calls f(index, record) for the records begin, begin + stride, ... below end, kAtOnce of them loaded together.
template <class F>
__device__ __forceinline__ void for_each_record(const ChannelRecords& records, int begin, int end, int stride,
                                                const F& f) {
  constexpr int kAtOnce = 8;
  for (int first = begin; first < end; first += kAtOnce * stride) {
    RunningSum sums[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      sums[i] = first + i * stride < end ? records[first + i * stride] : RunningSum::empty();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i * stride < end) f(first + i * stride, sums[i]);
  }
}

// Records begin to end merged by the warp; every lane has the result.
__device__ __forceinline__ RunningSum merge_by_warp(const ChannelRecords& records, int begin, int end) {
  RunningSum total = RunningSum::empty();
  for_each_record(records, begin + static_cast<int>(threadIdx.x % kWarp), end, kWarp,
                  [&](int, const RunningSum& sum) { total.merge(sum); });
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) total.merge(shuffle_xor(total, distance));
  return total;
}

__device__ __forceinline__ int end_of_group(int group, int chunks) {
  const int end = (group + 1) * kMergeChunks;
  return end < chunks ? end : chunks;
}

// The records of groups of chunks.
__device__ __forceinline__ void merge_group(const PoolParams& p, const Pool& pool) {
  const int groups = merge_groups(p.chunks);
  const MergePlace place(p, groups);
  const RunningSum total = merge_by_warp(place.of(p, pool.chunks, p.chunks), place.group * kMergeChunks,
                                         end_of_group(place.group, p.chunks));
  if (place.active && threadIdx.x % kWarp == 0) place.of(p, pool.groups, groups).set(place.group, total);
}

// The mean of `count` records, times `factor` of the channel if there is one.
__device__ __forceinline__ void merge_all(const PoolParams& p, const PoolRecords& records, int count, float* means,
                                          const float* factor) {
  const MergePlace place(p, 1);
  const RunningSum total = merge_by_warp(place.of(p, records, count), 0, count);
  if (place.active && threadIdx.x % kWarp == 0)
    means[place.index] = total.mean() * (factor ? factor[place.index] : 1.0f);
}

// Puts the mean before every chunk of a group in place of the chunk's sums, and the other sums before it in `before`.
__device__ __forceinline__ void scan_group(const PoolParams& p, const Pool& pool) {
  const MergePlace place(p, merge_groups(p.chunks));
  if (!place.active) return;  // the whole warp, which would read what another one writes
  const int lane = threadIdx.x % kWarp, end = end_of_group(place.group, p.chunks);
  const ChannelRecords chunks = place.of(p, pool.chunks, p.chunks);
  RunningSum total = RunningSum::empty();
  if (place.group > 0) total = merge_by_warp(place.of(p, pool.groups, merge_groups(p.chunks)), 0, place.group);

  const int first = place.group * kMergeChunks + lane * kLaneChunks;
  const int last = first + kLaneChunks < end ? first + kLaneChunks : end;
  RunningSum run = RunningSum::empty();
  for_each_record(chunks, first, last, 1, [&](int, const RunningSum& sum) { run.merge(sum); });
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const RunningSum above = shuffle_up(run, distance);
    if (lane >= distance) run.merge(above);
  }
  run = shuffle_up(run, 1);
  if (lane > 0) total.merge(run);

  const ChannelRecords before = place.of(p, pool.before, p.chunks);
  for_each_record(chunks, first, last, 1, [&](int chunk, const RunningSum& sum) {
    before.set(chunk, {total.maximum, total.mean(), total.denominator});
    total.merge(sum);
  });
}

}  // namespace aft::cuda
