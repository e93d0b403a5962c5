// Linear attention ("Transformers are RNNs", Katharopoulos et al., arXiv 2006.16236, equations 4 to 6), per head.
//
// Computes: Y_t = phi(Q_t) S / (phi(Q_t) z + eps),  S = sum_u phi(K_u) V_u^T,  z = sum_u phi(K_u)     causal: u <= t
//           phi(x) = elu(x) + 1, relu(x) or x; the divisor may be max(phi(Q_t) z, eps) or left out
// Cost:     at d = 32 bound by arithmetic and memory alike: 16 bytes per token and channel in float32 against 4 d FLOPs
//           and two exponentials (efficient_attention.cc does the same work).
// Method:   not causal: tasks sum S and z over chunks of tokens, the chunks are added, and a second sweep applies them.
//           Causal: a task runs down the tokens with the contexts of a few heads in the first-level cache.
// Numerics: phi of elu and relu is never negative, so z does not cancel. Long sums are compensated in causal
//           form.
// See:      sums/head_context.h, sums/head_rows.h

#include "sums/head_context.h"
#include "sums/head_rows.h"
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
  else if (map == FeatureMap::kIdentity)
    copy_rows(shape, x, heads, tokens, rows, beside);
  else
    pack_rows(
        shape, x, heads, tokens, rows,
        [](Vec v) AFT_LAMBDA_INLINE { return at_least(Vec{}, v) + exp(at_most(Vec{}, v)); }, beside);
}

// scales become 1 / the divisor, of which they are the sums over the keys.
void invert(const LinearAttention& p, int64_t tokens, float* scales) {
  const float eps = floor_of_eps(p.eps);
  if (p.normalizer == Normalizer::kClamp)
    for (int64_t t = 0; t < tokens; t += kLanes) store(scales + t, 1.0f / at_least(splat(eps), load(scales + t)));
  else
    for (int64_t t = 0; t < tokens; t += kLanes) store(scales + t, 1.0f / (load(scales + t) + eps));
}

void fill_with_ones(float* scales) {
  for (int64_t t = 0; t < kHeadTokens; t += kLanes) store(scales + t, splat(1.0f));
}

// scales[t] = 1 / the divisor of queries[t] z
void query_scales(const LinearAttention& p, const HeadShape& shape, Rows queries, int64_t tokens, const float* sum,
                  float* scales) {
  sum_rows(tokens, scales, [&](int64_t t) AFT_LAMBDA_INLINE {
    Vec terms{};
    for (int64_t c = 0; c < shape.padded; c += kLanes) terms += load(queries[t] + c) * load(sum + c);
    return terms;
  });
  invert(p, tokens, scales);
}

// scales[t] = 1 / the divisor of queries[t] z_t, where z_t is sum plus keys[0..t]; sum then takes up all the keys, and
// compensation the rounding error of that.
void prefix_scales(const LinearAttention& p, const HeadShape& shape, Rows queries, Rows keys, int64_t tokens,
                   float* sum, float* compensation, float* scales) {
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
  invert(p, tokens, scales);
}

// The size of a state: S, and z after it.
int64_t state_floats(const GroupShapes& shapes) { return shapes.context.floats() + shapes.key.padded; }

// The sums of every document over chunks of keys; the first chunk's become their total.
template <class T>
void sum_keys(const LinearAttention& p, const GroupShapes& shapes, const Parallel& parallel, int64_t chunk,
              int64_t chunks, float* partials) {
  const HeadShape &key_shape = shapes.key, &value_shape = shapes.value;
  const int64_t state = state_floats(shapes), states = state * shapes.kv_heads, all = key_tokens_of(p);
  const int64_t row = key_shape.row(shapes.kv_heads);
  const int64_t key_block = key_shape.rows_floats(shapes.kv_heads);
  const int64_t block = key_block + value_shape.rows_floats(shapes.kv_heads);
  const bool has_normalizer = p.normalizer != Normalizer::kNone;
  const T *key = static_cast<const T*>(p.key), *value = static_cast<const T*>(p.value);

  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, key_length_of(p, b));
    float* partial = partials + task * states;
    zero(partial, states);
    float* memory = task_memory(block);
    const Rows keys{memory, row};
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), first = b * all + t;
      const T *keys_at = key + first * key_shape.stride, *values_at = value + first * value_shape.stride;
      feature_rows(p.feature_map, key_shape, keys_at, shapes.kv_heads, tokens, memory, shapes.beside_key(values_at));
      const Rows values = packed_rows(value_shape, values_at, shapes.kv_heads, tokens, memory + key_block);
      for (int64_t h = 0; h < shapes.kv_heads; ++h) {
        float *context = partial + h * state, *sum = context + shapes.context.floats();
        const Rows own = keys.from(h * key_shape.padded);
        if (has_normalizer) add_rows(key_shape, own, tokens, sum);
        const auto next = [&](const HeadShape& shape) {  // this head's share
          return kHeadTokens * shape.stride + h * shape.width * tokens;
        };
        add_to_context<T>(own, values.from(h * value_shape.padded), tokens, shapes.context, context,
                          {keys_at + next(key_shape), values_at + next(value_shape)});
      }
    }
  });
  add_partials(parallel, partials, p.batch, chunks, states);
}

template <class T>
void whole(const LinearAttention& p, const Parallel& parallel) {
  const GroupShapes shapes(p);
  const int64_t state = state_floats(shapes), states = state * shapes.kv_heads;
  const int64_t key_chunk = shapes.chunk_tokens(key_tokens_of(p), p.batch);
  const int64_t key_chunks = max(1, ceil_div(key_tokens_of(p), key_chunk));
  Scratch partials(p.batch * key_chunks * states);
  sum_keys<T>(p, shapes, parallel, key_chunk, key_chunks, partials.data());

  const HeadShape &shape = shapes.query, &output_shape = shapes.output;
  const int64_t row = shape.row(p.heads), block = shape.rows_floats(p.heads);
  const int64_t chunk = shapes.chunk_tokens(p.tokens, p.batch), chunks = ceil_div(p.tokens, chunk);
  const bool has_normalizer = p.normalizer != Normalizer::kNone;
  const T* query = static_cast<const T*>(p.query);
  const Output<T> output(p.output, p.batch * p.tokens * output_shape.stride, output_shape.width);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, p.tokens);
    const float* total = partials.data() + b * key_chunks * states;
    float* memory = task_memory(block);
    float scales[kHeadTokens];
    fill_with_ones(scales);
    for (int64_t t = begin; t < end; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, end - t), first = b * p.tokens + t;
      const T* queries_at = query + first * shape.stride;
      feature_rows(p.feature_map, shape, queries_at, p.heads, tokens, memory);
      for (int64_t h = 0; h < p.heads; ++h) {
        const float *context = total + h / shapes.group * state, *sum = context + shapes.context.floats();
        const Rows queries{memory + h * shape.padded, row};
        if (has_normalizer) query_scales(p, shape, queries, tokens, sum, scales);
        apply_context<T>(queries, context, tokens, shapes.context,
                         {output.from(first * output_shape.stride + h * output_shape.width), output_shape.stride,
                          output_shape.width, scales, queries_at + kHeadTokens * shape.stride + h * shape.width});
      }
    }
    output.fence();
  });
}

template <class T>
void causal(const LinearAttention& p, const Parallel& parallel) {
  const GroupShapes shapes(p);
  const HeadShape &shape = shapes.query, &key_shape = shapes.key, &value_shape = shapes.value;
  const int64_t sums = state_floats(shapes), state = 2 * sums;  // S, then z, and then the compensation of both
  const int64_t group = shapes.heads_per_task(p.batch, parallel.threads), groups = ceil_div(p.heads, group);
  const int64_t block = shape.rows_floats(group), key_block = key_shape.rows_floats(group / shapes.group),
                value_block = value_shape.rows_floats(group / shapes.group);
  const bool has_normalizer = p.normalizer != Normalizer::kNone;
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  const Output<T> output(p.output, p.batch * p.tokens * shapes.output.stride, shapes.output.width);

  parallel_for(parallel, p.batch * groups, [&](int64_t task) {
    const int64_t b = task / groups, first_head = task % groups * group;
    const int64_t heads = min(group, p.heads - first_head), length = length_of(p, b);
    const int64_t kv_heads = heads / shapes.group, first_kv_head = first_head / shapes.group;
    float* states = task_memory(heads * state + block + key_block + value_block + value_shape.rows_floats(1));
    float *query_memory = states + heads * state, *key_memory = query_memory + block,
          *value_memory = key_memory + key_block, *results = value_memory + value_block;
    float scales[kHeadTokens];
    fill_with_ones(scales);
    zero(states, heads * state);
    for (int64_t t = 0; t < length; t += kHeadTokens) {
      const int64_t tokens = min(kHeadTokens, length - t), first = b * p.tokens + t;
      const T *queries_at = query + first * shape.stride + first_head * shape.width,
              *keys_at = key + first * key_shape.stride + first_kv_head * key_shape.width,
              *values_at = value + first * value_shape.stride + first_kv_head * value_shape.width;
      feature_rows(p.feature_map, shape, queries_at, heads, tokens, query_memory);
      feature_rows(p.feature_map, key_shape, keys_at, kv_heads, tokens, key_memory, shapes.beside_key(values_at));
      const Rows values = packed_rows(value_shape, values_at, kv_heads, tokens, value_memory);
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t kv_head = h / shapes.group;
        float *context = states + h * state, *sum = context + shapes.context.floats();
        float *compensation = context + sums, *sum_compensation = sum + sums;
        const Rows queries{query_memory + h * shape.padded, shape.row(heads)};
        const Rows keys{key_memory + kv_head * key_shape.padded, key_shape.row(kv_heads)};
        if (has_normalizer) prefix_scales(p, shape, queries, keys, tokens, sum, sum_compensation, scales);
        zero(results, tokens * value_shape.padded);
        advance_context(queries, keys, values.from(kv_head * value_shape.padded), tokens, shapes.context, context,
                        compensation, results);
        write_rows(shapes.output, results, scales, tokens, output,
                   first * shapes.output.stride + (first_head + h) * shapes.output.width);
      }
    }
    clear_rows(shapes.output, output, b * p.tokens, length, p.tokens, first_head, heads);
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
