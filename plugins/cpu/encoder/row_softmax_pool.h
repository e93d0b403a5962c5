// Softmax-weighted means of whole token rows, one mean per head.
//
// Computes: (sum exp(l - m) x, sum exp(l - m), m = max l), with one row of sums per head, whereas head_softmax_pool.h
//           pools only the head's own channels.
// Method:   sums can be built piece by piece.
#pragma once

#include "sums/head_softmax_pool.h"

namespace aft::AFT_ISA {

class RowPool {
 public:
  static int64_t floats(const PoolShape& shape) { return shape.heads * shape.padded_channels + 2 * shape.padded_heads; }

  RowPool(const PoolShape& shape, float* memory)
      : shape_(shape),
        sums_(memory),
        denominator_(memory + shape.heads * shape.padded_channels),
        maximum_(denominator_ + shape.padded_heads) {}

  // Returns the row of a head: its sum, and after divide() its mean.
  float* row(int64_t head) const { return sums_ + head * shape_.padded_channels; }

  void clear() const {
    zero(sums_, floats(shape_));
    for (int64_t h = 0; h < shape_.padded_heads; ++h) maximum_[h] = kNoKey;
  }

  // Adds rows of padded_channels. logits, [tokens, padded_heads], become the weights.
  void add(const float* x, int64_t tokens, float* logits) const {
    const int64_t row = shape_.padded_heads;
    for (int64_t h = 0; h < row; h += kLanes) {
      const Vec before = load(maximum_ + h);
      Vec m = before, sum{};
      for (int64_t t = 0; t < tokens; ++t) m = raised_by(m, load(logits + t * row + h));
      for (int64_t t = 0; t < tokens; ++t) {
        const Vec weight = exp(load(logits + t * row + h) - m);
        store(logits + t * row + h, weight);
        sum += weight;
      }
      float factor[kLanes];
      store(factor, exp(before - m));
      scale(h, factor, any((IntVec)(m != before)));
      store(denominator_ + h, load(denominator_ + h) * load(factor) + sum);
      store(maximum_ + h, m);
    }
    int64_t h = 0;
    for (; h + kHeads <= shape_.heads; h += kHeads) add_heads<kHeads>(x, tokens, logits, h);
    for (; h < shape_.heads; ++h) add_heads<1>(x, tokens, logits, h);
  }

  void merge(const RowPool& other) const {
    for (int64_t h = 0; h < shape_.heads; ++h) {
      const float m1 = maximum_[h], m2 = other.maximum_[h], m = m1 > m2 ? m1 : m2;
      const Vec scale1 = exp(splat(m1 - m)), scale2 = exp(splat(m2 - m));
      maximum_[h] = m;
      denominator_[h] = denominator_[h] * scale1[0] + other.denominator_[h] * scale2[0];
      for (int64_t c = 0; c < shape_.padded_channels; c += kLanes)
        store(row(h) + c, load(row(h) + c) * scale1 + load(other.row(h) + c) * scale2);
    }
  }

  // Divides the sums, which become means; they are 0 where nothing was added.
  void divide() const {
    for (int64_t h = 0; h < shape_.heads; ++h) {
      const Vec inverse = splat(denominator_[h] == 0.0f ? 0.0f : 1.0f / denominator_[h]);
      for (int64_t c = 0; c < shape_.padded_channels; c += kLanes) store(row(h) + c, load(row(h) + c) * inverse);
    }
  }

 private:
  static constexpr int kHeads = 8;  // whose sums stay in registers, so that a vector loaded is used for each

  void scale(int64_t first, const float* factor, bool needed) const {
    for (int64_t h = first; needed && h < min(first + kLanes, shape_.heads); ++h)
      for (int64_t c = 0; c < shape_.padded_channels; c += kLanes)
        store(row(h) + c, load(row(h) + c) * factor[h - first]);
  }

  template <int kCount>
  void add_heads(const float* x, int64_t tokens, const float* weights, int64_t h) const {
    for (int64_t c = 0; c < shape_.padded_channels; c += kLanes) {
      Vec sum[kCount] = {};
      for (int64_t t = 0; t < tokens; ++t) {
        const Vec values = load(x + t * shape_.padded_channels + c);
#pragma GCC unroll 8
        for (int i = 0; i < kCount; ++i) sum[i] += splat(weights[t * shape_.padded_heads + h + i]) * values;
      }
#pragma GCC unroll 8
      for (int i = 0; i < kCount; ++i) store(row(h + i) + c, load(row(h + i) + c) + sum[i]);
    }
  }

  const PoolShape& shape_;
  float *sums_, *denominator_, *maximum_;
};

}  // namespace aft::AFT_ISA
