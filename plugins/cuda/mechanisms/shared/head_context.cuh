// Context matrices of heads, S = sum_t key_t value_t^T: how their work lies over threads, the tiles of tokens
// it goes through, and products of such tiles.
//
// Products run on tensor cores with tf32 operands and float32 sums. tf32 holds every float16 and bfloat16
// number exactly and has the range of float32, so weights such as exp(k - m) need no scaling; for float32
// tensors each operand is split into two tf32 numbers and three products are taken, which leaves a relative
// error of about 2^-21. Tiles lie in shared memory as float32. A row of a left operand is 4 floats longer
// than a multiple of 32 and a row of a right (or transposed left) one 8: then the 32 lanes of each fragment
// read from 32 banks.
#pragma once

#include "device/launch.cuh"
#include "device/load_store.cuh"
#include "device/mma.cuh"
#include "mechanisms/shared/running_softmax.cuh"

namespace aft::cuda {

constexpr int kHeadThreads = 256;
constexpr int kHeadWarps = kHeadThreads / kWarp;

// Sizes by the head's width rounded up to kWidth, 32, 64, 128 or 256.
template <int kWidth>
struct HeadSizes {
  static constexpr int kValues = kWidth <= 64 ? kWidth : kWidth == 128 ? 64 : 32;  // columns of S in a block
  static constexpr int kSlices = kWidth / kValues;
  static constexpr int kTokens = kWidth <= 128 ? 32 : 16;        // keys in a tile
  static constexpr int kCausalTokens = kWidth <= 64 ? 32 : 16;  // keys and queries in a tile
  static constexpr int kQueries = kWidth <= 64 ? 64 : 32;  // queries in a tile where there are no keys
  static constexpr int kGroups = kHeadThreads / kWidth;    // of threads that share a key channel
};

// What the kernels get: the call, what is particular to the mechanism, and the cut.
template <class Mechanism>
struct HeadParams {
  AftCudaSequence sequence;
  Mechanism mechanism;
  int heads, width;  // channels of a head
  int chunk;         // tokens
  int chunks;
  bool vectors;  // every head's row starts at a multiple of 16 bytes
  float* states;
};

// S [kWidth, kWidth], then per key channel the sum of the weights and the maximum they are relative to.
__host__ __device__ constexpr int64_t state_floats(int64_t width) { return width * (width + 2); }

// Which tokens of which head, and which columns of S, the block works on.
template <int kWidth>
struct HeadPlace {
  int batch, begin, end, length;  // tokens of the chunk; keys of the document
  int head, chunk, first_value;   // the slice's first channel in the head
  float* state;                   // of the chunk

  // `chunks` is how many the launch has.
  template <class Mechanism>
  __device__ HeadPlace(const HeadParams<Mechanism>& p, int chunks) {
    constexpr int kSlices = HeadSizes<kWidth>::kSlices;
    const unsigned slice = blockIdx.x % kSlices, rest = blockIdx.x / kSlices;
    head = rest % p.heads;
    chunk = rest / p.heads % chunks;
    batch = rest / p.heads / chunks;
    first_value = slice * HeadSizes<kWidth>::kValues;
    begin = chunk * p.chunk;
    const int tokens = static_cast<int>(p.sequence.tokens);
    end = begin + p.chunk < tokens ? begin + p.chunk : tokens;
    length = static_cast<int>(length_of(p.sequence, batch));
    state = p.states + ((batch * p.heads + head) * p.chunks + chunk) * state_floats(kWidth);
  }
};

__device__ __forceinline__ int at_most(int count, int most) { return count < 0 ? 0 : count < most ? count : most; }

// A tile of rows of one head on the way from global to shared memory, held by all threads together.
template <class T, int kRows, int kColumns>
struct HeadRows {
  static constexpr int kUnit = kVector<T>, kPerRow = kColumns / kUnit, kRowsApart = kHeadThreads / kPerRow;
  static constexpr int kMine = ceil_div(kRows, kRowsApart);
  Raw<T, kUnit> raw[kMine];

  static __device__ __forceinline__ int first_row() { return threadIdx.x / kPerRow; }
  static __device__ __forceinline__ int column() { return threadIdx.x % kPerRow * kUnit; }

  // Rows first to first + count of the tensor from `channel` on, 0 beyond them and beyond `columns`.
  __device__ __forceinline__ void load(const AftCudaTensor& tensor, int batch, int first, int count, int channel,
                                       int columns, bool vectors) {
    const T* mine = row<T>(tensor, batch, first + first_row()) + channel + column();
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      raw[i].words = {};
      if (first_row() + i * kRowsApart >= count || column() >= columns) continue;
      const T* from = mine + i * kRowsApart * tensor.token_stride;
      if (vectors) {
        raw[i] = Raw<T, kUnit>(from);
      } else {
#pragma unroll
        for (int k = 0; k < kUnit; ++k)
          if (column() + k < columns) raw[i].elements[k] = from[k];
      }
    }
  }

  template <int kStride>
  __device__ __forceinline__ void store_to(float (&tile)[kRows][kStride]) const {
    store_to(tile, [](int, int, float x) { return x; });
  }

  // Stores change(row, column, x) instead of x, rounded to P.
  template <class P, int kStride, class Change>
  __device__ __forceinline__ void store_to(P (&tile)[kRows][kStride], const Change& change) const {
    constexpr int kAtOnce = kUnit < kVector<P> ? kUnit : kVector<P>;
    for_each_row([&](int r, const Raw<T, kUnit>& unit) {
#pragma unroll
      for (int k = 0; k < kUnit; k += kAtOnce) {
        float x[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) x[i] = change(r, column() + k + i, unit[k + i]);
        store(&tile[r][column() + k], x);
      }
    });
  }

  // Stores the elements as they are.
  template <int kStride>
  __device__ __forceinline__ void copy_to(T (&tile)[kRows][kStride]) const {
    for_each_row([&](int r, const Raw<T, kUnit>& unit) { machine::store(&tile[r][column()], unit.words); });
  }

 private:
  template <class F>
  __device__ __forceinline__ void for_each_row(const F& f) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int r = first_row() + i * kRowsApart;
      if (kRows % kRowsApart != 0 && r >= kRows) break;
      f(r, raw[i]);
    }
  }
};

// Writes rows [from, to) of a tile to output rows first + from on, `columns` of them from `channel` on.
template <class T, int kColumns, int kRows, int kStride>
__device__ __forceinline__ void write_rows(const AftCudaSequence& s, const float (&tile)[kRows][kStride],
                                           int batch, int first, int from, int to, int channel, int columns,
                                           bool vectors) {
  constexpr int kUnit = kVector<T>, kPerRow = kColumns / kUnit;
  T* output = static_cast<T*>(s.output) + (batch * s.tokens + first) * s.channels + channel;
  for (int unit = threadIdx.x + from * kPerRow; unit < to * kPerRow; unit += kHeadThreads) {
    const int r = unit / kPerRow, column = unit % kPerRow * kUnit;
    if (column >= columns) continue;
    float y[kUnit];
#pragma unroll
    for (int k = 0; k < kUnit; ++k) y[k] = tile[r][column + k];
    T* target = output + r * s.channels + column;
    if (vectors) {
      store(target, y);
    } else {
#pragma unroll
      for (int k = 0; k < kUnit; ++k)
        if (column + k < columns) store(target + k, {y[k]});
    }
  }
}

// A [kRows, kColumns] product, cut among the block's warps and held in their registers. Where there are fewer
// fragments of 16 x 8 than warps, the last warps have none.
template <int kRows, int kColumns>
struct Product {
  // Rows of warps: those with the fewest reads from shared memory for each multiplication.
  static constexpr int best_rows() {
    int best = 1, fewest = 1 << 30;
    for (int rows = 1; rows <= kHeadWarps && rows <= kRows / 16; rows *= 2) {
      const int columns = kHeadWarps / rows < kColumns / 8 ? kHeadWarps / rows : kColumns / 8;
      const int reads = 4 * (kRows / 16 / rows) + 2 * (kColumns / 8 / columns);
      if (reads < fewest) best = rows, fewest = reads;
    }
    return best;
  }
  static constexpr int kWarpRows = best_rows();
  static constexpr int kWarpColumns = kHeadWarps / kWarpRows < kColumns / 8 ? kHeadWarps / kWarpRows : kColumns / 8;
  static constexpr int kHigh = kRows / 16 / kWarpRows, kWide = kColumns / 8 / kWarpColumns;

  float sums[kHigh][kWide][4];
  int row, column;  // of this lane's first sum
  bool active;

  __device__ __forceinline__ Product() {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    row = warp / kWarpColumns * kHigh * 16 + lane / 4;
    column = warp % kWarpColumns * kWide * 8 + lane % 4 * 2;
    active = warp < kWarpRows * kWarpColumns;
  }

  __device__ __forceinline__ void clear() {
    for_each([](int, int, float& sum) { sum = 0.0f; });
  }

  // Calls f(row, column, sum) for every sum of this lane.
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) {
    for_each_pair([&](int r, int c, float* sums) {
      f(r, c, sums[0]);
      f(r, c + 1, sums[1]);
    });
  }

  // Calls f(row, column, sums) for every two sums that lie side by side.
  template <class F>
  __device__ __forceinline__ void for_each_pair(const F& f) {
    if (!active) return;
#pragma unroll
    for (int i = 0; i < kHigh; ++i)
#pragma unroll
      for (int j = 0; j < kWide; ++j)
#pragma unroll
        for (int k = 0; k < 4; k += 2) f(row + 16 * i + k * 4, column + 8 * j, &sums[i][j][k]);
  }

  // Adds sum_k a(row, k) b(k, column), k below depth, a multiple of 8. An operand that is not split is rounded to
  // tf32. Tensor cores cut sums off where others round, so that in many steps all that is lost has one sign: with
  // kRounded, which float32 needs for more than some hundred steps, a step's products alone are summed by them.
  template <bool kSplitA, bool kSplitB, bool kRounded = kSplitA || kSplitB, class A, class B>
  __device__ __forceinline__ void add(int depth, const A& a, const B& b) {
    if (!active) return;
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const int b_column = column - 2 * t + g;
#pragma unroll kSplitA || kSplitB ? 1 : 2
    for (int k = 0; k < depth; k += 8) {
      uint32_t high_b[kWide][2], low_b[kWide][2];
#pragma unroll
      for (int j = 0; j < kWide; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) split<kSplitB>(b(k + t + 4 * i, b_column + 8 * j), high_b[j][i], low_b[j][i]);
#pragma unroll
      for (int i = 0; i < kHigh; ++i) {
        uint32_t high_a[4], low_a[4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
          split<kSplitA>(a(row + 16 * i + r % 2 * 8, k + t + r / 2 * 4), high_a[r], low_a[r]);
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
          float step[4] = {};
          float(&to)[4] = kRounded ? step : sums[i][j];
          if constexpr (kSplitA) multiply_add_tf32(to, low_a, high_b[j]);
          if constexpr (kSplitB) multiply_add_tf32(to, high_a, low_b[j]);
          multiply_add_tf32(to, high_a, high_b[j]);
          if constexpr (kRounded)
#pragma unroll
            for (int r = 0; r < 4; ++r) sums[i][j][r] += step[r];
        }
      }
    }
  }

 private:
  template <bool wanted>
  static __device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
    high = to_tf32(x);
    if constexpr (wanted) low = to_tf32(x - __uint_as_float(high));
  }
};

// Merges the states of a head's chunks, one warp a row of S. Into state 0 all of them; or, as a scan, into
// each state those of the chunks before it, the last chunk's own not being used.
__device__ __forceinline__ void merge_states(float* states, int64_t heads, int width, int chunks, bool scan) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kHeadWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp, channel = static_cast<int>(index % width), summed = scan ? chunks - 1 : chunks;
  const bool active = index < heads * width;
  float* first = states + (active ? index / width : 0) * chunks * state_floats(width);
  const int sums = width * width + channel, maxima = sums + width;
  const auto merge = [&](int at, bool with_maximum) {
    float total = 0.0f, maximum = kNoKey;
    float next = first[at], next_maximum = first[maxima];
    for (int i = 0; i < summed; ++i) {
      float* state = first + i * state_floats(width);
      const float mine = next, my_maximum = next_maximum;
      if (i + 1 < summed) {
        next = state[state_floats(width) + at];
        next_maximum = state[state_floats(width) + maxima];
      }
      if (scan) {
        state[at] = total;
        if (with_maximum) state[maxima] = maximum;
      }
      const float highest = fmaxf(maximum, my_maximum);
      total = total * machine::fast_exp(maximum - highest) + mine * machine::fast_exp(my_maximum - highest);
      maximum = highest;
    }
    float* result = scan ? first + summed * state_floats(width) : first;
    result[at] = total;
    if (with_maximum) result[maxima] = maximum;
  };
  if (active)
    for (int column = lane; column < width; column += kWarp) merge(channel * width + column, false);
  __syncwarp();  // all lanes have read the maxima
  if (active && lane == 0) merge(sums, true);
}

// How many chunks at most, so that `blocks` blocks or so have work and a chunk is no smaller than its state.
inline int64_t most_chunks(int64_t tokens, int64_t heads, int64_t width, int64_t blocks) {
  const int64_t least_chunk = width < 128 ? 256 : 2 * width;
  const int64_t most = ceil_div(tokens, least_chunk), wanted = ceil_div(blocks, heads);
  return most < wanted ? most : wanted;
}

inline int64_t round_width(int64_t width) { return width <= 32 ? 32 : width <= 64 ? 64 : width <= 128 ? 128 : 256; }

inline size_t head_workspace(const AftCudaSequence& s, int64_t heads, int64_t blocks) {
  const int64_t all_heads = s.batch * heads;
  if (all_heads * s.tokens * s.channels == 0) return 0;
  const int64_t width = round_width(s.channels / heads);
  // Rather than the heads' own number of chunks, which falls when there are more heads.
  const int64_t states = all_heads * ceil_div<int64_t>(s.tokens, 256);
  const int64_t most = all_heads + blocks;
  return sizeof(float) * state_floats(width) * (states < most ? states : most);
}

template <int value_>
struct Width {
  static constexpr int value = value_;
};

// Calls f with the width rounded up to what the kernels are compiled for; returns what f does.
template <class F>
int with_width(int64_t width, const F& f) {
  if (width > AFT_CUDA_MOST_HEAD_CHANNELS) return 1;  // cudaErrorInvalidValue
  switch (round_width(width)) {
    case 32: return f(Width<32>{});
    case 64: return f(Width<64>{});
    case 128: return f(Width<128>{});
  }
  return f(Width<256>{});
}

}  // namespace aft::cuda
