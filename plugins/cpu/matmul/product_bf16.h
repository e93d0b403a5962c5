// Products in bfloat16, for AVX512_BF16: a word holds two values next to each other in k, and vdpbf16ps adds
// both of their products to a vector of float32 columns, twice the work of a float32 multiply-add.
#pragma once

#include "method.h"
#include "simd/load_store.h"

#if defined(__AVX512BF16__)

namespace aft::AFT_ISA {

struct Bfloat16Product {
  static constexpr Method kMethod = Method::kBfloat16;
  static constexpr int kPerWord = 2;
  static constexpr int64_t kChunkWords = 128;
  static constexpr bool kScaled = false;
  typedef Vec Sum;

  AFT_INLINE static Sum multiply_add(Sum sum, const float* word, Vec weights) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(*word), (__m512bh)weights);
  }

  static void encode(const float* values, int64_t count, float* words) {
    for (int64_t i = 0; i < count; i += 2 * kLanes) {
      const Vec pair[2] = {load(values + i, count - i), load(values + i + kLanes, count - i - kLanes)};
      encode_panel(pair, i, words);
    }
  }
  AFT_INLINE static void encode_panel(const Vec (&values)[2], int64_t first, float* words) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]);
    __builtin_memcpy(words + first / 2, &rounded, sizeof rounded);
  }
  // Rounds the numbers to bfloat16.
  AFT_INLINE static Vec rounded(Vec values) {
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)values)), 16);
  }
  AFT_INLINE static Vec pack_weights(const Vec (&rows)[kPerWord]) {
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)rows[1], (__m512)rows[0]);
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(rounded, 1));
    return (Vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
};

}  // namespace aft::AFT_ISA

#endif
