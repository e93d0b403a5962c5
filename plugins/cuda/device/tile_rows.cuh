// Tiles of rows on the way between global and shared memory, moved by all threads of a block together.
#pragma once

#include "device/launch.cuh"
#include "device/load_store.cuh"

namespace aft::cuda {

// Threads of a block, in every kernel that moves such tiles or multiplies them (block_product.cuh).
constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / kWarp;

__device__ __forceinline__ int at_most(int count, int most) { return count < 0 ? 0 : count < most ? count : most; }

// A tile of rows on the way from global to shared memory, held by all threads together.
template <class T, int kRows, int kColumns>
struct TileRows {
  static constexpr int kUnit = kVector<T>, kPerRow = kColumns / kUnit, kRowsApart = kBlockThreads / kPerRow;
  static constexpr int kMine = ceil_div(kRows, kRowsApart);
  Raw<T, kUnit> raw[kMine];

  static __device__ __forceinline__ int first_row() { return threadIdx.x / kPerRow; }
  static __device__ __forceinline__ int column() { return threadIdx.x % kPerRow * kUnit; }

  // Loads rows first to first + count of the tensor, from `channel` on. Other rows and columns become 0.
  __device__ __forceinline__ void load(const StridedTensor& tensor, int batch, int first, int count, int channel,
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
__device__ __forceinline__ void write_rows(const StridedSequence& s, const float (&tile)[kRows][kStride], int batch,
                                           int first, int from, int to, int channel, int columns, bool vectors) {
  constexpr int kUnit = kVector<T>, kPerRow = kColumns / kUnit;
  T* output = static_cast<T*>(s.output) + (batch * s.tokens + first) * s.channels + channel;
  for (int unit = threadIdx.x + from * kPerRow; unit < to * kPerRow; unit += kBlockThreads) {
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

}  // namespace aft::cuda
