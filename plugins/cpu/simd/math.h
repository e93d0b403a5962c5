// exp, tanh and the gate on vectors of float32. Errors are against float64 and are checked by
// tests/plugins/native/math_test.cc.
#pragma once

#include "kernels.h"
#include "simd/simd.h"

namespace aft::AFT_ISA {

// The valid range of exp_in_range.
constexpr float kExpHigh = 88.0f;
#if defined(__AVX512F__)
constexpr float kExpLow = -110.0f;
#elif defined(__aarch64__)
constexpr float kExpLow = -88.0f;  // where 2^n is 0
#else
constexpr float kExpLow = -87.336f;  // where 2^n still has bits
#endif

#if defined(__AVX512F__)
alignas(64) constexpr float kPowers[kLanes] = {
    // 2^(i/16)
    1.0f,        1.04427378f, 1.09050773f, 1.13878863f, 1.18920712f, 1.24185781f, 1.29683955f, 1.35425555f,
    1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f, 1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
#elif defined(__AVX2__)
alignas(32) constexpr int32_t kPowers[kLanes] = {
    // the bits of 2^(i/8), less i << 20
    0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
#endif

// The polynomial with these coefficients, the highest first. Horner's rule, but on aarch64, whose multiply-add overwrites
// the addend: there every coefficient would be copied first. By pairs, half of the addends are sums.
template <int kCount>
AFT_INLINE Vec polynomial(Vec x, const float (&coefficients)[kCount]) {
#if defined(__aarch64__)
  const Vec square = x * x;
  int i = kCount % 2;
  Vec p = i == 1 ? splat(coefficients[0]) : x * coefficients[0] + coefficients[1];
  if (i == 0) i = 2;
#pragma GCC unroll 16
  for (; i < kCount; i += 2) p = p * square + (x * coefficients[i] + coefficients[i + 1]);
#else
  Vec p = splat(coefficients[0]);
#pragma GCC unroll 16
  for (int i = 1; i < kCount; ++i) p = p * x + coefficients[i];
#endif
  return p;
}

// Computes:    exp(x)
// Valid range: kExpLow <= x <= kExpHigh; the caller limits x. Otherwise use exp.
// Max error:   relative 1.5e-7 + 2.7e-9 |x|
// Method:      exp(x) = 2^n exp(r), n an integer, |r| <= ln(2)/2; exp(r) = 1 + r + r^2 q(r), q minimax of degree 4 with
//              relative error 3e-9. Where one instruction looks up all of a vector, n is a multiple of 1/16 (AVX-512)
//              or 1/8 (AVX2), r that much smaller and q of degree 1. In AVX-512, which scales by 2^n in another
//              instruction, that takes three quarters of the time.
AFT_INLINE Vec exp_in_range(Vec x) {
#if defined(__AVX512F__)
  const Vec shift = splat(786432.0f);  // 1.5 * 2^19: adding it rounds to the nearest sixteenth
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift, r = x - n * 0.69314718f;
  const Vec power = (Vec)_mm512_permutexvar_ps((__m512i)shifted, (__m512)load(kPowers));  // of the fraction of n
  const Vec p = (r * 0.16666667f + 0.5f) * r + 1.0f;
  return (Vec)_mm512_scalef_ps((__m512)(p * (r * power) + power), (__m512)n);  // takes the integer below n
#elif defined(__AVX2__)
  const Vec shift = splat(1572864.0f);  // 1.5 * 2^20: adding it rounds to the nearest eighth
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift, r = x - n * 0.69314718f;
  // The last bits of `shifted` are 8 n. Moved up by 20, the integer of n is where exponents are, with its eighths
  // below; the table has those subtracted.
  const __m256i powers = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPowers));
  const __m256i fraction = _mm256_permutevar8x32_epi32(powers, (__m256i)shifted);
  const Vec power = (Vec)_mm256_add_epi32(fraction, _mm256_slli_epi32((__m256i)shifted, 20));  // modulo 2^32
  const Vec p = (r * 0.16666858f + 0.50006448f) * r + 1.0f;
  return p * (r * power) + power;
#elif defined(__aarch64__)
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift, r = x - n * 0.69314718f;
  const Vec p = polynomial(r, {1.3814539e-3f, 8.3687454e-3f, 4.1668389e-2f, 1.6666521e-1f, 4.9999994e-1f});
  const Vec power = (Vec)(((IntVec)shifted << 23) + (127 << 23));  // 2^n: the last bits of `shifted` are n
  return power + power * (r + r * r * p);
#else
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift;
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln(2) in two: n times the first is exact without FMA
  Vec p = r * 1.3814539e-3f + 8.3687454e-3f;
  p = p * r + 4.1668389e-2f;
  p = p * r + 1.6666521e-1f;
  p = p * r + 4.9999994e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * (Vec)(((IntVec)shifted - ((IntVec)shift - 127)) << 23);
#endif
}

// Computes:    exp(x)
// Valid range: x <= kExpHigh. Sums are relative to their largest term, so no kernel needs larger x.
// Max error:   as exp_in_range down to -87.3; below, the result is 0, or a subnormal number: in AVX-512 down to -103, on
//              aarch64 to -87.6.
AFT_INLINE Vec exp(Vec x) {
  const Vec power = exp_in_range(at_least(splat(kExpLow), x));
#if defined(__AVX512F__) || defined(__aarch64__)
  return power;
#else
  return x < kExpLow ? Vec{} : power;
#endif
}

// Computes:    tanh(x)
// Valid range: all x
// Max error:   relative 4e-7
// Method:      tanh(|x|) = (1 - e) / (1 + e), e = exp(-2|x|). Below 0.3 that cancels, and the odd series is used.
AFT_INLINE Vec tanh(Vec x) {
  Vec size = absolute(x);
  Vec e = exp_in_range(at_least(splat(kExpLow), size * -2.0f));
  Vec far = (1.0f - e) / (1.0f + e);
  Vec x2 = size * size;
  const Vec series = polynomial(x2, {-8.8632355e-3f, 2.1869488e-2f, -5.3968254e-2f, 1.3333333e-1f, -3.3333333e-1f});
  Vec near = size + size * x2 * series;
  Vec result = size < 0.3f ? near : far;
  return x < 0.0f ? -result : result;
}

// eps / exp(maximum), where log_eps is the logarithm of eps, -inf for 0; at most exp(kExpHigh), beside which weights of
// up to 1 are lost.
AFT_INLINE Vec eps_beside(float log_eps, Vec maximum) { return exp(at_most(splat(kExpHigh), log_eps - maximum)); }

// The eps that counts in a divisor: at least MIN_EPS of mechanisms/linear_attention.py.
constexpr float kMinEps = 1e-20f;
AFT_INLINE float floor_of_eps(float eps) { return eps > kMinEps ? eps : kMinEps; }

// Computes:    gate(query) * numerator / denominator, 0 where the denominator is 0: no key was counted
// Valid range: all queries; the sigmoid limits them to the range of exp_in_range.
// Max error:   the sigmoid, relative 3e-7 + 5.4e-9 |query|; the rest as its operations
// Method:      the sigmoid and the ratio share one division.
template <Gate gate>
AFT_INLINE Vec gated_ratio(Vec query, Vec numerator, Vec denominator) {
  Vec empty = Vec{};
  if (gate == Gate::kSigmoid) {
    const Vec e = exp_in_range(-at_most(splat(-kExpLow), at_least(splat(-kExpHigh), query)));
    Vec ratio = numerator / (denominator * (1.0f + e));
    return denominator == 0.0f ? empty : ratio;
  }
  Vec ratio = numerator / denominator;
  if (gate == Gate::kTanh) ratio = ratio * tanh(query);
  if (gate == Gate::kRelu) ratio = ratio * at_least(Vec{}, query);
  return denominator == 0.0f ? empty : ratio;
}

}  // namespace aft::AFT_ISA
