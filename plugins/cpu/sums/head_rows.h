// Moving rows of one head between the packed tensors [batch, tokens, heads * width] and padded float32
// blocks in the first-level cache, where the products are taken.
#pragma once

#include "sums/head_context.h"
#include "simd/load_store.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {

// Tokens per block: the rows of a block and the context of a head of usual width share the cache. Where that is of
// 32 KiB, 32 rows of 1 KiB take all places that their addresses allow, and fewer are faster.
constexpr int64_t kHeadTokens = kRegisters == 32 ? 32 : 24;
static_assert(kHeadTokens % kLanes == 0);  // results of sum_rows

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

  // Returns the floats from one row of `heads` heads to the next in a block. A row has one vector to spare, because
  // rows a power of two apart compete for the same few sets of the cache.
  int64_t row(int64_t heads) const { return heads * padded + kLanes; }
  int64_t rows_floats(int64_t heads) const { return kHeadTokens * row(heads); }
};

// The rows of query, key, value and output of heads of which a group may share keys and values.
struct GroupShapes {
  int64_t heads, kv_heads, group;  // group: heads of the query for each of key and value
  HeadShape query, key, value, output;
  ContextShape context;

  explicit GroupShapes(const GroupedHeads& p) : GroupShapes(p, p.kv_heads ? p.kv_heads : p.heads) {}

  // Tokens per task where the tokens are cut. The contexts of all chunks together stay within 4 MiB.
  int64_t chunk_tokens(int64_t tokens, int64_t batch) const {
    const int64_t context_floats = kv_heads * key.padded * (value.padded + 2) * batch;
    const int64_t most_chunks = max(1, min(64, (int64_t{1} << 20) / context_floats));
    return round_up(max(256, ceil_div(tokens, most_chunks)), kHeadTokens);
  }

  // Heads of a causal task, whole groups: enough for it to read whole stretches of memory, and no more tasks than
  // needed.
  int64_t heads_per_task(int64_t batch, int threads) const {
    const int64_t wanted = max(max(1, 64 / query.width), heads * batch / threads);
    return min(heads, round_up(wanted, group));
  }

  // Returns the values that pack_rows may fetch beside the keys: null unless their rows have the same layout.
  template <class T>
  const T* beside_key(const T* values) const {
    return key.stride == value.stride ? values : nullptr;
  }

 private:
  GroupShapes(const GroupedHeads& p, int64_t of_keys)
      : heads(p.heads),
        kv_heads(of_keys),
        group(p.heads / of_keys),
        query(p.channels, p.heads),
        key(query.width * of_keys, of_keys),
        value((p.value_width ? p.value_width : query.width) * of_keys, of_keys),
        output(value.width * p.heads, p.heads),
        context{key.padded, value.padded} {}
};

// rows[token, head] = f(x[token, head]) for some heads, 0 past a head's last channel. `beside`, if not null, is
// fetched at the same places: rows that will be read as they are.
template <class T, class F>
AFT_INLINE void pack_rows(const HeadShape& shape, const T* x, int64_t heads, int64_t tokens, float* rows, const F& f,
                          const T* beside = nullptr) {
  for (int64_t t = 0; t < tokens; ++t, x += shape.stride, rows += shape.row(heads)) {
    if (shape.width == shape.padded)  // then all heads are one
      for (int64_t c = 0; c < heads * shape.width; c += kLanes) {
        prefetch(x + kPrefetchRows * shape.stride + c);
        if (beside) prefetch(beside + t * shape.stride + c);
        store(rows + c, f(load(x + c)));
      }
    else
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < shape.padded; c += kLanes) {
          const T* from = x + h * shape.width + c;
          prefetch(from + kPrefetchRows * shape.stride);
          store(rows + h * shape.padded + c, shape.clear_padding(f(load(from, shape.width - c)), c));
        }
  }
}

template <class T>
Rows copy_rows(const HeadShape& shape, const T* x, int64_t heads, int64_t tokens, float* memory,
               const T* beside = nullptr) {
  pack_rows(shape, x, heads, tokens, memory, [](Vec v) AFT_LAMBDA_INLINE { return v; }, beside);
  return {memory, shape.row(heads)};
}

// Returns the rows of x to read: those of x itself if they are packed float32, else a copy in `memory`.
template <class T>
Rows packed_rows(const HeadShape& shape, const T* x, int64_t heads, int64_t tokens, float* memory) {
  if constexpr (sizeof(T) == sizeof(float))
    if (shape.width == shape.padded) return {x, shape.stride};
  return copy_rows(shape, x, heads, tokens, memory);
}

// sum += rows, each lane over the tokens.
inline void add_rows(const HeadShape& shape, Rows rows, int64_t tokens, float* sum) {
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    Vec block{};
    for (int64_t t = 0; t < tokens; ++t) block += load(rows[t] + c);
    store(sum + c, load(sum + c) + block);
  }
}

// sums[t] = the sum over the lanes of term(t), for t rounded up to whole vectors; term is asked for tokens only.
template <class Term>
AFT_INLINE void sum_rows(int64_t tokens, float* sums, const Term& term) {
  for (int64_t t = 0; t < tokens; t += kLanes) {
    Vec terms[kLanes];
    for (int i = 0; i < kLanes; ++i) terms[i] = term(min(t + i, tokens - 1));
    store(sums + t, sum_each(terms));
  }
}

// output[at + token, ...] = rows * scales, one scale per token.
template <class T>
void write_rows(const HeadShape& shape, const float* rows, const float* scales, int64_t tokens, const Output<T>& output,
                int64_t at) {
  constexpr int kVecs = kLineVecs<float>;  // whole lines at a time; past a row there is another, or room for one
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < shape.padded; c += kVecs * kLanes) {
      Vec scaled[kVecs];
      for (int v = 0; v < kVecs; ++v) scaled[v] = load(rows + t * shape.padded + c + v * kLanes) * scales[t];
      output.write(at + t * shape.stride + c, scaled, shape.width - c);
    }
}

// Zeros for the padded rows [begin, end) of a document that starts at row `first`.
template <class T>
void clear_rows(const HeadShape& shape, const Output<T>& output, int64_t first, int64_t begin, int64_t end,
                int64_t first_head, int64_t heads) {
  for (int64_t t = begin; t < end; ++t)
    for (int64_t c = 0; c < heads * shape.width; c += kLanes)
      output.write((first + t) * shape.stride + first_head * shape.width + c, Vec{}, heads * shape.width - c);
}

// The first of `chunks` partial sums of every document becomes their total.
inline void add_partials(const Parallel& parallel, float* partials, int64_t batch, int64_t chunks, int64_t floats) {
  constexpr int64_t kPiece = 1024;
  const int64_t pieces = ceil_div(floats, kPiece);
  if (chunks == 1) return;
  parallel_for(parallel, batch * pieces, batch * chunks * floats, [&](int64_t task) {
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
