// Vectors of float32 in GCC and Clang's portable vector types, and the few operations on them.
//
// Every kernel source is compiled once per instruction set, with its own -m flags and AFT_ISA set to
// that set's name; cpu/dispatch chooses at run time. Vector types were chosen over a SIMD library
// because nothing here needs more than arithmetic, compare-and-select and broadcast, which the
// compiler turns into the same instructions; over plain loops because register blocking then is
// explicit, not a guess of the vectorizer. Intrinsics remain where the language has no operation
// (non-temporal stores, half conversion) or the compiler needs several instructions instead of one.
//
// All code compiled more than once lives in namespace aft::AFT_ISA: an inline function shared by two
// objects with different -m flags would be merged by the linker, and a machine without AVX-512 could
// be handed the AVX-512 copy. For the same reason these sources call no templates of std.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if !defined(AFT_ISA)
#error "compile with -DAFT_ISA=<name of the instruction set>"
#endif

#define AFT_INLINE inline __attribute__((always_inline))
#define AFT_LAMBDA_INLINE __attribute__((always_inline))

namespace aft::AFT_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t IntVec __attribute__((vector_size(kVectorBytes)));
// In memory: anywhere a float may be. Its accesses count as accesses to float, where memcpy would count as
// access to everything and have the compiler reload every variable after every store.
typedef float VecInMemory __attribute__((vector_size(kVectorBytes), aligned(4)));

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

AFT_INLINE Vec splat(float x) { return x - Vec{}; }
// Of NaN and a number, these return the second operand. So a running maximum skips a NaN, whose exponential still
// reaches the sums, and a limit keeps a NaN, so that NaN inputs propagate to the output.
AFT_INLINE Vec maximum_of(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
AFT_INLINE Vec minimum_of(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
// The same where `limit` is never NaN: an instruction less on aarch64, whose maximum of NaN and a number is NaN.
AFT_INLINE Vec at_least(Vec limit, Vec x) {
#if defined(__aarch64__)
  return vmaxq_f32(limit, x);
#else
  return maximum_of(limit, x);
#endif
}
AFT_INLINE Vec at_most(Vec limit, Vec x) {
#if defined(__aarch64__)
  return vminq_f32(limit, x);
#else
  return minimum_of(limit, x);
#endif
}
// A running maximum or minimum, which is never NaN: it skips an x that is.
AFT_INLINE Vec raised_by(Vec maximum, Vec x) {
#if defined(__aarch64__)
  return vmaxnmq_f32(maximum, x);
#else
  return maximum_of(x, maximum);
#endif
}
AFT_INLINE Vec lowered_by(Vec minimum, Vec x) {
#if defined(__aarch64__)
  return vminnmq_f32(minimum, x);
#else
  return minimum_of(x, minimum);
#endif
}
AFT_INLINE Vec absolute(Vec a) { return (Vec)((IntVec)a & 0x7fffffff); }

AFT_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecInMemory*>(p); }
AFT_INLINE void store(float* p, Vec v) { *reinterpret_cast<VecInMemory*>(p) = v; }

AFT_INLINE float sum_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__aarch64__)
  return vaddvq_f32(v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}
// Lane i of the result is the sum of the lanes of v[i]: a tree of additions that all sums climb together, with a
// third of the instructions of as many calls to sum_lanes (AVX-512).
AFT_INLINE Vec sum_each(const Vec (&v)[kLanes]) {
#if defined(__AVX512F__)
  __m512 quarter[4];  // of v[4i] to v[4i+3], in turn, a sum over each 128-bit piece
  for (int i = 0; i < 4; ++i) {
    const __m512 a = (__m512)v[4 * i], b = (__m512)v[4 * i + 1], c = (__m512)v[4 * i + 2], d = (__m512)v[4 * i + 3];
    const __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    quarter[i] = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
  }
  const auto halve = [](__m512 a, __m512 b) AFT_LAMBDA_INLINE {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  return (Vec)halve(halve(quarter[0], quarter[1]), halve(quarter[2], quarter[3]));
#elif defined(__AVX2__)
  __m256 half[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 ab = _mm256_hadd_ps((__m256)v[4 * i], (__m256)v[4 * i + 1]);
    const __m256 cd = _mm256_hadd_ps((__m256)v[4 * i + 2], (__m256)v[4 * i + 3]);
    half[i] = _mm256_hadd_ps(ab, cd);
  }
  return (Vec)(_mm256_permute2f128_ps(half[0], half[1], 0x20) + _mm256_permute2f128_ps(half[0], half[1], 0x31));
#elif defined(__aarch64__)
  return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
#else
  Vec sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = sum_lanes(v[i]);
  return sums;
#endif
}
AFT_INLINE float max_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__aarch64__)
  return vmaxnmvq_f32(v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
#endif
}
AFT_INLINE bool any(IntVec mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= mask[i];
  return bits != 0;
#endif
}

// A store past the cache, for results too large to be found there again: it saves
// reading each line before overwriting it. p must be aligned to the vector.
AFT_INLINE void stream(float* p, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__SSE2__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}
// Orders streamed stores before the store that tells other threads that a task is done.
AFT_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace aft::AFT_ISA
