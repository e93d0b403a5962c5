// Products in 8-bit integers, for AVX512_VNNI: a word holds four values next to each other in k, and vpdpbusd
// adds all four of their products to a vector of int32 columns, four times the work of a float32 multiply-add.
//
// The instruction multiplies unsigned by signed. A stretch of a row becomes unsigned, x = low + step q with
// q in [0, 255] from its smallest and largest value; a column of weights becomes signed, w = scale p with p in
// [-127, 127]. Then sum_k x w = step scale (sum_k q p) + low (scale sum_k p), whose last factor is known
// beforehand: the column sum.
#pragma once

#include "method.h"
#include "matmul/product_scale.h"
#include "simd/load_store.h"

#if defined(__AVX512VNNI__)

namespace aft::AFT_ISA {

struct Int8Product {
  static constexpr Method kMethod = Method::kInt8;
  static constexpr int kPerWord = 4;
  static constexpr int64_t kChunkWords = 256;
  static constexpr bool kScaled = true;
  static constexpr bool kScaledRows = true;
  static constexpr float kLargestLeft = 255, kLargestWeight = 127;
  // The range of a row's position biases, if their exponentials are the left side. In a larger range, the rounding of
  // small keys with large weights would weigh as much as a large key with a small weight.
  static constexpr float kLargestRange = 1.0f;
  typedef IntVec Sum;

  AFT_INLINE static Sum multiply_add(Sum sum, const float* word, Vec weights) {
    int32_t values;
    __builtin_memcpy(&values, word, sizeof values);
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(values), (__m512i)weights);
  }

  static void encode(const float* values, int64_t count, float* words) {
    const RowScale scale = scale_of_row(values, count, kLargestLeft);
    const Vec inverse = splat(1.0f / scale.step), shift = splat(-scale.smallest);
    for (int64_t i = 0; i < count; i += kLanes) put((load(values + i, count - i) + shift) * inverse, i, words);
    words[kChunkWords] = scale.step;
    words[kChunkWords + 1] = scale.smallest;
  }

  // The values lie between 0 and kLargestLeft.
  AFT_INLINE static void put(Vec values, int64_t i, float* words) {
    const __m128i bytes =
        _mm512_cvtusepi32_epi8(_mm512_cvtps_epu32(_mm512_max_ps((__m512)values, _mm512_setzero_ps())));
    __builtin_memcpy((char*)words + i, &bytes, sizeof bytes);
  }

  AFT_INLINE static Vec pack_weights(const Vec (&rows)[kPerWord]) {
    IntVec words{};
    for (int i = 0; i < kPerWord; ++i) words |= (__builtin_convertvector(rows[i], IntVec) & 0xff) << (8 * i);
    return (Vec)words;
  }
};

}  // namespace aft::AFT_ISA

#endif
