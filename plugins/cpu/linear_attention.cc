// Linear attention ("Transformers are RNNs", Katharopoulos et al., arXiv 2006.16236, equations 4 to 6), per
// head of width d:
//
//   Y_t = phi(Q_t) S / (phi(Q_t) z + eps),  S = sum_u phi(K_u) V_u^T,  z = sum_u phi(K_u)     causal: u <= t
//
// phi(x) = elu(x) + 1 or relu(x). Bound by memory at small d (16 bytes per token and channel in float32
// against 4 d FLOPs), by multiply-adds from about d = 64.
//
// Not causal: tasks sum S and z over chunks of tokens, the chunks are added, a second sweep applies them.
// Causal: a task runs down the tokens with the contexts of a few heads in the first-level cache.

#include "head_context.h"
#include "head_rows.h"
#include "math.h"
#include "tasks.h"

namespace aft::AFT_ISA {
namespace {

// phi of rows, packed.
template <class T>
void feature_rows(FeatureMap map, const HeadShape& shape, const T* x, int64_t heads, int64_t tokens, float* rows) {
  if (map == FeatureMap::kRelu)
    pack_rows(shape, x, heads, tokens, rows, [](Vec v) AFT_LAMBDA_INLINE { return maximum_of(v, Vec{}); });
  else
    pack_rows(shape, x, heads, tokens, rows,
              [](Vec v) AFT_LAMBDA_INLINE { return maximum_of(v, Vec{}) + exp(minimum_of(v, Vec{})); });
}

// sum += rows, each lane over the tokens.
void add_rows(const HeadShape& shape, const float* rows, int64_t tokens, float* sum) {
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    Vec block{};
    for (int64_t t = 0; t < tokens; ++t) block += load(rows + t * shape.padded + c);
    store(sum + c, load(sum + c) + block);
  }
}

AFT_INLINE float reciprocal(float denominator) { return denominator > 0.0f ? 1.0f / denominator : 0.0f; }

// scales[t] = 1 / (queries[t] z_t + eps), where z_t is sum plus keys[0..t]; sum then takes up all the keys.
void prefix_scales(const HeadShape& shape, const float* queries, const float* keys, int64_t tokens, float eps,
                   float* sum, float* scales) {
  Vec dots[kHeadTokens] = {};
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    const Vec base = load(sum + c);
    Vec block{};
    for (int64_t t = 0; t < tokens; ++t) {
      block += load(keys + t * shape.padded + c);
      dots[t] += load(queries + t * shape.padded + c) * (base + block);
    }
    store(sum + c, base + block);
  }
  for (int64_t t = 0; t < tokens; ++t) scales[t] = reciprocal(sum_lanes(dots[t]) + eps);
}

template <class T>
void whole(const LinearAttention& p, const Parallel& parallel) {
  const HeadShape shape(p.channels, p.heads);
  const int64_t block = shape.block_floats();
  const int64_t state = shape.padded * (shape.padded + 1), states = state * p.heads;  // S, then z
  const int64_t chunk = shape.chunk_tokens(p.tokens, p.batch), chunks = ceil_div(p.tokens, chunk);
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  Scratch partials(p.batch * chunks * states);

  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, length_of(p, b));
    float* partial = partials.data() + task * states;
    zero(partial, states);
    float* keys = task_memory(2 * p.heads * block);
    float* values = keys + p.heads * block;
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), at = (b * p.tokens + t) * p.channels;
      feature_rows(p.feature_map, shape, key + at, p.heads, tokens, keys);
      copy_rows(shape, value + at, p.heads, tokens, values);
      for (int64_t h = 0; h < p.heads; ++h) {
        float *context = partial + h * state, *sum = context + shape.padded * shape.padded;
        add_rows(shape, keys + h * block, tokens, sum);
        add_to_context(keys + h * block, values + h * block, tokens, shape.padded, context);
      }
    }
  });
  add_partials(parallel, partials.data(), p.batch, chunks, states);

  const Output<T> output(p.output, p.batch * p.tokens * p.channels, shape.width);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, p.tokens);
    const float* total = partials.data() + b * chunks * states;
    float* all_queries = task_memory((p.heads + 1) * block);
    float* results = all_queries + p.heads * block;
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), at = (b * p.tokens + t) * p.channels;
      feature_rows(p.feature_map, shape, query + at, p.heads, tokens, all_queries);
      for (int64_t h = 0; h < p.heads; ++h) {
        const float *context = total + h * state, *sum = context + shape.padded * shape.padded;
        const float* queries = all_queries + h * block;
        float scales[kHeadTokens];
        for (int64_t i = 0; i < tokens; ++i)
          scales[i] = reciprocal(dot(queries + i * shape.padded, sum, shape.padded) + p.eps);
        zero(results, tokens * shape.padded);
        apply_context(queries, context, tokens, shape.padded, results);
        write_rows(shape, results, scales, tokens, output, at + h * shape.width);
      }
    }
    output.finish();
  });
}

template <class T>
void causal(const LinearAttention& p, const Parallel& parallel) {
  const HeadShape shape(p.channels, p.heads);
  const int64_t state = shape.padded * (shape.padded + 1), block = shape.block_floats();
  const int64_t group = shape.heads_per_task(p.heads, p.batch, parallel.threads), groups = ceil_div(p.heads, group);
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  const Output<T> output(p.output, p.batch * p.tokens * p.channels, shape.width);

  parallel_for(parallel, p.batch * groups, [&](int64_t task) {
    const int64_t b = task / groups, first_head = task % groups * group;
    const int64_t heads = min(group, p.heads - first_head), length = length_of(p, b);
    float* states = task_memory(heads * (state + 3 * block) + block);
    float* queries = states + heads * state;
    float* keys = queries + heads * block;
    float* values = keys + heads * block;
    float* results = values + heads * block;
    zero(states, heads * state);
    for (int64_t t = 0; t < length; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, length - t);
      const int64_t at = (b * p.tokens + t) * p.channels + first_head * shape.width;
      feature_rows(p.feature_map, shape, query + at, heads, tokens, queries);
      feature_rows(p.feature_map, shape, key + at, heads, tokens, keys);
      copy_rows(shape, value + at, heads, tokens, values);
      for (int64_t h = 0; h < heads; ++h) {
        float *context = states + h * state, *sum = context + shape.padded * shape.padded;
        const int64_t own = h * block;
        float scales[kHeadTokens];
        prefix_scales(shape, queries + own, keys + own, tokens, p.eps, sum, scales);
        zero(results, tokens * shape.padded);
        advance_context(queries + own, keys + own, values + own, tokens, shape.padded, context, results);
        write_rows(shape, results, scales, tokens, output, at + h * shape.width);
      }
    }
    clear_rows(shape, output, b * p.tokens, length, p.tokens, first_head, heads);
    output.finish();
  });
}

}  // namespace

void linear_attention(const LinearAttention& p, const Parallel& parallel) {
  with_element(p.element, [&](auto element) {
    using T = decltype(element);
    if (p.causal)
      causal<T>(p, parallel);
    else
      whole<T>(p, parallel);
  });
}

}  // namespace aft::AFT_ISA
