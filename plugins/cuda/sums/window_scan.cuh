// The scan of the sums of pieces of a sequence, from both ends, for the sums outside a window.
//
// Computes: before[i] = the sum of pieces below i; after[i] = the sum of pieces i and above, unless causal.
// Cost:     a record is read twice and written twice; a chain has 4 merges on each level of the tree and 36 more.
// Method:   a tree of radix 64. A launch for each level sums 64 records below a node. A last launch scans the pieces
//           of a node; it adds the totals beside the node and beside its ancestors itself, at most 63 on each level.
//           The order of merges depends on sizes only.
#pragma once

#include "device/launch.cuh"
#include "sums/running_softmax.cuh"

namespace aft::cuda {

constexpr int kScanThreads = 256;
constexpr int kScanColumns = 16, kScanSlots = 16;  // threads side by side, and one after another
constexpr int kScanRecords = 4;                    // of a thread, one after another
constexpr int kRadix = kScanSlots * kScanRecords;
static_assert(kScanColumns * kScanSlots == kScanThreads);

// The records of N channels side by side: of 4, they are moved 16 bytes at a time.
template <int N>
struct Records {
  RunningSum sums[N];

  static __device__ __forceinline__ Records empty() {
    Records all;
#pragma unroll
    for (int c = 0; c < N; ++c) all.sums[c] = RunningSum::empty();
    return all;
  }
  static __device__ __forceinline__ Records load(const RunningSum* from) {
    if constexpr (N % 4 != 0) {
      return *reinterpret_cast<const Records*>(from);
    } else {
      Moved moved;
#pragma unroll
      for (int i = 0; i < kWords; ++i) moved.words[i] = machine::load<uint4>(reinterpret_cast<const uint4*>(from) + i);
      Records all;
#pragma unroll
      for (int c = 0; c < N; ++c) all.sums[c] = moved.sums[c];
      return all;
    }
  }
  __device__ __forceinline__ void store(RunningSum* to) const {
    if constexpr (N % 4 != 0) {
      *reinterpret_cast<Records*>(to) = *this;
    } else {
      Moved moved;
#pragma unroll
      for (int c = 0; c < N; ++c) moved.sums[c] = sums[c];
#pragma unroll
      for (int i = 0; i < kWords; ++i) machine::store(reinterpret_cast<uint4*>(to) + i, moved.words[i]);
    }
  }
  __device__ __forceinline__ void merge(const Records& others) {
#pragma unroll
    for (int c = 0; c < N; ++c) sums[c].merge(others.sums[c]);
  }

 private:
  static constexpr int kWords = N * sizeof(RunningSum) / sizeof(uint4);
  union Moved {
    RunningSum sums[N];
    uint4 words[kWords];
  };
};

// Records of one level of the tree: level 0 is the pieces; a node of level l + 1 has kRadix records of level l.
struct Level {
  RunningSum* records;
  int64_t pitch;  // from one document to the next
  int count;      // of a document

  __host__ __device__ __forceinline__ int nodes() const { return ceil_div(count, kRadix); }
  __host__ __device__ __forceinline__ Level above(RunningSum* memory, int64_t channels) const {
    return {memory, nodes() * channels, nodes()};
  }
};

struct PieceSums {
  int64_t batch, channels;
  int pieces;
  bool causal;
  RunningSum *before, *after, *totals;  // [batch, pieces + 1, channels] twice, and the levels above the pieces
                                        // Before the scan, before[i + 1] is piece i.

  PieceSums(int64_t batch, int64_t channels, int pieces, bool causal, void* memory)
      : batch(batch), channels(channels), pieces(pieces), causal(causal), before(static_cast<RunningSum*>(memory)) {
    const int64_t records = batch * (pieces + 1) * channels;
    after = causal ? before : before + records;
    totals = after + records;
  }

  size_t bytes() const {
    Level level = piece_level();
    RunningSum* end = totals;
    while (level.count > kRadix) {
      level = level.above(end, channels);
      end += batch * level.pitch;
    }
    return reinterpret_cast<uintptr_t>(end) - reinterpret_cast<uintptr_t>(before);
  }

  __host__ __device__ __forceinline__ Level piece_level() const {
    return {before + channels, (pieces + 1) * channels, pieces};
  }
  __device__ __forceinline__ int64_t record(int64_t b, int i, int64_t channel) const {
    return (b * (pieces + 1) + i) * channels + channel;
  }
};

struct TotalShared {
  alignas(16) RunningSum own[kScanSlots][kScanColumns * 4];
};
struct ScanShared {
  alignas(16) RunningSum own[kScanSlots][kScanColumns * 4];
  alignas(16) RunningSum before[kScanSlots][kScanColumns * 4], after[kScanSlots][kScanColumns * 4];
};

// The thread's place in a block that merges kRadix records of kScanColumns * N channels.
template <int N>
struct ScanPlace {
  int column = threadIdx.x % kScanColumns * N, slot = threadIdx.x / kScanColumns;
  int64_t b, channel;
  int node;  // the record of the level above that sums up the block's records
  bool active;

  __device__ __forceinline__ ScanPlace(int64_t channels, int nodes) {
    const int64_t groups = ceil_div<int64_t>(channels, kScanColumns * N), block = blockIdx.x / groups;
    channel = blockIdx.x % groups * kScanColumns * N + column;
    b = block / nodes;
    node = static_cast<int>(block % nodes);
    active = channel < channels;
  }

  // Reads the thread's records from `first` on. Past the end of the level, records are empty.
  __device__ __forceinline__ void load(const Level& level, int64_t channels, int first,
                                       Records<N> (&records)[kScanRecords]) const {
    const int i = first + slot * kScanRecords, count = active ? level.count - i : 0;
    const RunningSum* from = level.records + b * level.pitch + i * channels + channel;
#pragma unroll
    for (int k = 0; k < kScanRecords; ++k) {
      records[k] = Records<N>::empty();
      if (k < count) records[k] = Records<N>::load(from + k * channels);
    }
  }
};

// A block sums the records below a node of the level above.
template <int N>
__global__ void __launch_bounds__(kScanThreads, 2)
    total_kernel(const Level level, const Level above, const int64_t channels) {
  auto& shared = shared_memory<TotalShared>();
  const ScanPlace<N> place(channels, above.count);
  Records<N> records[kScanRecords];
  place.load(level, channels, place.node * kRadix, records);
#pragma unroll
  for (int k = 1; k < kScanRecords; ++k) records[0].merge(records[k]);
  records[0].store(&shared.own[place.slot][place.column]);
  __syncthreads();
  if (place.slot != 0 || !place.active) return;
#pragma unroll 3
  for (int i = 1; i < kScanSlots; ++i) records[0].merge(Records<N>::load(&shared.own[i][place.column]));
  records[0].store(above.records + place.b * above.pitch + place.node * channels + place.channel);
}

// Puts into side[i] the sum of all of `side`, which lies beyond the block, and of the slots from `first` up to i,
// exclusive, in steps of `step`.
template <int N>
__device__ __forceinline__ void scan_slots(RunningSum (&side)[kScanSlots][kScanColumns * 4],
                                           const RunningSum (&own)[kScanSlots][kScanColumns * 4], int column, int first,
                                           int step) {
  Records<N> sum = Records<N>::load(&side[0][column]);
#pragma unroll 3
  for (int i = 1; i < kScanSlots; ++i) sum.merge(Records<N>::load(&side[i][column]));
#pragma unroll 2
  for (int k = 0; k < kScanSlots; ++k) {
    const int i = first + k * step;
    sum.store(&side[i][column]);
    sum.merge(Records<N>::load(&own[i][column]));
  }
}

// A block scans kRadix pieces. On every level of the tree it adds the totals that lie beside its own ancestor.
template <int N>
__global__ void __launch_bounds__(kScanThreads, 2) scan_kernel(const PieceSums w) {
  auto& shared = shared_memory<ScanShared>();
  const ScanPlace<N> place(w.channels, w.piece_level().nodes());
  Records<N> records[kScanRecords], before = Records<N>::empty(), after = before;
  int ancestor = place.node;
  RunningSum* totals = w.totals;
  for (Level level = w.piece_level(); level.count > kRadix; ancestor /= kRadix) {
    level = level.above(totals, w.channels);
    totals += w.batch * level.pitch;
    const int first = ancestor / kRadix * kRadix;
    place.load(level, w.channels, first, records);
#pragma unroll
    for (int k = 0; k < kScanRecords; ++k) {
      const int i = first + place.slot * kScanRecords + k;
      if (i < ancestor) before.merge(records[k]);
      if (i > ancestor) after.merge(records[k]);
    }
  }
  before.store(&shared.before[place.slot][place.column]);
  after.store(&shared.after[place.slot][place.column]);
  const int first = place.node * kRadix + place.slot * kScanRecords;
  place.load(w.piece_level(), w.channels, place.node * kRadix, records);
  Records<N> own = records[0];
#pragma unroll
  for (int k = 1; k < kScanRecords; ++k) own.merge(records[k]);
  own.store(&shared.own[place.slot][place.column]);
  __syncthreads();
  // One slot scans the sums of all slots from the left, and one, of another warp, from the right.
  if (place.slot == 0) scan_slots<N>(shared.before, shared.own, place.column, 0, 1);
  if (place.slot == kScanSlots - 1 && !w.causal)
    scan_slots<N>(shared.after, shared.own, place.column, kScanSlots - 1, -1);
  __syncthreads();
  if (!place.active) return;
  if (!w.causal) {
    Records<N> sum = Records<N>::load(&shared.after[place.slot][place.column]);
#pragma unroll
    for (int k = kScanRecords - 1; k >= 0; --k) {
      sum.merge(records[k]);
      if (first + k < w.pieces) sum.store(w.after + w.record(place.b, first + k, place.channel));
      if (first + k == w.pieces - 1) Records<N>::empty().store(w.after + w.record(place.b, w.pieces, place.channel));
    }
  }
  Records<N> sum = Records<N>::load(&shared.before[place.slot][place.column]);
#pragma unroll
  for (int k = 0; k < kScanRecords; ++k) {
    sum.merge(records[k]);
    if (first + k < w.pieces) sum.store(w.before + w.record(place.b, first + k + 1, place.channel));
  }
}

template <int N>
int scan_pieces(const PieceSums& w, cudaStream_t stream) {
  const int64_t groups = w.batch * ceil_div<int64_t>(w.channels, kScanColumns * N);
  const auto grid = [&](int nodes) { return dim3(static_cast<unsigned>(groups * nodes)); };
  RunningSum* totals = w.totals;
  for (Level level = w.piece_level(); level.count > kRadix;) {
    const Level above = level.above(totals, w.channels);
    if (const int status =
            launch<TotalShared>(total_kernel<N>, grid(above.count), kScanThreads, stream, level, above, w.channels))
      return status;
    totals += w.batch * above.pitch;
    level = above;
  }
  return launch<ScanShared>(scan_kernel<N>, grid(w.piece_level().nodes()), kScanThreads, stream, w);
}

}  // namespace aft::cuda
