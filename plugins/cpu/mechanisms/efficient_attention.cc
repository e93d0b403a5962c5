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
// See:      sums/head_context.h, sums/head_rows.h, sums/running_softmax.h

#include "sums/head_context.h"
#include "sums/head_rows.h"
#include "sums/running_softmax.h"
#include "simd/compensated_sum.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

// The sum of exp(K - maximum) V^T over some tokens; for scaling the sum of K V^T, and maximum stays 0.
struct Context {
  float *matrix, *sum, *maximum;
  ContextShape shape;

  static int64_t floats(const ContextShape& shape) { return shape.floats() + 2 * shape.rows; }

  Context(const ContextShape& shape, float* memory)
      : matrix(memory), sum(memory + shape.floats()), maximum(sum + shape.rows), shape(shape) {}

  void clear(Normalization normalization) {
    zero(matrix, shape.floats() + shape.rows);
    const Vec none = splat(normalization == Normalization::kSoftmax ? kNoKey : 0.0f);
    for (int64_t c = 0; c < shape.rows; c += kLanes) store(maximum + c, none);
  }

  // Multiplies key channels c to c + kLanes.
  void rescale(int64_t c, Vec factor) {
    if (!any((IntVec)(factor != 1.0f))) return;
    store(sum + c, load(sum + c) * factor);
    for (int lane = 0; lane < kLanes; ++lane) {
      float* row = matrix + (c + lane) * shape.columns;
      for (int64_t e = 0; e < shape.columns; e += kLanes) store(row + e, load(row + e) * factor[lane]);
    }
  }

  void merge(const Context& other) {
    for (int64_t c = 0; c < shape.rows; c += kLanes) {
      const Vec m1 = load(maximum + c), m2 = load(other.maximum + c), m = raised_by(m1, m2);
      rescale(c, exp(m1 - m));
      const Vec scale = exp(m2 - m);
      store(sum + c, load(sum + c) + load(other.sum + c) * scale);
      for (int lane = 0; lane < kLanes; ++lane) {
        float* row = matrix + (c + lane) * shape.columns;
        const float* other_row = other.matrix + (c + lane) * shape.columns;
        for (int64_t e = 0; e < shape.columns; e += kLanes)
          store(row + e, load(row + e) + load(other_row + e) * scale[lane]);
      }
      store(maximum + c, m);
    }
  }
};

// A context that the blocks of a document join one after the other, and the compensation of its sums.
struct RunningContext {
  Context sums, compensation;

  static int64_t floats(const ContextShape& shape) { return 2 * Context::floats(shape); }

  RunningContext(const ContextShape& shape, float* memory)
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

// exp of numbers up to this size neither overflows nor underflows. For such rows no maximum is subtracted, which saves
// the pass that finds it.
constexpr float kModerate = 16.0f;

// Sets rows to exp(x) and returns true if every x is moderate; else it returns false, and rows are undefined.
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
    for (int64_t c = 0; c < context.shape.rows; c += kLanes)
      context.rescale(c, splat(1.0f / static_cast<float>(max(1, length))));
  else
    for (int64_t c = 0; c < context.shape.rows; c += kLanes) {
      const Vec sum = load(context.sum + c);
      context.rescale(c, sum == 0.0f ? Vec{} : 1.0f / sum);
    }
}

// The contexts of every document over chunks of keys; the first chunk's become the whole document's, normalized.
template <class T>
void sum_keys(const EfficientAttention& p, const GroupShapes& shapes, const Parallel& parallel, int64_t chunk,
              int64_t chunks, float* partials) {
  const HeadShape &key_shape = shapes.key, &value_shape = shapes.value;
  const bool softmax = p.normalization == Normalization::kSoftmax;
  const int64_t state = Context::floats(shapes.context), states = state * shapes.kv_heads, all = key_tokens_of(p);
  const int64_t key_block = key_shape.rows_floats(shapes.kv_heads);
  const int64_t block = key_block + value_shape.rows_floats(shapes.kv_heads);
  const T *key = static_cast<const T*>(p.key), *value = static_cast<const T*>(p.value);

  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, key_length_of(p, b));
    float *key_memory = task_memory(block), *value_memory = key_memory + key_block;
    const auto context_of = [&](int64_t h) { return Context(shapes.context, partials + task * states + h * state); };
    for (int64_t h = 0; h < shapes.kv_heads; ++h) context_of(h).clear(p.normalization);
    bool moderate = softmax;  // all keys so far are moderate, and the contexts relative to 0
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), first = b * all + t;
      const T *keys_at = key + first * key_shape.stride, *values_at = value + first * value_shape.stride;
      const Rows keys{key_memory, key_shape.row(shapes.kv_heads)};
      const Rows values = packed_rows(value_shape, values_at, shapes.kv_heads, tokens, value_memory);
      moderate = moderate && compute_moderate_weights(key_shape, keys_at, shapes.kv_heads, tokens, key_memory,
                                                      shapes.beside_key(values_at));
      if (!moderate) copy_rows(key_shape, keys_at, shapes.kv_heads, tokens, key_memory);
      for (int64_t h = 0; h < shapes.kv_heads; ++h) {
        const int64_t head = h * key_shape.padded;
        const auto next = [&](const HeadShape& shape) {  // this head's share
          return kHeadTokens * shape.stride + h * shape.width * tokens;
        };
        Context context = context_of(h);
        if (moderate) {
          zero(context.maximum, key_shape.padded);
          add_rows(key_shape, keys.from(head), tokens, context.sum);
        } else if (softmax) {
          compute_key_weights(key_shape, key_memory + head, keys.stride, tokens, context);
        }
        add_to_context<T>(keys.from(head), values.from(h * value_shape.padded), tokens, shapes.context, context.matrix,
                          {keys_at + next(key_shape), values_at + next(value_shape)});
      }
    }
  });
  parallel_for(parallel, p.batch * shapes.kv_heads, p.batch * chunks * states, [&](int64_t task) {
    const int64_t b = task / shapes.kv_heads, h = task % shapes.kv_heads;
    float* first = partials + b * chunks * states + h * state;
    Context total(shapes.context, first);
    for (int64_t i = 1; i < chunks; ++i) total.merge(Context(shapes.context, first + i * states));
    normalize(p, total, key_length_of(p, b));
  });
}

template <class T>
void whole(const EfficientAttention& p, const Parallel& parallel) {
  const GroupShapes shapes(p);
  const int64_t state = Context::floats(shapes.context), states = state * shapes.kv_heads;
  const int64_t key_chunk = shapes.chunk_tokens(key_tokens_of(p), p.batch);
  const int64_t key_chunks = max(1, ceil_div(key_tokens_of(p), key_chunk));
  Scratch partials(p.batch * key_chunks * states);
  sum_keys<T>(p, shapes, parallel, key_chunk, key_chunks, partials.data());

  const HeadShape &shape = shapes.query, &output_shape = shapes.output;
  const bool softmax = p.normalization == Normalization::kSoftmax;
  const int64_t block = shape.rows_floats(p.heads);
  const int64_t chunk = shapes.chunk_tokens(p.tokens, p.batch), chunks = ceil_div(p.tokens, chunk);
  const T* query = static_cast<const T*>(p.query);
  const Output<T> output(p.output, p.batch * p.tokens * output_shape.stride, output_shape.width);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, p.tokens);
    float* memory = task_memory(block);
    float scales[kHeadTokens];
    for (float& scale : scales) scale = p.scale;
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), first = b * p.tokens + t;
      const T* queries_at = query + first * shape.stride;
      const Rows queries = softmax ? compute_query_weights(shape, queries_at, p.heads, tokens, memory)
                                   : copy_rows(shape, queries_at, p.heads, tokens, memory);
      for (int64_t h = 0; h < p.heads; ++h) {
        const Rows own = queries.from(h * shape.padded);
        if (softmax) query_scales(shape, own, tokens, p.scale, scales);
        apply_context<T>(own, partials.data() + b * key_chunks * states + h / shapes.group * state, tokens,
                         shapes.context,
                         {output.from(first * output_shape.stride + h * output_shape.width), output_shape.stride,
                          output_shape.width, scales, queries_at + kHeadTokens * shape.stride + h * shape.width});
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

// Raises the maximum to the largest key of the tokens that were taken.
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
  const GroupShapes shapes(p);
  const HeadShape &shape = shapes.query, &key_shape = shapes.key, &value_shape = shapes.value;
  const bool softmax = p.normalization == Normalization::kSoftmax;
  const int64_t state = RunningContext::floats(shapes.context), block = shape.rows_floats(1),
                value_block = value_shape.rows_floats(1);
  const int64_t group = shapes.heads_per_task(p.batch, parallel.threads), groups = ceil_div(p.heads, group);
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  const Output<T> output(p.output, p.batch * p.tokens * shapes.output.stride, shapes.output.width);

  parallel_for(parallel, p.batch * groups, [&](int64_t task) {
    const int64_t b = task / groups, first_head = task % groups * group;
    const int64_t heads = min(group, p.heads - first_head), length = length_of(p, b);
    float* queries = task_memory(heads * state + 2 * block + 2 * value_block);
    float *keys = queries + block, *values = keys + block, *results = values + value_block,
          *states = results + value_block;
    float scales[kHeadTokens];
    for (int64_t h = 0; h < heads; ++h) RunningContext(shapes.context, states + h * state).clear(p.normalization);
    for (int64_t begin = 0; begin < length; begin += kHeadTokens)
      for (int64_t h = 0; h < heads; ++h) {
        RunningContext context(shapes.context, states + h * state);
        const int64_t end = min(begin + kHeadTokens, length), head = first_head + h, kv_head = head / shapes.group;
        for (int64_t t = begin, tokens = 0; t < end; t += tokens) {
          const int64_t first = b * p.tokens + t;
          const T *query_at = query + first * shape.stride + head * shape.width,
                  *key_at = key + first * key_shape.stride + kv_head * key_shape.width,
                  *value_at = value + first * value_shape.stride + kv_head * value_shape.width;
          tokens = end - t;
          if (softmax) {
            tokens = compute_causal_key_weights(key_shape, key_at, tokens, context, keys);
            query_scales(shape, compute_query_weights(shape, query_at, 1, tokens, queries), tokens, p.scale, scales);
            divide_queries(shape, keys, tokens, context, queries);
          } else {
            copy_rows(key_shape, key_at, 1, tokens, keys);
            copy_rows(shape, query_at, 1, tokens, queries);
            for (int64_t i = 0; i < tokens; ++i) scales[i] = p.scale / static_cast<float>(t + i + 1);
          }
          copy_rows(value_shape, value_at, 1, tokens, values);
          zero(results, tokens * value_shape.padded);
          const int64_t row = shape.row(1);
          advance_context({queries, row}, {keys, row}, {values, value_shape.row(1)}, tokens, shapes.context,
                          context.sums.matrix, context.compensation.matrix, results);
          write_rows(shapes.output, results, scales, tokens, output,
                     first * shapes.output.stride + head * shapes.output.width);
          if (softmax) move_maximum_past(key_shape, key_at, tokens, context);
        }
      }
    clear_rows(shapes.output, output, b * p.tokens, length, p.tokens, first_head, heads);
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
