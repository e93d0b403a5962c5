// Linear attention ("Transformers are RNNs", Katharopoulos et al., arXiv 2006.16236, equations 4 to 6), per head of
// width d.
//
// Computes: Y_t = phi(Q_t) S / (phi(Q_t) z + eps),  S = sum_u phi(K_u) V_u^T,  z = sum_u phi(K_u)     causal: u <= t
//           phi(x) = elu(x) + 1 or relu(x)
// Cost:     at d = 32 bound by arithmetic and memory alike: 16 bytes per token and channel in float32 against 4 d FLOPs
//           and two exponentials (efficient_attention.cc does the same work).
// Method:   not causal: tasks sum S and z over chunks of tokens, the chunks are added, and a second sweep applies them.
//           Causal: a task runs down the tokens with the contexts of a few heads in the first-level cache.
// Numerics: phi is never negative, so z does not cancel. Long sums are compensated in causal
//           form.
// See:      shared/head_context.h, shared/head_rows.h

#include "mechanisms/shared/head_context.h"
#include "mechanisms/shared/head_rows.h"
#include "simd/compensated_sum.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

// phi of rows, packed.
template <class T>
void feature_rows(FeatureMap map, const HeadShape& shape, const T* x, int64_t heads, int64_t tokens, float* rows,
                  const T* beside = nullptr) {
  if (map == FeatureMap::kRelu)
    pack_rows(shape, x, heads, tokens, rows, [](Vec v) AFT_LAMBDA_INLINE { return at_least(Vec{}, v); }, beside);
  else
    pack_rows(
        shape, x, heads, tokens, rows,
        [](Vec v) AFT_LAMBDA_INLINE { return at_least(Vec{}, v) + exp(at_most(Vec{}, v)); }, beside);
}

// A smaller eps counts as this one: MIN_EPS of mechanisms/linear_attention.py.
constexpr float kMinEps = 1e-20f;

// scales become 1 / (scales + eps).
void invert(int64_t tokens, float eps, float* scales) {
  const float added = eps > kMinEps ? eps : kMinEps;
  for (int64_t t = 0; t < tokens; t += kLanes) store(scales + t, 1.0f / (load(scales + t) + added));
}

// scales[t] = 1 / (queries[t] z + eps)
void query_scales(const HeadShape& shape, Rows queries, int64_t tokens, float eps, const float* sum, float* scales) {
  sum_rows(tokens, scales, [&](int64_t t) AFT_LAMBDA_INLINE {
    Vec terms{};
    for (int64_t c = 0; c < shape.padded; c += kLanes) terms += load(queries[t] + c) * load(sum + c);
    return terms;
  });
  invert(tokens, eps, scales);
}

// scales[t] = 1 / (queries[t] z_t + eps), where z_t is sum plus keys[0..t]; sum then takes up all the keys, and
// compensation the rounding error of that.
void prefix_scales(const HeadShape& shape, Rows queries, Rows keys, int64_t tokens, float eps, float* sum,
                   float* compensation, float* scales) {
  Vec dots[kHeadTokens] = {};
  for (int64_t c = 0; c < shape.padded; c += kLanes) {
    const Vec base = load(sum + c);
    Vec block{};
    for (int64_t t = 0; t < tokens; ++t) {
      block += load(keys[t] + c);
      dots[t] += load(queries[t] + c) * (base + block);
    }
    add_compensated(sum + c, compensation + c, block);
  }
  sum_rows(tokens, scales, [&](int64_t t) AFT_LAMBDA_INLINE { return dots[t]; });
  invert(tokens, eps, scales);
}

template <class T>
void whole(const LinearAttention& p, const Parallel& parallel) {
  const HeadShape shape(p.channels, p.heads);
  const int64_t row = shape.row(p.heads), block = shape.rows_floats(p.heads);
  const int64_t state = shape.padded * (shape.padded + 1), states = state * p.heads;  // S, then z
  const int64_t chunk = shape.chunk_tokens(p.tokens, p.batch), chunks = ceil_div(p.tokens, chunk);
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  Scratch partials(p.batch * chunks * states);

  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, length_of(p, b));
    float* partial = partials.data() + task * states;
    zero(partial, states);
    float* memory = task_memory(2 * block);
    const Rows keys{memory, row};
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), at = (b * p.tokens + t) * p.channels;
      feature_rows(p.feature_map, shape, key + at, p.heads, tokens, memory, value + at);
      const Rows values = packed_rows(shape, value + at, p.heads, tokens, memory + block);
      for (int64_t h = 0; h < p.heads; ++h) {
        float *context = partial + h * state, *sum = context + shape.padded * shape.padded;
        const int64_t head = h * shape.padded;
        add_rows(shape, keys.from(head), tokens, sum);
        const int64_t next = at + kHeadTokens * p.channels + h * shape.width * tokens;  // this head's share
        add_to_context<T>(keys.from(head), values.from(head), tokens, shape.padded, context,
                          {key + next, value + next});
      }
    }
  });
  add_partials(parallel, partials.data(), p.batch, chunks, states);

  const Output<T> output(p.output, p.batch * p.tokens * p.channels, shape.width);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, p.tokens);
    const float* total = partials.data() + b * chunks * states;
    float* memory = task_memory(block);
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), at = (b * p.tokens + t) * p.channels;
      feature_rows(p.feature_map, shape, query + at, p.heads, tokens, memory);
      for (int64_t h = 0; h < p.heads; ++h) {
        const float *context = total + h * state, *sum = context + shape.padded * shape.padded;
        const Rows queries{memory + h * shape.padded, row};
        float scales[kHeadTokens];
        query_scales(shape, queries, tokens, p.eps, sum, scales);
        const int64_t to = at + h * shape.width;
        apply_context<T>(queries, context, tokens, shape.padded,
                         {output.from(to), p.channels, shape.width, scales, query + to + kHeadTokens * p.channels});
      }
    }
    output.fence();
  });
}

template <class T>
void causal(const LinearAttention& p, const Parallel& parallel) {
  const HeadShape shape(p.channels, p.heads);
  const int64_t sums = shape.padded * (shape.padded + 1), state = 2 * sums;  // S, z, and the compensation of each
  const int64_t group = shape.heads_per_task(p.heads, p.batch, parallel.threads), groups = ceil_div(p.heads, group);
  const int64_t block = shape.rows_floats(group);
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  const Output<T> output(p.output, p.batch * p.tokens * p.channels, shape.width);

  parallel_for(parallel, p.batch * groups, [&](int64_t task) {
    const int64_t b = task / groups, first_head = task % groups * group;
    const int64_t heads = min(group, p.heads - first_head), row = shape.row(heads), length = length_of(p, b);
    float* states = task_memory(heads * state + 3 * block + shape.rows_floats(1));
    float *query_memory = states + heads * state, *key_memory = query_memory + block,
          *value_memory = key_memory + block, *results = value_memory + block;
    zero(states, heads * state);
    for (int64_t t = 0; t < length; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, length - t);
      const int64_t at = (b * p.tokens + t) * p.channels + first_head * shape.width;
      feature_rows(p.feature_map, shape, query + at, heads, tokens, query_memory);
      feature_rows(p.feature_map, shape, key + at, heads, tokens, key_memory, value + at);
      const Rows values = packed_rows(shape, value + at, heads, tokens, value_memory);
      for (int64_t h = 0; h < heads; ++h) {
        float *context = states + h * state, *sum = context + shape.padded * shape.padded;
        float *compensation = context + sums, *sum_compensation = sum + sums;
        const int64_t head = h * shape.padded;
        const Rows queries{query_memory + head, row}, keys{key_memory + head, row};
        float scales[kHeadTokens];
        prefix_scales(shape, queries, keys, tokens, p.eps, sum, sum_compensation, scales);
        zero(results, tokens * shape.padded);
        advance_context(queries, keys, values.from(head), tokens, shape.padded, context, compensation, results);
        write_rows(shape, results, scales, tokens, output, at + h * shape.width);
      }
    }
    clear_rows(shape, output, b * p.tokens, length, p.tokens, first_head, heads);
    output.fence();
  });
}

}  // namespace

void linear_attention(const LinearAttention& p, const Parallel& parallel) {
  with_element_and_causality(
      p, [&](auto element) { causal<decltype(element)>(p, parallel); },
      [&](auto element) { whole<decltype(element)>(p, parallel); });
}

}  // namespace aft::AFT_ISA
