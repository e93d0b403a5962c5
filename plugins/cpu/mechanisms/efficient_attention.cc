// Efficient Attention (Shen et al., arXiv 1812.01243, equation 2), per head of width d.
//
// Computes: Y = scale * rho_q(Q) (rho_k(K)^T V)
//           softmax: rho_q is the softmax over the channels of a query, rho_k the softmax over the tokens of a key
//                    channel, in causal form over the tokens up to the query's.
//           scaling: rho_q(Q) rho_k(K)^T = Q K^T / n, n the number of keys counted.
// Cost:     at d = 32 bound by arithmetic and memory alike: 16 bytes per token and channel in float32 against 4 d FLOPs
//           and two exponentials, which on two Zen 5 cores take about as long as the memory traffic.
// Method:   not causal: tasks sum contexts over chunks of tokens; the contexts are merged and normalized, and a second
//           sweep applies them. Keys and queries are copied, in the order of memory, to blocks that are read several
//           times; a product prefetches the rows of the next block meanwhile. Causal: a task runs down the tokens with
//           the contexts of a few heads in the first-level cache; the normalization of key channel c at token t goes
//           into channel c of query t.
// Numerics: a chunk's context is relative to its own maximum per key channel, or to 0 where its keys are moderate. In
//           causal form long sums are compensated, and a block ends before a key that exceeds the maximum by too much.
// See:      shared/head_context.h, shared/head_rows.h, shared/running_softmax.h

#include "mechanisms/shared/head_context.h"
#include "mechanisms/shared/head_rows.h"
#include "mechanisms/shared/running_softmax.h"
#include "simd/compensated_sum.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

// The sum of exp(K - maximum) V^T over some tokens; for scaling the sum of K V^T, and maximum stays 0.
struct Context {
  float *matrix, *sum, *maximum;
  int64_t width;  // padded

  static int64_t floats(const HeadShape& shape) { return shape.padded * (shape.padded + 2); }

  Context(const HeadShape& shape, float* memory)
      : matrix(memory), sum(memory + shape.padded * shape.padded), maximum(sum + shape.padded), width(shape.padded) {}

  void clear(Normalization normalization) {
    zero(matrix, width * (width + 1));
    const Vec none = splat(normalization == Normalization::kSoftmax ? kNoKey : 0.0f);
    for (int64_t c = 0; c < width; c += kLanes) store(maximum + c, none);
  }

  // Multiplies key channels c to c + kLanes.
  void rescale(int64_t c, Vec factor) {
    if (!any((IntVec)(factor != 1.0f))) return;
    store(sum + c, load(sum + c) * factor);
    for (int lane = 0; lane < kLanes; ++lane) {
      float* row = matrix + (c + lane) * width;
      for (int64_t e = 0; e < width; e += kLanes) store(row + e, load(row + e) * factor[lane]);
    }
  }

  void merge(const Context& other) {
    for (int64_t c = 0; c < width; c += kLanes) {
      const Vec m1 = load(maximum + c), m2 = load(other.maximum + c), m = raised_by(m1, m2);
      rescale(c, exp(m1 - m));
      const Vec scale = exp(m2 - m);
      store(sum + c, load(sum + c) + load(other.sum + c) * scale);
      for (int lane = 0; lane < kLanes; ++lane) {
        float* row = matrix + (c + lane) * width;
        const float* other_row = other.matrix + (c + lane) * width;
        for (int64_t e = 0; e < width; e += kLanes) store(row + e, load(row + e) + load(other_row + e) * scale[lane]);
      }
      store(maximum + c, m);
    }
  }
};

// A context that the blocks of a document join one after the other, and the compensation of its sums.
struct RunningContext {
  Context sums, compensation;

  static int64_t floats(const HeadShape& shape) { return 2 * Context::floats(shape); }

  RunningContext(const HeadShape& shape, float* memory)
      : sums(shape, memory), compensation(shape, memory + Context::floats(shape)) {}

  void clear(Normalization normalization) {
    sums.clear(normalization);
    compensation.clear(normalization);
  }

  void move_maximum(int64_t c, Vec to) {
    const Vec factor = exp(load(sums.maximum + c) - to);
    sums.rescale(c, factor);
    compensation.rescale(c, factor);
    store(sums.maximum + c, to);
  }
};

// keys become exp(keys - maximum) with the maximum raised to cover them; adds their sum and rescales the context.
void compute_key_weights(const HeadShape& shape, float* keys, int64_t stride, int64_t tokens, Context& context) {
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    const Vec before = load(context.maximum + c);
    Vec m = before, sum{};
    for (int64_t t = 0; t < tokens; ++t) m = raised_by(m, load(keys + t * stride + c));
    if (any((IntVec)(m != before))) context.rescale(c, exp(before - m));
    for (int64_t t = 0; t < tokens; ++t) {
      const Vec weight = exp(load(keys + t * stride + c) - m);
      store(keys + t * stride + c, weight);
      sum += weight;
    }
    store(context.sum + c, load(context.sum + c) + sum);
    store(context.maximum + c, m);
  }
}

// A softmax needs a maximum taken off only against overflow and underflow, and of numbers up to this size neither
// comes near: the pass over them that finds their maximum is left out.
constexpr float kModerate = 16.0f;

// rows = exp(x) if every x is moderate. Returns whether; if not, rows are undefined.
template <class T>
bool compute_moderate_weights(const HeadShape& shape, const T* x, int64_t heads, int64_t tokens, float* rows,
                              const T* beside = nullptr) {
  Vec largest{};
  pack_rows(
      shape, x, heads, tokens, rows,
      [&](Vec v) AFT_LAMBDA_INLINE {
        largest = raised_by(largest, absolute(v));
        return exp(v);
      },
      beside);
  return !any((IntVec)(largest > kModerate));
}

// rows = exp(query - shift), one shift per token and head, 0 where it can be.
template <class T>
Rows compute_query_weights(const HeadShape& shape, const T* query, int64_t heads, int64_t tokens, float* memory) {
  const Rows rows{memory, shape.row(heads)};
  if (compute_moderate_weights(shape, query, heads, tokens, memory)) return rows;
  copy_rows(shape, query, heads, tokens, memory);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      float* row = memory + t * rows.stride + h * shape.padded;
      Vec shift = splat(kNoKey);
      for (int64_t c = 0; c < shape.width; ++c) shift = raised_by(shift, splat(row[c]));
      for (int64_t c = 0; c < shape.padded; c += kLanes)
        store(row + c, shape.clear_padding(exp(load(row + c) - shift), c));
    }
  return rows;
}

// scales[t] = scale / the sum of queries[t]
void query_scales(const HeadShape& shape, Rows queries, int64_t tokens, float scale, float* scales) {
  sum_rows(tokens, scales, [&](int64_t t) AFT_LAMBDA_INLINE {
    Vec sum{};
    for (int64_t c = 0; c < shape.padded; c += kLanes) sum += load(queries[t] + c);
    return sum;
  });
  for (int64_t t = 0; t < tokens; t += kLanes) store(scales + t, scale / load(scales + t));
}

// Folds the normalization of the keys into the matrix.
void normalize(const EfficientAttention& p, Context& context, int64_t length) {
  if (p.normalization == Normalization::kScaling)
    for (int64_t c = 0; c < context.width; c += kLanes)
      context.rescale(c, splat(1.0f / static_cast<float>(max(1, length))));
  else
    for (int64_t c = 0; c < context.width; c += kLanes) {
      const Vec sum = load(context.sum + c);
      context.rescale(c, sum == 0.0f ? Vec{} : 1.0f / sum);
    }
}

template <class T>
void whole(const EfficientAttention& p, const Parallel& parallel) {
  const HeadShape shape(p.channels, p.heads);
  const bool softmax = p.normalization == Normalization::kSoftmax;
  const int64_t state = Context::floats(shape), states = state * p.heads, block = shape.rows_floats(p.heads);
  const int64_t chunk = shape.chunk_tokens(p.tokens, p.batch), chunks = ceil_div(p.tokens, chunk);
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  Scratch partials(p.batch * chunks * states);

  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, length_of(p, b));
    float *key_memory = task_memory(2 * block), *value_memory = key_memory + block;
    const auto context_of = [&](int64_t h) { return Context(shape, partials.data() + task * states + h * state); };
    for (int64_t h = 0; h < p.heads; ++h) context_of(h).clear(p.normalization);
    bool moderate = softmax;  // so far: the contexts are relative to 0
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), at = (b * p.tokens + t) * p.channels;
      const Rows keys{key_memory, shape.row(p.heads)};
      const Rows values = packed_rows(shape, value + at, p.heads, tokens, value_memory);
      moderate = moderate && compute_moderate_weights(shape, key + at, p.heads, tokens, key_memory, value + at);
      if (!moderate) copy_rows(shape, key + at, p.heads, tokens, key_memory);
      for (int64_t h = 0; h < p.heads; ++h) {
        const int64_t head = h * shape.padded;
        const int64_t next = at + kHeadTokens * p.channels + h * shape.width * tokens;  // this head's share
        Context context = context_of(h);
        if (moderate) {
          zero(context.maximum, context.width);
          add_rows(shape, keys.from(head), tokens, context.sum);
        } else if (softmax) {
          compute_key_weights(shape, key_memory + head, keys.stride, tokens, context);
        }
        add_to_context<T>(keys.from(head), values.from(head), tokens, shape.padded, context.matrix,
                          {key + next, value + next});
      }
    }
  });
  parallel_for(parallel, p.batch * p.heads, p.batch * chunks * states, [&](int64_t task) {
    const int64_t b = task / p.heads, h = task % p.heads;
    float* first = partials.data() + b * chunks * states + h * state;
    Context total(shape, first);
    for (int64_t i = 1; i < chunks; ++i) total.merge(Context(shape, first + i * states));
    normalize(p, total, length_of(p, b));
  });

  const Output<T> output(p.output, p.batch * p.tokens * p.channels, shape.width);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, p.tokens);
    float* memory = task_memory(block);
    float scales[kHeadTokens];
    for (float& scale : scales) scale = p.scale;
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), at = (b * p.tokens + t) * p.channels;
      const Rows queries = softmax ? compute_query_weights(shape, query + at, p.heads, tokens, memory)
                                   : copy_rows(shape, query + at, p.heads, tokens, memory);
      for (int64_t h = 0; h < p.heads; ++h) {
        const Rows own = queries.from(h * shape.padded);
        if (softmax) query_scales(shape, own, tokens, p.scale, scales);
        apply_context<T>(own, partials.data() + b * chunks * states + h * state, tokens, shape.padded,
                         {output.from(at + h * shape.width), p.channels, shape.width, scales,
                          query + at + kHeadTokens * p.channels + h * shape.width});
      }
    }
    output.fence();
  });
}

// compute_key_weights for a causal block: every weight is relative to the largest key up to the block's first token.
// Later keys may exceed it by kSafeSpread; the block ends before one that exceeds it by more. queries are
// divided by the prefix sums of the weights. Returns the number of tokens taken.
template <class T>
int64_t compute_causal_key_weights(const HeadShape& shape, const T* key, int64_t tokens, RunningContext& context,
                                   float* keys) {
  const int64_t row = shape.row(1);
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    const int64_t count = shape.width - c;
    const Vec reference = raised_by(load(context.sums.maximum + c), load(key + c, count));
    for (int64_t t = 0; t < tokens; ++t) {
      prefetch(key + (t + kPrefetchRows) * shape.stride + c);
      if (any((IntVec)(load(key + t * shape.stride + c, count) - reference > kSafeSpread))) tokens = t;
    }
  }
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    const int64_t count = shape.width - c;
    const Vec reference = raised_by(load(context.sums.maximum + c), load(key + c, count));
    context.move_maximum(c, reference);
    for (int64_t t = 0; t < tokens; ++t)
      store(keys + t * row + c, exp(load(key + t * shape.stride + c, count) - reference));
  }
  return tokens;
}

void divide_queries(const HeadShape& shape, const float* keys, int64_t tokens, RunningContext& context,
                    float* queries) {
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    const Vec base = load(context.sums.sum + c);
    Vec block{};
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = t * shape.row(1) + c;
      block += load(keys + at);
      const Vec total = base + block;
      store(queries + at, total == 0.0f ? Vec{} : load(queries + at) / total);
    }
    add_compensated(context.sums.sum + c, context.compensation.sum + c, block);
  }
}

// Moves the maximum to the largest key of the block that was taken.
template <class T>
void move_maximum_past(const HeadShape& shape, const T* key, int64_t tokens, RunningContext& context) {
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    Vec m = load(context.sums.maximum + c);
    for (int64_t t = 1; t < tokens; ++t) m = raised_by(m, load(key + t * shape.stride + c, shape.width - c));
    context.move_maximum(c, m);
  }
}

template <class T>
void causal(const EfficientAttention& p, const Parallel& parallel) {
  const HeadShape shape(p.channels, p.heads);
  const bool softmax = p.normalization == Normalization::kSoftmax;
  const int64_t state = RunningContext::floats(shape), block = shape.rows_floats(1);
  const int64_t group = shape.heads_per_task(p.heads, p.batch, parallel.threads), groups = ceil_div(p.heads, group);
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  const Output<T> output(p.output, p.batch * p.tokens * p.channels, shape.width);

  parallel_for(parallel, p.batch * groups, [&](int64_t task) {
    const int64_t b = task / groups, first_head = task % groups * group;
    const int64_t heads = min(group, p.heads - first_head), length = length_of(p, b);
    float* queries = task_memory(heads * state + 4 * block);
    float *keys = queries + block, *values = keys + block, *results = values + block, *states = results + block;
    float scales[kHeadTokens];
    for (int64_t h = 0; h < heads; ++h) RunningContext(shape, states + h * state).clear(p.normalization);
    for (int64_t begin = 0; begin < length; begin += kHeadTokens)
      for (int64_t h = 0; h < heads; ++h) {
        RunningContext context(shape, states + h * state);
        const int64_t end = min(begin + kHeadTokens, length);
        for (int64_t t = begin, tokens = 0; t < end; t += tokens) {
          const int64_t at = (b * p.tokens + t) * p.channels + (first_head + h) * shape.width;
          tokens = end - t;
          if (softmax) {
            tokens = compute_causal_key_weights(shape, key + at, tokens, context, keys);
            query_scales(shape, compute_query_weights(shape, query + at, 1, tokens, queries), tokens, p.scale, scales);
            divide_queries(shape, keys, tokens, context, queries);
          } else {
            copy_rows(shape, key + at, 1, tokens, keys);
            copy_rows(shape, query + at, 1, tokens, queries);
            for (int64_t i = 0; i < tokens; ++i) scales[i] = p.scale / static_cast<float>(t + i + 1);
          }
          copy_rows(shape, value + at, 1, tokens, values);
          zero(results, tokens * shape.padded);
          const int64_t row = shape.row(1);
          advance_context({queries, row}, {keys, row}, {values, row}, tokens, shape.padded, context.sums.matrix,
                          context.compensation.matrix, results);
          write_rows(shape, results, scales, tokens, output, at);
          if (softmax) move_maximum_past(shape, key + at, tokens, context);
        }
      }
    clear_rows(shape, output, b * p.tokens, length, p.tokens, first_head, heads);
    output.fence();
  });
}

}  // namespace

void efficient_attention(const EfficientAttention& p, const Parallel& parallel) {
  with_element_and_causality(
      p, [&](auto element) { causal<decltype(element)>(p, parallel); },
      [&](auto element) { whole<decltype(element)>(p, parallel); });
}

}  // namespace aft::AFT_ISA
