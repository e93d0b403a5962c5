// Products of a head's token rows with its context, the matrix sum_t key_t value_t^T.
//
// Cost:     bound by multiply-adds: each step costs one broadcast per row of the tile and feeds that row's
//           multiply-adds.
// Method:   a tile of sums stays in registers while the terms stream past: the tokens for a context and the context's
//           rows for results. A context has a row for each channel of a key and a column for each of a value, both
//           padded with zeros to a multiple of kLanes. Rows of tokens lie as far apart as their `stride` says.
#pragma once

#include "simd/compensated_sum.h"
#include "simd/load_store.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {

// Rows of float32 tokens in memory.
struct Rows {
  const float* data;
  int64_t stride;
  AFT_INLINE const float* operator[](int64_t t) const { return data + t * stride; }
  Rows from(int64_t channel) const { return {data + channel, stride}; }
};

// The padded channels of a key and of a value.
struct ContextShape {
  int64_t rows, columns;
  int64_t floats() const { return rows * columns; }
};

constexpr int kContextRows = kRegisters == 32 ? min(8, kLanes) : 4;  // heads are padded to whole vectors, not to tiles
constexpr int kCausalRows = 4;
static_assert(kLanes % kContextRows == 0 && kLanes % kCausalRows == 0);

namespace context_tiles {

template <int rows, int vecs>
AFT_INLINE void load_tile(Vec (&tile)[rows][vecs], const float* context, int64_t width) {
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < vecs; ++v) tile[r][v] = load(context + r * width + v * kLanes);
}

// Calls f(Constant<vectors>, row, column) for every tile of the context.
template <int rows, class F>
AFT_INLINE void for_each_tile(const ContextShape& shape, const F& f) {
  for (int64_t e = 0; e < shape.columns; e += 2 * kLanes)
    for (int64_t c = 0; c < shape.rows; c += rows) {
      if (e + kLanes < shape.columns)
        f(Constant<2>{}, c, e);
      else
        f(Constant<1>{}, c, e);
    }
}

}  // namespace context_tiles

// Keys and values that a later product takes: this one fetches meanwhile tokens * rows of the context of the keys and
// tokens * columns of the values, in the order of memory.
template <class T>
struct Next {
  const T *key, *value;
};

// context += sum_t keys[t]^T values[t]
template <class T>
void add_to_context(Rows keys, Rows values, int64_t tokens, const ContextShape& extent, float* context,
                    const Next<T>& next) {
  const int64_t width = extent.columns;
  constexpr int64_t kLine = kLineElements<T>;
  const auto add = [&](auto shape, auto fetches, int64_t c, int64_t e) AFT_LAMBDA_INLINE {
    constexpr int vecs = decltype(shape)::value;
    Vec sum[kContextRows][vecs] = {};
    for (int64_t t = 0; t < tokens; ++t) {
      if constexpr (decltype(fetches)::value) {
        prefetch_later(next.key + c * tokens + t * kLine);
        for (int64_t column = c; column < width; column += extent.rows)
          prefetch_later(next.value + column * tokens + t * kLine);
      }
      const float* key = keys[t] + c;
      Vec value[vecs];
      for (int v = 0; v < vecs; ++v) value[v] = load(values[t] + e + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kContextRows; ++r)
        for (int v = 0; v < vecs; ++v) sum[r][v] += key[r] * value[v];
    }
    float* target = context + c * width + e;
    for (int r = 0; r < kContextRows; ++r)
      for (int v = 0; v < vecs; ++v)
        store(target + r * width + v * kLanes, load(target + r * width + v * kLanes) + sum[r][v]);
  };
  context_tiles::for_each_tile<kContextRows>(extent, [&](auto shape, int64_t c, int64_t e) AFT_LAMBDA_INLINE {
    if (e == 0 && c % kLine == 0)
      add(shape, Constant<true>{}, c, e);
    else
      add(shape, Constant<false>{}, c, e);
  });
}

// Rows of the output: a row times its scale is written, and the same place of `next` fetched, which a later call takes.
// Passed by value: the compiler reads memory again after a store past the cache, but not a local variable.
template <class T>
struct ScaledRows {
  Output<T> output;  // at the first row
  int64_t stride, width;
  const float* scales;
  const T* next;

  template <int vecs>
  AFT_INLINE void write(int64_t t, int64_t e, const Vec (&sum)[vecs]) const {
    const Vec scale = splat(scales[t]);
    const int64_t at = t * stride + e;
    Vec scaled[vecs];
    for (int v = 0; v < vecs; ++v) {
      prefetch_later(next + at + v * kLanes);
      scaled[v] = sum[v] * scale;
    }
    output.write(at, scaled, width - e);
  }
};

// results[t] = queries[t] context
template <class T>
AFT_INLINE void apply_context(Rows queries, const float* context, int64_t tokens, const ContextShape& extent,
                              ScaledRows<T> results) {
  const int64_t rows = extent.rows, width = extent.columns;
  const int64_t tiled = tokens - tokens % kContextRows;
  const auto apply = [&](auto shape, int64_t e) AFT_LAMBDA_INLINE {
    constexpr int vecs = decltype(shape)::value;
    for (int64_t t = 0; t < tiled; t += kContextRows) {
      const float* query = queries[t];
      Vec sum[kContextRows][vecs] = {};
      for (int64_t c = 0; c < rows; ++c) {
        Vec row[vecs];
        for (int v = 0; v < vecs; ++v) row[v] = load(context + c * width + e + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kContextRows; ++r)
          for (int v = 0; v < vecs; ++v) sum[r][v] += query[r * queries.stride + c] * row[v];
      }
#pragma GCC unroll 8
      for (int r = 0; r < kContextRows; ++r) results.write(t + r, e, sum[r]);
    }
    for (int64_t t = tiled; t < tokens; ++t) {
      Vec sum[vecs] = {};
      for (int64_t c = 0; c < rows; ++c)
        for (int v = 0; v < vecs; ++v) sum[v] += queries[t][c] * load(context + c * width + e + v * kLanes);
      results.write(t, e, sum);
    }
  };
  int64_t e = 0;
  for (; e + kLanes < width; e += 2 * kLanes) apply(Constant<2>{}, e);
  if (e < width) apply(Constant<1>{}, e);
}

// For each token in turn: context += key value^T, results[t] += queries[t] context. The block's own part of the context
// is summed apart and joins the whole in the last step. `compensation`, as large as the context, takes up the
// rounding error of that.
inline void advance_context(Rows queries, Rows keys, Rows values, int64_t tokens, const ContextShape& extent,
                            float* context, float* compensation, float* results) {
  const int64_t width = extent.columns;
  context_tiles::for_each_tile<kCausalRows>(extent, [&](auto shape, int64_t c, int64_t e) AFT_LAMBDA_INLINE {
    constexpr int vecs = decltype(shape)::value;
    Vec base[kCausalRows][vecs], block[kCausalRows][vecs] = {};
    context_tiles::load_tile(base, context + c * width + e, width);
    for (int64_t t = 0; t < tokens; ++t) {
      const float *key = keys[t] + c, *query = queries[t] + c;
      float* result = results + t * width + e;
      Vec value[vecs], sum[vecs];
      for (int v = 0; v < vecs; ++v) {
        value[v] = load(values[t] + e + v * kLanes);
        sum[v] = load(result + v * kLanes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kCausalRows; ++r)
        for (int v = 0; v < vecs; ++v) {
          block[r][v] += key[r] * value[v];
          sum[v] += query[r] * (base[r][v] + block[r][v]);
        }
      for (int v = 0; v < vecs; ++v) store(result + v * kLanes, sum[v]);
    }
    for (int r = 0; r < kCausalRows; ++r)
      for (int v = 0; v < vecs; ++v) {
        const int64_t at = (c + r) * width + e + v * kLanes;
        add_compensated(context + at, compensation + at, block[r][v]);
      }
  });
}

}  // namespace aft::AFT_ISA
