// Pooling of token rows with one softmax per head.
//
// Computes: (sum exp(l - m) x, sum exp(l - m), m = max l): each head's logit l reads the whole row, its weight applies
//           to the head's own channels. There is one denominator and one maximum per head.
// Method:   sums can be built piece by piece like those of running_softmax.h.
// Numerics: merges are compensated: in causal form every piece joins those before it.
#pragma once

#include "sums/channel_to_head.h"
#include "sums/running_softmax.h"
#include "simd/compensated_sum.h"
#include "simd/load_store.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {

constexpr int64_t kPoolTokens = 32;

struct PoolShape {
  Heads channel_heads;
  int64_t channels, width, heads;  // width: channels per head
  int64_t padded_channels, padded_heads;

  PoolShape(int64_t channels, int64_t heads)
      : channel_heads(channels / heads),
        channels(channels),
        width(channels / heads),
        heads(heads),
        padded_channels(round_up(channels, kLanes)),
        padded_heads(round_up(heads, max(4, kLanes))) {}

  int64_t sums_floats() const { return 2 * padded_channels + 3 * padded_heads; }

  AFT_INLINE Vec spread(const float* values, int64_t c) const { return channel_heads.spread(values, c); }
};

struct PoolSums {
  const PoolShape& shape;
  float *numerator, *denominator, *maximum, *numerator_compensation, *denominator_compensation;

  PoolSums(const PoolShape& shape, float* memory)
      : shape(shape),
        numerator(memory),
        denominator(memory + shape.padded_channels),
        maximum(denominator + shape.padded_heads),
        numerator_compensation(maximum + shape.padded_heads),
        denominator_compensation(numerator_compensation + shape.padded_channels) {}

  void clear() {
    zero(numerator, shape.sums_floats());
    for (int64_t h = 0; h < shape.padded_heads; ++h) maximum[h] = kNoKey;
  }

  // Rescales all sums to the given maxima, none of which is below the present one.
  void move_maximum(const float* to) {
    float factor[kLanes];
    bool moved = false;
    for (int64_t h = 0; h < shape.padded_heads; ++h) moved |= to[h] != maximum[h];
    if (!moved) return;
    for (int64_t h = 0; h < shape.padded_heads; h += kLanes) {
      store(factor, exp(load(maximum + h) - load(to + h)));
      store(denominator + h, load(denominator + h) * load(factor));
      for_channels(h, [&](int64_t c, int64_t own)
                          AFT_LAMBDA_INLINE { store(numerator + c, load(numerator + c) * shape.spread(factor, own)); });
      store(maximum + h, load(to + h));
    }
  }

  // raised = the larger of this maximum and of the logits' from token `first` to `tokens`.
  void raise_maximum(const float* logits, int64_t first, int64_t tokens, float* raised) const {
    for (int64_t h = 0; h < shape.padded_heads; h += kLanes) {
      Vec m = load(maximum + h);
      for (int64_t t = first; t < tokens; ++t) m = raised_by(m, load(logits + t * shape.padded_heads + h));
      store(raised + h, m);
    }
  }

  // Adds rows of x, `stride` apart. logits become the weights.
  template <class T>
  void add(const T* x, int64_t stride, int64_t tokens, float* logits, float* raised) {
    raise_maximum(logits, 0, tokens, raised);
    move_maximum(raised);
    compute_weights(logits, tokens);
    for (int64_t h = 0; h < shape.padded_heads; h += kLanes) {
      Vec sum{};
      for (int64_t t = 0; t < tokens; ++t) sum += load(logits + t * shape.padded_heads + h);
      store(denominator + h, load(denominator + h) + sum);
    }
    int64_t c = 0;
    if (shape.width % (kPoolVecs * kLanes) == 0)
      for (; c < shape.channels; c += kPoolVecs * kLanes) add_weighted<true>(x, stride, tokens, logits, c);
    else if (shape.width % kLanes == 0)
      for (; c + kPoolVecs * kLanes <= shape.channels; c += kPoolVecs * kLanes)
        add_weighted<false>(x, stride, tokens, logits, c);
    for (; c < shape.channels; c += kLanes) {
      Vec sum{};
      for (int64_t t = 0; t < tokens; ++t)
        sum += shape.spread(logits + t * shape.padded_heads, c) * load(x + t * stride + c, shape.channels - c);
      store(numerator + c, load(numerator + c) + sum);
    }
  }

  // Adds rows of x one by one and calls use(token, channel, mean so far). Weights are relative to the largest
  // logit up to the first token; the block is cut before one that exceeds it by too much. `memory` holds
  // 2 + tokens rows of padded_heads. invert(sum of weights, maximum that they are relative to) gives the factor of the
  // mean.
  template <class T, class Use, class Invert>
  void advance(const T* x, int64_t stride, int64_t tokens, float* logits, float* memory, const Use& use,
               const Invert& invert) {
    const int64_t row = shape.padded_heads;
    float *raised = memory, *block_maximum = memory + row, *inverse = memory + 2 * row;
    for (int64_t begin = 0, count = 0; begin < tokens; begin += count) {
      float* block = logits + begin * row;
      count = tokens - begin;
      raise_maximum(block, 0, 1, raised);
      for (int64_t h = 0; h < row; h += kLanes)
        for (int64_t t = 1; t < count; ++t)
          if (any((IntVec)(load(block + t * row + h) - load(raised + h) > kSafeSpread))) count = t;
      raise_maximum(block, 0, count, block_maximum);
      move_maximum(raised);
      compute_weights(block, count);
      for (int64_t h = 0; h < row; h += kLanes) {
        const Vec base = load(denominator + h);
        Vec sum{};
        for (int64_t t = 0; t < count; ++t) {
          sum += load(block + t * row + h);
          store(inverse + t * row + h, invert(base + sum, load(maximum + h)));
        }
        store(denominator + h, base + sum);
      }
      for (int64_t c = 0; c < shape.channels; c += kLanes) {
        const Vec base = load(numerator + c);
        Vec sum{};
        for (int64_t t = 0; t < count; ++t) {
          sum += shape.spread(block + t * row, c) * load(x + (begin + t) * stride + c, shape.channels - c);
          use(begin + t, c, (base + sum) * shape.spread(inverse + t * row, c));
        }
        store(numerator + c, base + sum);
      }
      move_maximum(block_maximum);
    }
  }

  template <class T, class Use>
  void advance(const T* x, int64_t stride, int64_t tokens, float* logits, float* memory, const Use& use) {
    advance(x, stride, tokens, logits, memory, use, [](Vec sum, Vec) AFT_LAMBDA_INLINE { return 1.0f / sum; });
  }

  void merge(const PoolSums& other) {
    for (int64_t h = 0; h < shape.padded_heads; h += kLanes) {
      const Vec m1 = load(maximum + h), m2 = load(other.maximum + h), m = raised_by(m1, m2);
      float scale1[kLanes], scale2[kLanes];
      store(scale1, exp(m1 - m));
      store(scale2, exp(m2 - m));
      store(maximum + h, m);
      merge(denominator + h, denominator_compensation + h, load(scale1), other.denominator + h,
            other.denominator_compensation + h, load(scale2));
      for_channels(h, [&](int64_t c, int64_t own) AFT_LAMBDA_INLINE {
        merge(numerator + c, numerator_compensation + c, shape.spread(scale1, own), other.numerator + c,
              other.numerator_compensation + c, shape.spread(scale2, own));
      });
    }
  }

  // Adds a number, given by its logarithm, to the sums of exp(l).
  void add_eps(float log_eps) {
    for (int64_t h = 0; h < shape.padded_heads; h += kLanes)
      store(denominator + h, load(denominator + h) + eps_beside(log_eps, load(maximum + h)));
  }

  // Divides the numerator, which becomes the mean; it is 0 where nothing was added.
  void divide() {
    for (int64_t c = 0; c < shape.channels; ++c) {
      const float d = denominator[shape.channel_heads.of(c)];
      numerator[c] = d == 0.0f ? 0.0f : numerator[c] / d;
    }
  }

 private:
  static constexpr int kPoolVecs = 4;

  // Calls f(c, own) for every vector of channels of the heads [first, first + kLanes), c counted over all heads, own
  // over these.
  template <class F>
  AFT_INLINE void for_channels(int64_t first, const F& f) const {
    const int64_t begin = first * shape.width, end = min(begin + kLanes * shape.width, shape.channels);
    for (int64_t c = begin; c < end; c += kLanes) f(c, c - begin);
  }

  AFT_INLINE static void merge(float* sum, float* compensation, Vec scale, const float* other,
                               const float* other_compensation, Vec other_scale) {
    Vec total = load(sum) * scale, rest = load(compensation) * scale + load(other_compensation) * other_scale;
    add_compensated(total, rest, load(other) * other_scale);
    store(sum, total);
    store(compensation, rest);
  }

  // numerator += weights x for kPoolVecs vectors of channels, each of one head, or all of the same.
  template <bool kOneHead, class T>
  AFT_INLINE void add_weighted(const T* x, int64_t stride, int64_t tokens, const float* weights, int64_t c) {
    Vec sum[kPoolVecs] = {};
    int64_t head[kPoolVecs];
    for (int v = 0; v < kPoolVecs; ++v) head[v] = shape.channel_heads.of(c + v * kLanes);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* weight = weights + t * shape.padded_heads;
      const Vec first = splat(weight[head[0]]);
      for (int v = 0; v < kPoolVecs; ++v)
        sum[v] += (kOneHead ? first : splat(weight[head[v]])) * load(x + t * stride + c + v * kLanes);
    }
    for (int v = 0; v < kPoolVecs; ++v) {
      float* to = numerator + c + v * kLanes;
      store(to, load(to) + sum[v]);
    }
  }

  // logits become exp(logits - maximum).
  void compute_weights(float* logits, int64_t tokens) const {
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < shape.padded_heads; h += kLanes) {
        float* at = logits + t * shape.padded_heads + h;
        store(at, exp(load(at) - load(maximum + h)));
      }
  }
};

// logits[t, h] = x[t] . weights[h] for tokens rows of x; rows of weights are padded_channels floats with zeros
// past the last channel. A tile of tokens and heads at a time: every vector loaded is used several times, and
// the tile's sums are taken together.
template <class T>
void head_logits(const PoolShape& shape, const T* x, int64_t stride, int64_t tokens, const float* weights,
                 float* logits) {
  constexpr int kTileTokens = kRegisters == 32 ? 4 : 3, kTileHeads = 4;
  constexpr int kSums = round_up(kTileTokens * kTileHeads, kLanes);
  constexpr int64_t kLine = kLineElements<T>;
  for (int64_t t = 0; t < tokens; t += kTileTokens) {
    const T* rows[kTileTokens];
    for (int i = 0; i < kTileTokens; ++i) rows[i] = x + min(t + i, tokens - 1) * stride;
    const int64_t count = min(kTileTokens, tokens - t);
    float* tile = logits + t * shape.padded_heads;
    for (int i = 0; i < count; ++i) store(tile + (i + 1) * shape.padded_heads - kLanes, Vec{});
    for (int64_t h = 0; h < shape.heads; h += kTileHeads) {
      const float* head[kTileHeads];
      for (int j = 0; j < kTileHeads; ++j) head[j] = weights + (h + j) * shape.padded_channels;
      Vec sum[kSums] = {};
      const auto add = [&](int64_t c, int64_t lanes) AFT_LAMBDA_INLINE {
        Vec row[kTileTokens];
        for (int i = 0; i < kTileTokens; ++i) row[i] = load(rows[i] + c, lanes);
        for (int j = 0; j < kTileHeads; ++j) {
          const Vec weight = load(head[j] + c);
          for (int i = 0; i < kTileTokens; ++i) sum[i * kTileHeads + j] += row[i] * weight;
        }
      };
      int64_t c = 0;
      // Prefetches the next rows in the order of memory, each line once, which saves a quarter of the time with AVX2.
      if (h == 0) {
        const T* ahead = rows[0] + kPrefetchRows / 2 * stride;
        for (; c + kLine <= shape.channels; c += kLine, ahead += kTileTokens * kLine) {
          for (int i = 0; i < kTileTokens; ++i) prefetch(ahead + i * kLine);
          for (int64_t v = 0; v < kLine; v += kLanes) add(c + v, kLanes);
        }
      }
      for (; c + kLanes <= shape.channels; c += kLanes) add(c, kLanes);
      if (c < shape.channels) add(c, shape.channels - c);
      float sums[kSums];
      for (int i = 0; i < kSums; i += kLanes) store(sums + i, sum_each(*reinterpret_cast<Vec(*)[kLanes]>(sum + i)));
      for (int i = 0; i < count; ++i)
        __builtin_memcpy(tile + i * shape.padded_heads + h, sums + i * kTileHeads, kTileHeads * sizeof(float));
    }
  }
}

}  // namespace aft::AFT_ISA
