// AFT-simple (Zhai et al., arXiv 2105.14103, equation 5).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c]) V[u,c] / (sum_u exp(K[u,c]) + eps)        causal: u <= t
//           With fewer key channels each serves the value channels of a head.
// Cost:     bound by memory: every element of q, k, v is read once and of y written once, 16 bytes per token and
//           channel in float32, for two exponentials and about ten other operations.
// Method:   (numerator, denominator, maximum) is an associative triple per channel. Not causal: tasks reduce chunks of
//           tokens to triples, the chunks are merged, and a second sweep applies the gate. Causal: the channels are cut
//           into tasks, and each runs down the tokens. Only where that gives fewer tasks than threads are the tokens
//           cut as well; then k and v are read twice.
// Numerics: sums are relative to the largest key. Long sums are compensated in causal form.
// See:      sums/running_softmax.h, sums/head_softmax_pool.h, simd/compensated_sum.h

#include <cmath>

#include "sums/head_softmax_pool.h"
#include "sums/running_softmax.h"
#include "simd/compensated_sum.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

constexpr int64_t kCausalChannels = 64;
constexpr int64_t kCausalChunk = 16384;  // where the tokens are cut: RunningSums adds up so many without compensation

template <class T, Gate gate>
void gate_rows(const AftSimple& p, const Output<T>& output, const float* context, int64_t b, int64_t begin,
               int64_t end) {
  const T* query = static_cast<const T*>(p.query);
  constexpr int kVecs = 2;  // two at a time hide the latency of a gate, a long chain of instructions
  const auto write = [&](auto vecs, int64_t at, int64_t c) AFT_LAMBDA_INLINE {
    constexpr int count = decltype(vecs)::value;
    Vec gated[count];
    for (int v = 0; v < count; ++v)
      gated[v] =
          gated_ratio<gate>(load(query + at + v * kLanes, p.channels - c), load(context + c + v * kLanes), splat(1.0f));
    for (int v = 0; v < count; ++v) output.write(at + v * kLanes, gated[v], p.channels - c);
  };
  for (int64_t t = begin; t < end; ++t) {
    const int64_t row = (b * p.tokens + t) * p.channels;
    int64_t c = 0;
    for (; c + kVecs * kLanes <= p.channels; c += kVecs * kLanes) {
      prefetch(query + row + c + kPrefetchRows * p.channels);
      write(Constant<kVecs>{}, row + c, c);
    }
    for (; c < p.channels; c += kLanes) write(Constant<1>{}, row + c, c);
  }
}

template <class T, Gate gate>
void whole(const AftSimple& p, const Parallel& parallel) {
  const int64_t width = round_up(p.channels, kLanes);
  const int64_t chunk = chunk_tokens(p.tokens);
  const int64_t chunks = ceil_div(p.tokens, chunk);
  Scratch partials(p.batch * chunks * 3 * width);
  const T* key = static_cast<const T*>(p.key);
  const T* value = static_cast<const T*>(p.value);

  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk;
    RunningSums sums(partials.data() + task * 3 * width, width);
    sums.clear();
    const int64_t first = b * p.tokens + begin;
    sums.add(key + first * p.channels, value + first * p.channels, min(begin + chunk, length_of(p, b)) - begin,
             p.channels, p.channels);
  });

  const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
  const float log_eps = std::log(p.eps);
  for (int64_t b = 0; b < p.batch; ++b) {
    RunningSums total(partials.data() + b * chunks * 3 * width, width);
    for (int64_t i = 1; i < chunks; ++i)
      total.merge(RunningSums(partials.data() + (b * chunks + i) * 3 * width, width));
    if (p.eps > 0.0f) total.add_eps(log_eps);
    total.divide();
  }
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk;
    gate_rows<T, gate>(p, output, partials.data() + b * chunks * 3 * width, b, begin, min(begin + chunk, p.tokens));
    output.fence();
  });
}

// Takes one vector of channels down at most kSumBlock tokens. Within the block all sums are relative to one
// maximum, known before the block is summed: the largest key up to its first token. Should a later key
// exceed it by too much, the block is cut to that first token, for which the maximum is exact. `compensation` is
// that of the sums, numerators and then denominators.
template <class T, Gate gate>
AFT_INLINE void causal_block(const T* query, const T* key, const T* value, const Output<T>& output, int64_t at,
                             int64_t tokens, int64_t stride, int64_t count, float log_eps, RunningSums& sums,
                             float* compensation, int64_t lane) {
  Vec numerator = load(sums.numerator + lane), denominator = load(sums.denominator + lane);
  Vec numerator_compensation = load(compensation + lane);
  Vec denominator_compensation = load(compensation + sums.width + lane);
  Vec maximum = load(sums.maximum + lane);
  while (tokens > 0) {
    int64_t rows = tokens;
    const Vec before = maximum, reference = raised_by(before, load(key + at, count));
    maximum = reference;
    for (int64_t i = 1; i < rows; ++i) maximum = raised_by(maximum, load(key + at + i * stride, count));
    if (any((IntVec)(maximum - reference > kSafeSpread))) {
      rows = 1;
      maximum = reference;
    }
    const Vec rescale = exp(before - reference);
    numerator *= rescale;
    numerator_compensation *= rescale;
    denominator *= rescale;
    denominator_compensation *= rescale;
    Vec counted = denominator;
    if (log_eps > kNoKey) counted += eps_beside(log_eps, reference);  // without eps it would cost 7 % of the time
    Vec n{}, d{};
    for (int64_t i = 0; i < rows; ++i, at += stride) {
      const int64_t ahead = at + kPrefetchRows * stride;
      prefetch(query + ahead);
      prefetch(key + ahead);
      prefetch(value + ahead);
      const Vec weight = exp(load(key + at, count) - reference);
      n += weight * load(value + at, count);
      d += weight;
      output.write(at, gated_ratio<gate>(load(query + at, count), numerator + n, counted + d), count);
    }
    const Vec block_rescale = exp(reference - maximum);
    add_compensated(numerator, numerator_compensation, n);
    add_compensated(denominator, denominator_compensation, d);
    numerator *= block_rescale;
    numerator_compensation *= block_rescale;
    denominator *= block_rescale;
    denominator_compensation *= block_rescale;
    tokens -= rows;
  }
  store(sums.numerator + lane, numerator);
  store(sums.denominator + lane, denominator);
  store(compensation + lane, numerator_compensation);
  store(compensation + sums.width + lane, denominator_compensation);
  store(sums.maximum + lane, maximum);
}

template <class T, Gate gate>
void causal(const AftSimple& p, const Parallel& parallel) {
  const T* query = static_cast<const T*>(p.query);
  const T* key = static_cast<const T*>(p.key);
  const T* value = static_cast<const T*>(p.value);
  const int64_t width = min(kCausalChannels, round_up(p.channels, kLanes));
  const int64_t groups = ceil_div(p.channels, width), columns = p.batch * groups;
  const int64_t wanted = columns >= parallel.threads ? 1 : ceil_div(parallel.threads, columns);
  const int64_t most = wanted == 1 ? p.tokens : kCausalChunk;
  const int64_t chunk = max(256, min(most, round_up(ceil_div(p.tokens, wanted), kSumBlock)));
  const int64_t chunks = ceil_div(p.tokens, chunk);
  Scratch partials(columns * chunks * 3 * width);
  const auto sums_of = [&](int64_t column, int64_t i) {
    return RunningSums(partials.data() + (column * chunks + i) * 3 * width, width);
  };

  // sums_of(column, i) becomes the sums of all tokens before chunk i.
  parallel_for(parallel, columns * chunks, [&](int64_t task) {
    const int64_t column = task / chunks, i = task % chunks;
    const int64_t b = column / groups, c = column % groups * width;
    RunningSums sums = sums_of(column, i);
    sums.clear();
    const int64_t first = (b * p.tokens + (i - 1) * chunk) * p.channels + c;
    if (i > 0)
      sums.add(key + first, value + first, min(chunk, length_of(p, b) - (i - 1) * chunk), p.channels,
               min(width, p.channels - c));
  });
  for (int64_t column = 0; column < columns; ++column)
    for (int64_t i = 1; i < chunks; ++i) sums_of(column, i).merge(sums_of(column, i - 1));

  const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
  const float log_eps = std::log(p.eps);
  parallel_for(parallel, columns * chunks, [&](int64_t task) {
    const int64_t column = task / chunks, begin = task % chunks * chunk;
    const int64_t b = column / groups, first_channel = column % groups * width;
    const int64_t end = min(begin + chunk, p.tokens), counted = min(end, length_of(p, b));
    const int64_t channels = min(width, p.channels - first_channel);
    const int64_t first = b * p.tokens * p.channels + first_channel;
    RunningSums sums = sums_of(column, task % chunks);
    float* compensation = task_memory(2 * width);
    zero(compensation, 2 * width);
    for (int64_t t = begin; t < counted; t += kSumBlock)
      for (int64_t c = 0; c < channels; c += kLanes)
        causal_block<T, gate>(query, key, value, output, first + t * p.channels + c, min(kSumBlock, counted - t),
                              p.channels, channels - c, log_eps, sums, compensation, c);
    for (int64_t t = max(begin, counted); t < end; ++t)
      for (int64_t c = 0; c < channels; c += kLanes) output.write(first + t * p.channels + c, Vec{}, channels - c);
    output.fence();
  });
}

// One key channel for each head of the value.

// logits[t, h] = key[t, h], and 0 past the last head.
template <class T>
void read_logits(const PoolShape& shape, const T* key, int64_t tokens, float* logits) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < shape.padded_heads; h += kLanes)
      store(logits + t * shape.padded_heads + h, load(key + t * shape.heads + h, max(0, shape.heads - h)));
}

// Adds the tokens of document b in [begin, end) that lie below its length.
template <class T>
void pool_keys(const AftSimple& p, const PoolShape& shape, int64_t b, int64_t begin, int64_t end, PoolSums& sums) {
  const T *key = static_cast<const T*>(p.key), *value = static_cast<const T*>(p.value);
  const int64_t counted = min(end, length_of(p, b));
  float* logits = task_memory((kPoolTokens + 1) * shape.padded_heads);
  float* raised = logits + kPoolTokens * shape.padded_heads;
  for (int64_t t = begin; t < counted; t += kPoolTokens) {
    const int64_t tokens = min(kPoolTokens, counted - t), row = b * p.tokens + t;
    read_logits(shape, key + row * shape.heads, tokens, logits);
    sums.add(value + row * p.channels, p.channels, tokens, logits, raised);
  }
}

template <class T, Gate gate>
void whole_by_head(const AftSimple& p, const Parallel& parallel) {
  const PoolShape shape(p.channels, p.key_channels);
  const int64_t chunk = chunk_tokens(p.tokens), chunks = ceil_div(p.tokens, chunk), floats = shape.sums_floats();
  Scratch partials(p.batch * chunks * floats);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    PoolSums sums(shape, partials.data() + task * floats);
    sums.clear();
    const int64_t begin = task % chunks * chunk;
    pool_keys<T>(p, shape, task / chunks, begin, begin + chunk, sums);
  });
  const float log_eps = std::log(p.eps);
  for (int64_t b = 0; b < p.batch; ++b) {
    PoolSums total(shape, partials.data() + b * chunks * floats);
    for (int64_t i = 1; i < chunks; ++i) total.merge(PoolSums(shape, partials.data() + (b * chunks + i) * floats));
    if (p.eps > 0.0f) total.add_eps(log_eps);
    total.divide();
  }
  const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk;
    gate_rows<T, gate>(p, output, partials.data() + b * chunks * floats, b, begin, min(begin + chunk, p.tokens));
    output.fence();
  });
}

constexpr int64_t kPoolChunk = 128;

template <class T, Gate gate>
void causal_by_head(const AftSimple& p, const Parallel& parallel) {
  const PoolShape shape(p.channels, p.key_channels);
  const int64_t chunks = ceil_div(p.tokens, kPoolChunk), floats = shape.sums_floats(), row = shape.padded_heads;
  Scratch partials(p.batch * chunks * floats);
  const auto sums_of = [&](int64_t b, int64_t i) {
    return PoolSums(shape, partials.data() + (b * chunks + i) * floats);
  };
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {  // the sums of the chunk before
    const int64_t b = task / chunks, end = task % chunks * kPoolChunk;
    PoolSums sums = sums_of(b, task % chunks);
    sums.clear();
    if (end > 0) pool_keys<T>(p, shape, b, end - kPoolChunk, end, sums);
  });
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 1; i < chunks; ++i) sums_of(b, i).merge(sums_of(b, i - 1));

  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
  const float log_eps = std::log(p.eps);
  const auto invert = [&](Vec sum, Vec maximum) AFT_LAMBDA_INLINE {
    const Vec total = sum + eps_beside(log_eps, maximum), inverse = 1.0f / total;
    return total == 0.0f ? Vec{} : inverse;
  };
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * kPoolChunk, end = min(begin + kPoolChunk, p.tokens);
    const int64_t counted = min(end, length_of(p, b));
    PoolSums running = sums_of(b, task % chunks);
    float *logits = task_memory((2 * kPoolTokens + 2) * row), *memory = logits + kPoolTokens * row;
    for (int64_t t = begin; t < counted; t += kPoolTokens) {
      const int64_t tokens = min(kPoolTokens, counted - t), at = (b * p.tokens + t) * p.channels;
      read_logits(shape, key + (b * p.tokens + t) * shape.heads, tokens, logits);
      const auto write = [&](int64_t i, int64_t c, Vec mean) {
        const int64_t to = at + i * p.channels + c, count = p.channels - c;
        prefetch(query + to + kPrefetchRows * p.channels);
        output.write(to, gated_ratio<gate>(load(query + to, count), mean, splat(1.0f)), count);
      };
      running.advance(value + at, p.channels, tokens, logits, memory, write, invert);
    }
    for (int64_t t = max(begin, counted); t < end; ++t)
      for (int64_t c = 0; c < p.channels; c += kLanes)
        output.write((b * p.tokens + t) * p.channels + c, Vec{}, p.channels - c);
    output.fence();
  });
}

}  // namespace

void aft_simple(const AftSimple& p, const Parallel& parallel) {
  with_element(p.element, [&](auto element) {
    with_gate(p.gate, [&](auto gate) {
      using T = decltype(element);
      const bool by_head = p.key_channels && p.key_channels < p.channels;
      if (p.causal)
        by_head ? causal_by_head<T, gate.value>(p, parallel) : causal<T, gate.value>(p, parallel);
      else
        by_head ? whole_by_head<T, gate.value>(p, parallel) : whole<T, gate.value>(p, parallel);
    });
  });
}

}  // namespace aft::AFT_ISA
