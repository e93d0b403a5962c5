// AFT-simple (Zhai et al., arXiv 2105.14103, equation 5).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c]) V[u,c] / sum_u exp(K[u,c])        causal: u <= t
// Cost:     bound by memory: every element of q, k, v is read once and of y written once, 16 bytes per token and
//           channel in float32, for two exponentials and about ten other operations.
// Method:   (numerator, denominator, maximum) is an associative triple per channel. Not causal: tasks reduce chunks of
//           tokens to triples, the chunks are merged, and a second sweep applies the gate. Causal: the channels are cut
//           into tasks, and each runs down the tokens. Only where that gives fewer tasks than threads are the tokens
//           cut as well; then k and v are read twice.
// Numerics: sums are relative to the largest key. Long sums are compensated in causal form.
// See:      shared/running_softmax.h, simd/compensated_sum.h

#include "mechanisms/shared/running_softmax.h"
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
  constexpr int kVecs = 2;  // at a time: a gate is a long chain of instructions
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
  for (int64_t b = 0; b < p.batch; ++b) {
    RunningSums total(partials.data() + b * chunks * 3 * width, width);
    for (int64_t i = 1; i < chunks; ++i)
      total.merge(RunningSums(partials.data() + (b * chunks + i) * 3 * width, width));
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
                             int64_t tokens, int64_t stride, int64_t count, RunningSums& sums, float* compensation,
                             int64_t lane) {
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
    Vec n{}, d{};
    for (int64_t i = 0; i < rows; ++i, at += stride) {
      const int64_t ahead = at + kPrefetchRows * stride;
      prefetch(query + ahead);
      prefetch(key + ahead);
      prefetch(value + ahead);
      const Vec weight = exp(load(key + at, count) - reference);
      n += weight * load(value + at, count);
      d += weight;
      output.write(at, gated_ratio<gate>(load(query + at, count), numerator + n, denominator + d), count);
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
  parallel_for(parallel, columns * chunks, [&](int64_t task) {
    const int64_t column = task / chunks, begin = task % chunks * chunk;
    const int64_t b = column / groups, first_channel = column % groups * width;
    const int64_t end = min(begin + chunk, p.tokens), counted = min(end, length_of(p, b));
    const int64_t channels = min(width, p.channels - first_channel);
    const int64_t first = b * p.tokens * p.channels + first_channel;
    RunningSums sums = sums_of(column, task % chunks);
    float* compensation = task_memory(2 * width);
    __builtin_memset(compensation, 0, 2 * width * sizeof(float));
    for (int64_t t = begin; t < counted; t += kSumBlock)
      for (int64_t c = 0; c < channels; c += kLanes)
        causal_block<T, gate>(query, key, value, output, first + t * p.channels + c, min(kSumBlock, counted - t),
                              p.channels, channels - c, sums, compensation, c);
    for (int64_t t = max(begin, counted); t < end; ++t)
      for (int64_t c = 0; c < channels; c += kLanes) output.write(first + t * p.channels + c, Vec{}, channels - c);
    output.fence();
  });
}

}  // namespace

void aft_simple(const AftSimple& p, const Parallel& parallel) {
  with_element(p.element, [&](auto element) {
    with_gate(p.gate, [&](auto gate) {
      using T = decltype(element);
      if (p.causal)
        causal<T, gate.value>(p, parallel);
      else
        whole<T, gate.value>(p, parallel);
    });
  });
}

}  // namespace aft::AFT_ISA
