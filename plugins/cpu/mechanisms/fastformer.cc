// Fastformer's additive attention (Wu et al., arXiv 2108.09084, equations 3 to 8), heads of width d.
//
// Computes: alpha = softmax_t(Q A / sqrt(d)),  g_q = sum_t alpha_t Q_t,  P_t = g_q * K_t
//           beta  = softmax_t(P B / sqrt(d)),  g_k = sum_t beta_t P_t,   Y_t = g_k * V_t     causal: sums up to t
// Cost:     bound by memory: 16 bytes per token and channel in float32 against 4 h + 4 FLOPs for h heads.
// Method:   not causal: P need not be formed, since P B = K (diag(g_q) B) and g_k = g_q * sum_t beta_t K_t: two pooling
//           sweeps over chunks of tokens (Q, then K) and one product (V). Causal: g_q changes with every token, so beta
//           depends on the scan of alpha and Y on the scan of beta. The tokens go through in stretches whose P stays in
//           the cache. In each stretch tasks sum chunks, the sums are scanned, and the next sweep starts from them.
// Numerics: weights are relative to the largest logit of their head. Merges of sums are compensated.
// See:      sums/head_softmax_pool.h

#include "sums/head_softmax_pool.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

// A [channels, heads] weight as rows per head, times 1 / sqrt(d).
template <class T>
void transpose_weight(const PoolShape& shape, const void* weight, float* rows) {
  const T* from = static_cast<const T*>(weight);
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape.width));
  zero(rows, shape.padded_heads * shape.padded_channels);
  for (int64_t c = 0; c < shape.channels; ++c)
    for (int64_t h = 0; h < shape.heads; ++h)
      rows[h * shape.padded_channels + c] = to_float(from[c * shape.heads + h]) * scale;
}

// Pools x[b] over chunks of tokens into sums[b, chunk] with the weights prepare(b, memory) returns, then
// merges a document's chunks into its first.
template <class T, class Prepare>
void pool(const Fastformer& p, const PoolShape& shape, const Parallel& parallel, const T* x, int64_t chunk, float* sums,
          const Prepare& prepare) {
  const int64_t chunks = ceil_div(p.tokens, chunk);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, length_of(p, b));
    float* raised = task_memory((1 + kPoolTokens) * shape.padded_heads + shape.padded_heads * shape.padded_channels);
    float *logits = raised + shape.padded_heads, *memory = logits + kPoolTokens * shape.padded_heads;
    const float* weights = prepare(b, memory);
    PoolSums partial(shape, sums + task * shape.sums_floats());
    partial.clear();
    for (int64_t t = begin; t < end; t += kPoolTokens) {
      const T* rows = x + (b * p.tokens + t) * p.channels;
      const int64_t tokens = min(kPoolTokens, end - t);
      head_logits(shape, rows, p.channels, tokens, weights, logits);
      partial.add(rows, p.channels, tokens, logits, raised);
    }
  });
  for (int64_t b = 0; b < p.batch; ++b) {
    PoolSums total(shape, sums + b * chunks * shape.sums_floats());
    for (int64_t i = 1; i < chunks; ++i) total.merge(PoolSums(shape, sums + (b * chunks + i) * shape.sums_floats()));
    total.divide();
  }
}

template <class T>
void whole(const Fastformer& p, const Parallel& parallel) {
  const PoolShape shape(p.channels, p.heads);
  const int64_t chunk = chunk_tokens(p.tokens), chunks = ceil_div(p.tokens, chunk);
  const int64_t weight_floats = shape.padded_heads * shape.padded_channels;
  const int64_t sums_floats = p.batch * chunks * shape.sums_floats();
  Scratch scratch(2 * weight_floats + 2 * sums_floats);
  float *alpha = scratch.data(), *beta = alpha + weight_floats;
  float *query_sums = beta + weight_floats, *key_sums = query_sums + sums_floats;
  transpose_weight<T>(shape, p.alpha_weight, alpha);
  transpose_weight<T>(shape, p.beta_weight, beta);

  pool(p, shape, parallel, static_cast<const T*>(p.query), chunk, query_sums, [&](int64_t, float*) { return alpha; });
  const auto global_query = [&](int64_t b) { return query_sums + b * chunks * shape.sums_floats(); };
  pool(p, shape, parallel, static_cast<const T*>(p.key), chunk, key_sums, [&](int64_t b, float* folded) {
    for (int64_t h = 0; h < shape.padded_heads; ++h)
      for (int64_t c = 0; c < shape.padded_channels; c += kLanes) {
        const int64_t at = h * shape.padded_channels + c;
        store(folded + at, load(beta + at) * load(global_query(b) + c));
      }
    return folded;
  });

  const T* value = static_cast<const T*>(p.value);
  const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
  parallel_for(parallel, p.batch * chunks, [&](int64_t task) {
    const int64_t b = task / chunks, begin = task % chunks * chunk, end = min(begin + chunk, p.tokens);
    const float *g_q = global_query(b), *pooled = key_sums + b * chunks * shape.sums_floats();
    constexpr int kVecs = kLineVecs<float>;  // whole lines at a time
    constexpr int64_t kStep = kVecs * kLanes;
    float* g_k = task_memory(round_up(shape.padded_channels, kStep));
    for (int64_t c = 0; c < shape.padded_channels; c += kLanes) store(g_k + c, load(g_q + c) * load(pooled + c));
    for (int64_t t = begin; t < end; ++t)
      for (int64_t c = 0; c < p.channels; c += kStep) {
        const int64_t at = (b * p.tokens + t) * p.channels + c, count = p.channels - c;
        prefetch(value + at + kPrefetchRows * p.channels);
        Vec scaled[kVecs];
        for (int v = 0; v < kVecs; ++v)
          scaled[v] = load(g_k + c + v * kLanes) * load(value + at + v * kLanes, count - v * kLanes);
        output.write(at, scaled, count);
      }
    output.fence();
  });
}

constexpr int64_t kCausalChunk = 128;

template <class T>
void causal(const Fastformer& p, const Parallel& parallel) {
  const PoolShape shape(p.channels, p.heads);
  const int64_t row = shape.padded_heads, sums_floats = shape.sums_floats();
  const int64_t weight_floats = row * shape.padded_channels;
  // A stretch is `documents` times `chunks` chunks, with at most 2 MiB of P or one chunk per document.
  const int64_t budget = max(1, (int64_t{1} << 19) / (shape.padded_channels * kCausalChunk));
  const int64_t chunks = min(budget, ceil_div(p.tokens, kCausalChunk));
  const int64_t documents = max(1, min(p.batch, budget / chunks));
  const int64_t pieces = documents * chunks, tokens_in_stretch = chunks * kCausalChunk;
  // Per piece the sums before it of alpha and beta, one slot more per document for the sums at the end of the stretch.
  const int64_t slots = documents * (chunks + 1);
  Scratch scratch(2 * weight_floats + 2 * slots * sums_floats + pieces * kCausalChunk * (row + shape.padded_channels));
  float *alpha = scratch.data(), *beta = alpha + weight_floats;
  float *alpha_sums = beta + weight_floats, *beta_sums = alpha_sums + slots * sums_floats;
  float *all_logits = beta_sums + slots * sums_floats, *products = all_logits + pieces * kCausalChunk * row;
  transpose_weight<T>(shape, p.alpha_weight, alpha);
  transpose_weight<T>(shape, p.beta_weight, beta);
  const T *query = static_cast<const T*>(p.query), *key = static_cast<const T*>(p.key),
          *value = static_cast<const T*>(p.value);
  const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);

  for (int64_t first_document = 0; first_document < p.batch; first_document += documents)
    for (int64_t stretch = 0; stretch < p.tokens; stretch += tokens_in_stretch) {
      // Runs body(piece, slot, row of its first token, tokens that count, tokens) for every chunk.
      const auto sweep = [&](const auto& body) {
        parallel_for(parallel, pieces, [&](int64_t piece) {
          const int64_t b = first_document + piece / chunks, begin = stretch + piece % chunks * kCausalChunk;
          if (b >= p.batch || begin >= p.tokens) return;
          const int64_t end = min(begin + kCausalChunk, p.tokens);
          body(piece, piece / chunks * (chunks + 1) + piece % chunks, b * p.tokens + begin,
               max(0, min(end, length_of(p, b)) - begin), end - begin);
        });
      };
      const auto sums_at = [&](float* sums, int64_t slot) { return PoolSums(shape, sums + slot * sums_floats); };
      const auto start = [&](float* sums) {  // slot 0: the sums at the end of the stretch before, the others: nothing
        for (int64_t d = 0; d < documents; ++d)
          for (int64_t i = 0; i <= chunks; ++i) {
            PoolSums slot = sums_at(sums, d * (chunks + 1) + i);
            const float* last = sums_at(sums, d * (chunks + 1) + chunks).numerator;
            if (i == 0 && stretch > 0)
              __builtin_memcpy(slot.numerator, last, sums_floats * sizeof(float));
            else
              slot.clear();
          }
      };
      const auto scan = [&](float* sums) {
        for (int64_t d = 0; d < documents; ++d)
          for (int64_t i = 1; i <= chunks; ++i)
            sums_at(sums, d * (chunks + 1) + i).merge(sums_at(sums, d * (chunks + 1) + i - 1));
      };
      const auto memory_of_task = [&] { return task_memory((kPoolTokens + 2) * row); };

      start(alpha_sums);
      sweep([&](int64_t piece, int64_t slot, int64_t first, int64_t counted, int64_t) {
        float *raised = memory_of_task(), *weights = raised + 2 * row;
        PoolSums sums = sums_at(alpha_sums, slot + 1);
        for (int64_t t = 0; t < counted; t += kPoolTokens) {
          const int64_t tokens = min(kPoolTokens, counted - t);
          float* logits = all_logits + (piece * kCausalChunk + t) * row;
          const T* rows = query + (first + t) * p.channels;
          head_logits(shape, rows, p.channels, tokens, alpha, logits);
          __builtin_memcpy(weights, logits, tokens * row * sizeof(float));
          sums.add(rows, p.channels, tokens, weights, raised);
        }
      });
      scan(alpha_sums);

      start(beta_sums);
      sweep([&](int64_t piece, int64_t slot, int64_t first, int64_t counted, int64_t) {
        float *memory = memory_of_task(), *weights = memory + 2 * row;
        PoolSums running = sums_at(alpha_sums, slot), sums = sums_at(beta_sums, slot + 1);
        for (int64_t t = 0; t < counted; t += kPoolTokens) {
          const int64_t tokens = min(kPoolTokens, counted - t), at = (first + t) * p.channels;
          float* logits = all_logits + (piece * kCausalChunk + t) * row;
          float* product = products + (piece * kCausalChunk + t) * shape.padded_channels;
          running.advance(query + at, p.channels, tokens, logits, memory, [&](int64_t i, int64_t c, Vec mean) {
            prefetch(key + at + (i + kPrefetchRows) * p.channels + c);
            store(product + i * shape.padded_channels + c, mean * load(key + at + i * p.channels + c, p.channels - c));
          });
          head_logits(shape, product, shape.padded_channels, tokens, beta, logits);
          __builtin_memcpy(weights, logits, tokens * row * sizeof(float));
          sums.add(product, shape.padded_channels, tokens, weights, memory);
        }
      });
      scan(beta_sums);

      sweep([&](int64_t piece, int64_t slot, int64_t first, int64_t counted, int64_t all) {
        PoolSums running = sums_at(beta_sums, slot);
        for (int64_t t = 0; t < counted; t += kPoolTokens) {
          const int64_t tokens = min(kPoolTokens, counted - t), at = (first + t) * p.channels;
          running.advance(products + (piece * kCausalChunk + t) * shape.padded_channels, shape.padded_channels, tokens,
                          all_logits + (piece * kCausalChunk + t) * row, memory_of_task(),
                          [&](int64_t i, int64_t c, Vec mean) {
                            const int64_t to = at + i * p.channels + c, count = p.channels - c;
                            prefetch(value + to + kPrefetchRows * p.channels);
                            output.write(to, mean * load(value + to, count), count);
                          });
        }
        for (int64_t t = counted; t < all; ++t)
          for (int64_t c = 0; c < p.channels; c += kLanes)
            output.write((first + t) * p.channels + c, Vec{}, p.channels - c);
        output.fence();
      });
    }
}

}  // namespace

void fastformer(const Fastformer& p, const Parallel& parallel) {
  with_element_and_causality(
      p, [&](auto element) { causal<decltype(element)>(p, parallel); },
      [&](auto element) { whole<decltype(element)>(p, parallel); });
}

}  // namespace aft::AFT_ISA
