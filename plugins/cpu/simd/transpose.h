// Transposing squares of kLanes x kLanes floats in registers.
#pragma once

#include "simd/simd.h"

namespace aft::AFT_ISA {

// The low or high halves of every 16 bytes of a and b in turn: single floats, then pairs of floats.
struct Interleaved {
  Vec low, high;
};
AFT_INLINE Interleaved interleave_floats(Vec a, Vec b) {
#if defined(__AVX512F__)
  return {(Vec)_mm512_unpacklo_ps((__m512)a, (__m512)b), (Vec)_mm512_unpackhi_ps((__m512)a, (__m512)b)};
#elif defined(__AVX2__)
  return {(Vec)_mm256_unpacklo_ps((__m256)a, (__m256)b), (Vec)_mm256_unpackhi_ps((__m256)a, (__m256)b)};
#elif defined(__x86_64__)
  return {(Vec)_mm_unpacklo_ps((__m128)a, (__m128)b), (Vec)_mm_unpackhi_ps((__m128)a, (__m128)b)};
#elif defined(__aarch64__)
  return {(Vec)vzip1q_f32(a, b), (Vec)vzip2q_f32(a, b)};
#else
  return {Vec{a[0], b[0], a[1], b[1]}, Vec{a[2], b[2], a[3], b[3]}};
#endif
}
AFT_INLINE Interleaved interleave_pairs(Vec a, Vec b) {
#if defined(__AVX512F__)
  return {(Vec)_mm512_unpacklo_pd((__m512d)a, (__m512d)b), (Vec)_mm512_unpackhi_pd((__m512d)a, (__m512d)b)};
#elif defined(__AVX2__)
  return {(Vec)_mm256_unpacklo_pd((__m256d)a, (__m256d)b), (Vec)_mm256_unpackhi_pd((__m256d)a, (__m256d)b)};
#elif defined(__x86_64__)
  return {(Vec)_mm_unpacklo_pd((__m128d)a, (__m128d)b), (Vec)_mm_unpackhi_pd((__m128d)a, (__m128d)b)};
#elif defined(__aarch64__)
  return {(Vec)vzip1q_f64((float64x2_t)a, (float64x2_t)b), (Vec)vzip2q_f64((float64x2_t)a, (float64x2_t)b)};
#else
  return {Vec{a[0], a[1], b[0], b[1]}, Vec{a[2], a[3], b[2], b[3]}};
#endif
}

// rows[i] becomes column i. Every 16 bytes of rows[4q + k] first become column 4l + k of rows 4q to 4q + 3, for the l-th
// 16 bytes; whole pieces of 16 bytes then change places.
AFT_INLINE void transpose(Vec (&rows)[kLanes]) {
  for (int q = 0; q < kLanes; q += 4) {
    const Interleaved ab = interleave_floats(rows[q], rows[q + 1]), cd = interleave_floats(rows[q + 2], rows[q + 3]);
    const Interleaved low = interleave_pairs(ab.low, cd.low), high = interleave_pairs(ab.high, cd.high);
    rows[q] = low.low;
    rows[q + 1] = low.high;
    rows[q + 2] = high.low;
    rows[q + 3] = high.high;
  }
#if defined(__AVX512F__)
  for (int k = 0; k < 4; ++k) {
    const __m512 a = (__m512)rows[k], b = (__m512)rows[4 + k], c = (__m512)rows[8 + k], d = (__m512)rows[12 + k];
    const __m512 even_ab = _mm512_shuffle_f32x4(a, b, 0x88), even_cd = _mm512_shuffle_f32x4(c, d, 0x88);
    const __m512 odd_ab = _mm512_shuffle_f32x4(a, b, 0xdd), odd_cd = _mm512_shuffle_f32x4(c, d, 0xdd);
    rows[k] = (Vec)_mm512_shuffle_f32x4(even_ab, even_cd, 0x88);
    rows[4 + k] = (Vec)_mm512_shuffle_f32x4(odd_ab, odd_cd, 0x88);
    rows[8 + k] = (Vec)_mm512_shuffle_f32x4(even_ab, even_cd, 0xdd);
    rows[12 + k] = (Vec)_mm512_shuffle_f32x4(odd_ab, odd_cd, 0xdd);
  }
#elif defined(__AVX2__)
  for (int k = 0; k < 4; ++k) {
    const __m256 a = (__m256)rows[k], b = (__m256)rows[4 + k];
    rows[k] = (Vec)_mm256_permute2f128_ps(a, b, 0x20);
    rows[4 + k] = (Vec)_mm256_permute2f128_ps(a, b, 0x31);
  }
#endif
}

}  // namespace aft::AFT_ISA
