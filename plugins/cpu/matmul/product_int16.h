// Products in 16-bit integers, which take the place of bfloat16 and of 8-bit integers where a processor has no
// instruction for them: a word holds two values next to each other in k, and pmaddwd, which every x86-64 has, sums both
// of their products in int32. Up to twice the work of a float32 multiply-add, at half of bfloat16's error. (Without
// AVX512_VNNI, 8-bit integers take three instructions and lose a bit of every weight: a tenth faster, 25 times the
// error.)
//
// A stretch of a row becomes x = middle + step q, a column of weights w = scale p, with q and p in [-2047, 2047]: of a
// chunk, 512 products, the sum stays below 2^31. It is taken apart as in product_int8.h.
#pragma once

#include "method.h"
#include "matmul/product_scale.h"
#include "simd/load_store.h"

#if defined(__SSE2__)

namespace aft::AFT_ISA {

struct Int16Product {
  static constexpr Method kMethod = Method::kInt16;
  static constexpr int kPerWord = 2;
  static constexpr int64_t kChunkWords = 256;
  static constexpr bool kScaled = true;
  static constexpr bool kScaledRows = true;
  static constexpr int32_t kLargest = 2047;
  static constexpr float kLargestLeft = kLargest, kLargestWeight = kLargest;
  static constexpr float kLargestRange = 2.0f;  // as in product_int8.h, for bfloat16's error
  typedef IntVec Sum;
  static_assert(int64_t{kChunkWords} * kPerWord * kLargest * kLargest <= INT32_MAX);

  AFT_INLINE static Sum multiply_add(Sum sum, const float* word, Vec weights) {
    int32_t pair;
    __builtin_memcpy(&pair, word, sizeof pair);
    const IntVec values = pair - IntVec{};
#if defined(__AVX512VNNI__)
    return (IntVec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)values, (__m512i)weights);
#elif defined(__AVX512F__)
    return sum + (IntVec)_mm512_madd_epi16((__m512i)values, (__m512i)weights);
#elif defined(__AVX2__)
    return sum + (IntVec)_mm256_madd_epi16((__m256i)values, (__m256i)weights);
#else
    return sum + (IntVec)_mm_madd_epi16((__m128i)values, (__m128i)weights);
#endif
  }

  // The offset is the middle of the row.
  static void encode(const float* values, int64_t count, float* words) {
    const RowScale scale = scale_of_row(values, count, 2 * kLargest);
    const Vec inverse = splat(1.0f / scale.step), shift = splat(-scale.smallest);
    for (int64_t i = 0; i < count; i += kLanes)
      put((load(values + i, count - i) + shift) * inverse - kLargestLeft, i, words);
    words[kChunkWords] = scale.step;
    words[kChunkWords + 1] = scale.smallest + kLargest * scale.step;
  }

  // The values lie between -kLargestLeft and kLargestLeft.
  AFT_INLINE static void put(Vec values, int64_t i, float* words) {
    typedef int16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
    const Vec rounding = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const Narrow whole = __builtin_convertvector((IntVec)(values + rounding) - (IntVec)rounding, Narrow);
    __builtin_memcpy((char*)words + i * sizeof(int16_t), &whole, sizeof whole);
  }

  AFT_INLINE static Vec pack_weights(const Vec (&rows)[kPerWord]) {
    const IntVec low = __builtin_convertvector(rows[0], IntVec), high = __builtin_convertvector(rows[1], IntVec);
    return (Vec)((low & 0xffff) | (high << 16));
  }
};

}  // namespace aft::AFT_ISA

#endif
