// Products in bfloat16 and in 8-bit integers on aarch64, with the numbers of product_bf16.h and product_int8.h:
// bfmmla (FEAT_BF16) and usmmla (FEAT_I8MM), or sdot (FEAT_DotProd). An instruction takes 16, 32 or 16 multiply-adds,
// where one in float32 takes 4. 16-bit integers would take no more than float32 does.
//
// bfmmla rounds the sum of two products and then the addition, both to odd: no sum leans to one side.
//
// sdot multiplies signed by signed. The left side's numbers, 0 to 255, are stored less 128, and 128 times the sum of a
// column is added to its sums at the end: the integers are those that usmmla has.
#pragma once

#include "method.h"
#include "matmul/product_scale.h"
#include "simd/load_store.h"

namespace aft::AFT_ISA {

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

struct Bfloat16Product {
  static constexpr Method kMethod = Method::kBfloat16;
  static constexpr int kPerWord = 2;
  static constexpr int64_t kChunkWords = 256;
  static constexpr bool kScaled = false;
  typedef Vec Sum;

  AFT_INLINE static Sum multiply_add_matrix(Sum sum, Vec rows, Vec weights) {
    return vbfmmlaq_f32(sum, (bfloat16x8_t)rows, (bfloat16x8_t)weights);
  }

  static void encode(const float* values, int64_t count, float* words) {
    for (int64_t i = 0; i < count; i += 2 * kLanes) {
      const Vec pair[2] = {load(values + i, count - i), load(values + i + kLanes, count - i - kLanes)};
      encode_panel(pair, i, words);
    }
  }
  AFT_INLINE static void encode_panel(const Vec (&values)[2], int64_t first, float* words) {
    store(words + first / 2, (Vec)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(values[0]), values[1]));
  }
  // Rounds the numbers to bfloat16.
  AFT_INLINE static Vec rounded(Vec values) { return (Vec)vshll_n_u16((uint16x4_t)vcvt_bf16_f32(values), 16); }
  AFT_INLINE static Vec pack_weights(const Vec (&rows)[kPerWord]) {
    return (Vec)vzip1q_u16((uint16x8_t)vcvtq_low_bf16_f32(rows[0]), (uint16x8_t)vcvtq_low_bf16_f32(rows[1]));
  }
};

#endif

#if defined(__ARM_FEATURE_DOTPROD)

struct Int8Product {
  static constexpr Method kMethod = Method::kInt8;
  static constexpr int kPerWord = 4;
  static constexpr int64_t kChunkWords = 256;
  static constexpr bool kScaled = true;
  static constexpr bool kScaledRows = true;
  static constexpr float kLargestLeft = 255, kLargestWeight = 127;
  static constexpr float kLargestRange = 1.0f;  // as in product_int8.h
  typedef IntVec Sum;

#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr uint8_t kStored = 0;  // the number that is stored for 0

  AFT_INLINE static Sum multiply_add_matrix(Sum sum, Vec rows, Vec weights) {
    return (IntVec)vusmmlaq_s32((int32x4_t)sum, (uint8x16_t)rows, (int8x16_t)weights);
  }
#else
  static constexpr uint8_t kStored = 128;

  template <int lane>
  AFT_INLINE static Sum multiply_add_element(Sum sum, float32x2_t words, Vec weights) {
    return (IntVec)vdotq_lane_s32((int32x4_t)sum, (int8x16_t)weights, (int8x8_t)words, lane);
  }

  // -128 times the sums of columns.
  struct Offset {
    int32x4_t columns[2];
    AFT_INLINE void add(const Vec (&weights)[2]) {
      for (int v = 0; v < 2; ++v) columns[v] = vdotq_s32(columns[v], (int8x16_t)weights[v], vdupq_n_s8(-128));
    }
    AFT_INLINE void take_from(Sum (&sum)[2]) const {
      for (int v = 0; v < 2; ++v) sum[v] -= (IntVec)columns[v];
    }
  };
#endif

  static void encode(const float* values, int64_t count, float* words) {
    const RowScale scale = scale_of_row(values, count, kLargestLeft);
    const Vec inverse = splat(1.0f / scale.step), shift = splat(-scale.smallest);
    for (int64_t i = 0; i < count; i += 4 * kLanes) {
      uint16x8_t halves[2];
      for (int h = 0; h < 2; ++h) {
        const int64_t k = i + 2 * h * kLanes;
        const Vec low = (load(values + k, count - k) + shift) * inverse;
        const Vec high = (load(values + k + kLanes, count - k - kLanes) + shift) * inverse;
        halves[h] = vqmovn_high_u32(vqmovn_u32(vcvtnq_u32_f32(low)), vcvtnq_u32_f32(high));
      }
      const uint8x16_t bytes = vqmovn_high_u16(vqmovn_u16(halves[0]), halves[1]);
      store(words + i / kPerWord, (Vec)veorq_u8(bytes, vdupq_n_u8(kStored)));
    }
    words[kChunkWords] = scale.step;
    words[kChunkWords + 1] = scale.smallest;
  }

  // The values lie between 0 and kLargestLeft.
  AFT_INLINE static void put(Vec values, int64_t i, float* words) {
    const uint16x4_t whole = vqmovn_u32(vcvtnq_u32_f32(values));
    const uint8x8_t bytes = veor_u8(vqmovn_u16(vcombine_u16(whole, whole)), vdup_n_u8(kStored));
    __builtin_memcpy((char*)words + i, &bytes, kLanes);
  }

  AFT_INLINE static Vec pack_weights(const Vec (&rows)[kPerWord]) {
    IntVec words{};
    for (int i = 0; i < kPerWord; ++i) words |= (__builtin_convertvector(rows[i], IntVec) & 0xff) << (8 * i);
    return (Vec)words;
  }
};

#endif

}  // namespace aft::AFT_ISA
