// Softmax-weighted sums over tokens, per channel, that can be built piece by piece.
//
// Computes: (sum exp(K - m) V, sum exp(K - m), m = max K)
// Method:   merging two such triples is associative, so the tokens may be cut anywhere.
#pragma once

#include "simd/load_store.h"
#include "simd/math.h"

namespace aft::AFT_ISA {

// Stands for "no key yet": lower than every finite key, but differences with it are not NaN.
constexpr float kNoKey = -3.402823466e38f;

// Tokens summed before they join the running sums. Short blocks keep both the rounding error (it grows
// with the longest chain of additions) and the number of rescalings low; their keys fit in registers.
constexpr int64_t kSumBlock = 8;

// Keys may exceed the maximum that the sums are relative to by this much. The exponential of this number, times any
// realistic value and number of tokens, stays in the range of float32.
constexpr float kSafeSpread = 40.0f;

// Tokens per task where the tokens are cut: a multiple of kSumBlock that depends only on the shape, so
// that results do not depend on the number of threads.
inline int64_t chunk_tokens(int64_t tokens) { return max(256, round_up(ceil_div(tokens, 64), kSumBlock)); }

struct RunningSums {
  float *numerator, *denominator, *maximum;  // [width] each
  int64_t width;

  // Over 3 * width floats; width is a multiple of kLanes.
  RunningSums(float* memory, int64_t width)
      : numerator(memory), denominator(memory + width), maximum(memory + 2 * width), width(width) {}

  void clear() {
    for (int64_t c = 0; c < width; c += kLanes) {
      store(numerator + c, Vec{});
      store(denominator + c, Vec{});
      store(maximum + c, splat(kNoKey));
    }
  }

  // Adds `tokens` (none if negative) rows of `channels` keys and values that lie `stride` apart.
  template <class T>
  void add(const T* key, const T* value, int64_t tokens, int64_t stride, int64_t channels) {
    for (int64_t t = 0; t < tokens; t += kSumBlock, key += kSumBlock * stride, value += kSumBlock * stride)
      for (int64_t c = 0; c < channels; c += kLanes) {
        const int64_t rows = min(kSumBlock, tokens - t), count = channels - c;
        if (rows < kSumBlock || count < kLanes)
          add_block<false, false>(key + c, value + c, rows, stride, count, c);
        else if (stride == channels)
          add_block<true, true>(key + c, value + c, kSumBlock, stride, kLanes, c);
        else
          add_block<true, false>(key + c, value + c, kSumBlock, stride, kLanes, c);
      }
  }

  void merge(const RunningSums& other) {
    for (int64_t c = 0; c < width; c += kLanes) {
      const Vec m1 = load(maximum + c), m2 = load(other.maximum + c), m = raised_by(m1, m2);
      const Vec scale1 = exp(m1 - m), scale2 = exp(m2 - m);
      store(numerator + c, load(numerator + c) * scale1 + load(other.numerator + c) * scale2);
      store(denominator + c, load(denominator + c) * scale1 + load(other.denominator + c) * scale2);
      store(maximum + c, m);
    }
  }

  // Adds a number, given by its logarithm, to the sums of exp(K).
  void add_eps(float log_eps) {
    for (int64_t c = 0; c < width; c += kLanes)
      store(denominator + c, load(denominator + c) + eps_beside(log_eps, load(maximum + c)));
  }

  // Divides the numerator, which becomes the weighted mean; it is 0 where no key was counted.
  void divide() {
    for (int64_t c = 0; c < width; c += kLanes) {
      const Vec d = load(denominator + c), mean = load(numerator + c) / d;
      store(numerator + c, d == 0.0f ? Vec{} : mean);
    }
  }

 private:
  // Where rows are packed, a later block is fetched in the order of memory and each of its lines once, which takes a
  // tenth off a kernel's time; else the same channels of later rows.
  template <bool kWhole, bool kPacked, class T>
  AFT_INLINE void add_block(const T* key, const T* value, int64_t rows, int64_t stride, int64_t count, int64_t c) {
    Vec keys[kSumBlock];
    const Vec before = load(maximum + c);
    Vec m = before;
#pragma GCC unroll 8
    for (int64_t t = 0; t < (kWhole ? kSumBlock : rows); ++t) {
      const int64_t ahead = kPrefetchRows * stride + (kPacked ? c * (kSumBlock - 1) + t * kLanes : t * stride);
      if (!kPacked || t % kLineVecs<T> == 0) {
        prefetch(key + ahead);
        prefetch(value + ahead);
      }
      const Vec k = load(key + t * stride, count);
      if (kWhole) keys[t] = k;
      m = raised_by(m, k);
    }
    Vec n{}, d{};
#pragma GCC unroll 8
    for (int64_t t = 0; t < (kWhole ? kSumBlock : rows); ++t) {
      const Vec weight = exp((kWhole ? keys[t] : load(key + t * stride, count)) - m);
      n += weight * load(value + t * stride, count);
      d += weight;
    }
    const Vec rescale = exp(before - m);
    store(numerator + c, load(numerator + c) * rescale + n);
    store(denominator + c, load(denominator + c) * rescale + d);
    store(maximum + c, m);
  }
};

}  // namespace aft::AFT_ISA
