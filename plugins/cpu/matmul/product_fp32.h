// Products in float32: a word holds one value, and one multiply-add takes it to a vector of columns.
#pragma once

#include "method.h"
#include "simd/load_store.h"

namespace aft::AFT_ISA {

struct Float32Product {
  static constexpr Method kMethod = Method::kFloat32;
  static constexpr int kPerWord = 1;
  static constexpr int64_t kChunkWords = 256;
  static constexpr bool kScaled = false;
  typedef Vec Sum;

  AFT_INLINE static Sum multiply_add(Sum sum, const float* word, Vec weights) { return sum + splat(*word) * weights; }
#if defined(__aarch64__)
  template <int lane>
  AFT_INLINE static Sum multiply_add_element(Sum sum, float32x2_t words, Vec weights) {
    return vfmaq_lane_f32(sum, weights, words, lane);
  }
  struct Offset {
    AFT_INLINE void add(const Vec (&)[2]) {}
    AFT_INLINE void take_from(Sum (&)[2]) const {}
  };
#endif

  static void encode(const float* values, int64_t count, float* words) {
    for (int64_t i = 0; i < count; i += kLanes) store(words + i, load(values + i, count - i));
  }
  AFT_INLINE static void encode_panel(const Vec (&values)[2], int64_t first, float* words) {
    store(words + first, values[0]);
    store(words + first + kLanes, values[1]);
  }
  AFT_INLINE static Vec rounded(Vec values) { return values; }
  AFT_INLINE static Vec pack_weights(const Vec (&rows)[kPerWord]) { return rows[0]; }
};

}  // namespace aft::AFT_ISA
