// Moving rows of one head between the packed tensors [batch, tokens, heads * width] and padded float32
// blocks in the first-level cache, where the products are taken.
#pragma once

#include "element.h"
#include "tasks.h"

namespace aft::AFT_ISA {

// Tokens per block: the rows of a block and the context of a head of usual width share the cache.
constexpr int64_t kHeadTokens = 32;

struct HeadShape {
  int64_t stride;  // channels of all heads
  int64_t width;   // of one head
  int64_t padded;  // width rounded up to whole vectors

  HeadShape(int64_t channels, int64_t heads)
      : stride(channels), width(channels / heads), padded(round_up(channels / heads, kLanes)) {}

  // v with the lanes past the head's last channel set to 0, where v is its vector at channel c.
  AFT_INLINE Vec clear_padding(Vec v, int64_t c) const {
    if (__builtin_expect(c + kLanes <= width, 1)) return v;
    for (int64_t lane = width - c; lane < kLanes; ++lane) v[lane] = 0.0f;
    return v;
  }

  // Tokens per task where the tokens are cut. The contexts of all chunks together stay within 4 MiB.
  int64_t chunk_tokens(int64_t tokens, int64_t batch) const {
    const int64_t context_floats = (stride / width) * padded * (padded + 2) * batch;
    const int64_t most_chunks = max(1, min(64, (int64_t{1} << 20) / context_floats));
    return max(256, round_up(ceil_div(tokens, most_chunks), kHeadTokens));
  }

  // Heads of a causal task: enough for it to read whole stretches of memory, and no more tasks than needed.
  int64_t heads_per_task(int64_t heads, int64_t batch, int threads) const {
    return min(heads, max(max(1, 64 / width), heads * batch / threads));
  }

  int64_t block_floats() const { return kHeadTokens * padded; }
};

inline void zero(float* p, int64_t floats) { __builtin_memset(p, 0, floats * sizeof(float)); }

// rows[head, token] = f(x[token, head]), in blocks of kHeadTokens per head and 0 past a head's last channel.
// All heads of a token together: memory is read in the order it lies in.
template <class T, class F>
AFT_INLINE void pack_rows(const HeadShape& shape, const T* x, int64_t heads, int64_t tokens, float* rows,
                          const F& f) {
  for (int64_t t = 0; t < tokens; ++t, x += shape.stride)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t c = 0; c < shape.padded; c += kLanes) {
        const T* from = x + h * shape.width + c;
        prefetch(from + kPrefetchRows * shape.stride);
        store(rows + (h * kHeadTokens + t) * shape.padded + c, shape.clear_padding(f(load(from, shape.width - c)), c));
      }
}

template <class T>
void copy_rows(const HeadShape& shape, const T* x, int64_t heads, int64_t tokens, float* rows) {
  pack_rows(shape, x, heads, tokens, rows, [](Vec v) AFT_LAMBDA_INLINE { return v; });
}

// output[at + token, ...] = rows * scales, one scale per token.
template <class T>
void write_rows(const HeadShape& shape, const float* rows, const float* scales, int64_t tokens,
                const Output<T>& output, int64_t at) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < shape.padded; c += kLanes)
      output.write(at + t * shape.stride + c, load(rows + t * shape.padded + c) * scales[t], shape.width - c);
}

// Zeros for the padded rows [begin, end) of a document that starts at row `first`.
template <class T>
void clear_rows(const HeadShape& shape, const Output<T>& output, int64_t first, int64_t begin, int64_t end,
                int64_t first_head, int64_t heads) {
  for (int64_t t = begin; t < end; ++t)
    for (int64_t c = 0; c < heads * shape.width; c += kLanes)
      output.write((first + t) * shape.stride + first_head * shape.width + c, Vec{}, heads * shape.width - c);
}

AFT_INLINE float dot(const float* a, const float* b, int64_t floats) {
  Vec sum{};
  for (int64_t c = 0; c < floats; c += kLanes) sum += load(a + c) * load(b + c);
  return sum_lanes(sum);
}

// The first of `chunks` partial sums of every document becomes their total.
inline void add_partials(const Parallel& parallel, float* partials, int64_t batch, int64_t chunks, int64_t floats) {
  constexpr int64_t kPiece = 1024;
  const int64_t pieces = ceil_div(floats, kPiece);
  parallel_for(parallel, batch * pieces, [&](int64_t task) {
    float* total = partials + task / pieces * chunks * floats;
    const int64_t begin = task % pieces * kPiece, end = min(begin + kPiece, floats);
    for (int64_t c = begin; c < end; c += kLanes) {
      Vec sum = load(total + c);
      for (int64_t i = 1; i < chunks; ++i) sum += load(total + i * floats + c);
      store(total + c, sum);
    }
  });
}

}  // namespace aft::AFT_ISA
