// Multiply-adds from registers alone: the processor's upper bound of each kind of product.
// Every function runs `rounds` rounds and returns its multiply-adds, or 0 if the instruction is
// missing. See register_rates.py.
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Twelve sums hide the latency of four to six cycles at two instructions a cycle.
constexpr int kSums = 12;

template <class Vector, class Step>
long repeat(long rounds, Vector sum, long multiply_adds, Step step) {
  Vector sums[kSums];
  for (Vector& each : sums) each = sum;
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) {
      // An element of the array as the operand would keep the array in memory.
      Vector next = step(sums[i]);
#if defined(__x86_64__)
      asm volatile("" : "+v"(next));
#elif defined(__aarch64__)
      asm volatile("" : "+w"(next));
#endif
      sums[i] = next;
    }
  }
  return rounds * kSums * multiply_adds;
}

}  // namespace

extern "C" {

long fp32(long rounds) {
#if defined(__AVX512F__)
  const __m512 one = _mm512_set1_ps(0.5f);
  return repeat(rounds, one, 16, [&](__m512 sum) { return _mm512_fmadd_ps(one, one, sum); });
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256 one = _mm256_set1_ps(0.5f);
  return repeat(rounds, one, 8, [&](__m256 sum) { return _mm256_fmadd_ps(one, one, sum); });
#elif defined(__aarch64__)
  const float32x4_t one = vdupq_n_f32(0.5f);
  return repeat(rounds, one, 4, [&](float32x4_t sum) { return vfmaq_f32(sum, one, one); });
#else
  return 0 * rounds;
#endif
}

long bf16(long rounds) {
#if defined(__AVX512BF16__)
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  return repeat(rounds, _mm512_setzero_ps(), 32,
                [&](__m512 sum) { return _mm512_dpbf16_ps(sum, ones, ones); });
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x8_t ones = vreinterpretq_bf16_u16(vdupq_n_u16(0x3f80));
  return repeat(rounds, vdupq_n_f32(0.0f), 16,
                [&](float32x4_t sum) { return vbfmmlaq_f32(sum, ones, ones); });
#else
  return 0 * rounds;
#endif
}

long int16(long rounds) {
#if defined(__AVX512VNNI__)
  const __m512i ones = _mm512_set1_epi16(1);
  return repeat(rounds, _mm512_setzero_si512(), 32,
                [&](__m512i sum) { return _mm512_dpwssd_epi32(sum, ones, ones); });
#elif defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  return repeat(rounds, _mm256_setzero_si256(), 16, [&](__m256i sum) {
    __m256i factor = ones;
    asm volatile("" : "+v"(factor));  // otherwise the product is computed once
    return _mm256_add_epi32(sum, _mm256_madd_epi16(factor, ones));
  });
#else
  return 0 * rounds;
#endif
}

long int8(long rounds) {
#if defined(__AVX512VNNI__)
  const __m512i ones = _mm512_set1_epi8(1);
  return repeat(rounds, _mm512_setzero_si512(), 64,
                [&](__m512i sum) { return _mm512_dpbusd_epi32(sum, ones, ones); });
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  const int8x16_t ones = vdupq_n_s8(1);
  return repeat(rounds, vdupq_n_s32(0), 32,
                [&](int32x4_t sum) { return vmmlaq_s32(sum, ones, ones); });
#else
  return 0 * rounds;
#endif
}

}  // extern "C"
