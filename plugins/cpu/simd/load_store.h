// Reading and writing tensor elements, float32 or float16, whole vectors or the last few channels.
#pragma once

#include "simd/simd.h"

namespace aft::AFT_ISA {

struct Half {
  uint16_t bits;
};

AFT_INLINE Vec load(const Half* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  return vcvt_f32_f16((float16x4_t)vld1_u16(&p->bits));
#else
  IntVec h;
  for (int i = 0; i < kLanes; ++i) h[i] = p[i].bits;
  // Shift exponent and mantissa into place and rescale by 2^112: right for subnormals too.
  Vec magnitude = (Vec)((h & 0x7fff) << 13) * splat(5.192296858534828e33f);
  IntVec special = (IntVec)(magnitude >= splat(65536.0f)) & 0x7f800000;
  return (Vec)((IntVec)magnitude | special | ((h & 0x8000) << 16));
#endif
}

// Rounds to nearest even, as IEEE 754 defines it: beyond the range of float16 infinity, and for NaN a NaN.
AFT_INLINE void store(Half* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
  vst1_u16(&p->bits, (uint16x4_t)vcvt_f16_f32(v));
#else
  IntVec bits = (IntVec)v;
  IntVec sign = (bits >> 16) & 0x8000;
  Vec magnitude = absolute(v);
  // Adding 0.5 leaves a subnormal half's bits in the low end of the sum, rounded by the adder.
  IntVec subnormal = (IntVec)(magnitude + splat(0.5f)) - (IntVec)splat(0.5f);
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));  // those of a NaN may overflow
  Bits m = (Bits)magnitude;
  IntVec normal = (IntVec)((m - (112 << 23) + 0xfff + ((m >> 13) & 1)) >> 13);
  IntVec finite = magnitude < splat(6.103515625e-5f) ? subnormal : normal;
  // 65,520 lies halfway between the largest float16 and the next number of its digits.
  IntVec h = (magnitude < splat(65520.0f) ? finite : (IntVec)(IntVec{} + 0x7c00)) | sign;
  h = v == v ? h : (IntVec)(IntVec{} + 0x7e00);
  for (int i = 0; i < kLanes; ++i) p[i].bits = static_cast<uint16_t>(h[i]);
#endif
}
AFT_INLINE void stream(Half* p, Vec v) { store(p, v); }

// The first `count` lanes only, the others 0; count >= kLanes means all.
template <class T>
AFT_INLINE Vec load(const T* p, int64_t count) {
  if (__builtin_expect(count >= kLanes, 1)) return load(p);
  T lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}
// The same for rows that seldom fill a vector: the lanes are not gathered one by one.
AFT_INLINE Vec load_few(const float* p, int64_t count) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << min(count, kLanes)) - 1), p);
#else
  return load(p, count);
#endif
}
AFT_INLINE Vec load_few(const Half* p, int64_t count) { return load(p, count); }
template <class T>
AFT_INLINE void store(T* p, Vec v, int64_t count) {
  if (__builtin_expect(count >= kLanes, 1)) return store(p, v);
  if (count <= 0) return;
  T lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

inline void zero(float* p, int64_t floats) { __builtin_memset(p, 0, floats * sizeof(float)); }

// Converts `count` numbers to float32.
inline void to_float(const Half* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i, count - i), count - i);
}

// Asks for the line at p, which may lie past the end of its tensor, to be in the first-level cache soon.
// Kernels that do some arithmetic on every row of a few streams run up to 1.7 times faster with it than when
// the hardware is left to foresee the streams.
template <class T>
AFT_INLINE void prefetch(const T* p) {
  __builtin_prefetch(p, 0, 3);
}
// The same for the second-level cache, for lines that are needed only after a stretch of arithmetic.
template <class T>
AFT_INLINE void prefetch_later(const T* p) {
  __builtin_prefetch(p, 0, 2);
}
// The size of a cache line: both prefetches fetch one whole line.
constexpr int64_t kLineBytes = 64;
template <class T>
constexpr int64_t kLineElements = kLineBytes / static_cast<int64_t>(sizeof(T));
template <class T>
constexpr int kLineVecs = max(1, kLineElements<T> / kLanes);
// The distance ahead of the row being read: a nearer line arrives late, a farther one is evicted before its use.
constexpr int64_t kPrefetchRows = 16;

AFT_INLINE float to_float(float x) { return x; }
AFT_INLINE float to_float(Half x) {
#if defined(__aarch64__)
  return vgetq_lane_f32(vcvt_f32_f16((float16x4_t)vdup_n_u16(x.bits)), 0);
#else
  return load(&x, 1)[0];
#endif
}

// Writes a kernel's output rows: past the cache if the whole output is larger than caches, else through it. Only whole
// lines go past the cache: if the two halves of a line come with other work between them, each half may be written
// separately, and kernels take up to a quarter longer than through the cache.
template <class T>
struct Output {
  T* data;
  bool past_cache;

  // Every offset written is a multiple of `unit` plus a multiple of the vectors written together.
  Output(void* output, int64_t elements, int64_t unit)
      : data(static_cast<T*>(output)),
        past_cache(sizeof(T) == 4 && elements * 4 >= kStreamBytes && unit % kLineElements<T> == 0 &&
                   reinterpret_cast<uintptr_t>(output) % kLineBytes == 0) {}

  Output from(int64_t offset) const {
    Output later = *this;
    later.data += offset;
    return later;
  }
  // Vectors next to each other, of which the first `count` lanes are written.
  template <int vecs>
  AFT_INLINE void write(int64_t offset, const Vec (&v)[vecs], int64_t count) const {
    constexpr bool kWholeLines = vecs * kVectorBytes % kLineBytes == 0;
    for (int i = 0; i < vecs; ++i)
      if (kWholeLines && past_cache)
        stream(data + offset + i * kLanes, v[i]);
      else
        store(data + offset + i * kLanes, v[i], count - i * kLanes);
  }
  AFT_INLINE void write(int64_t offset, Vec v, int64_t count) const {
    const Vec one[] = {v};  // {v} is a Vec to Clang 14, which would call this function again
    write(offset, one, count);
  }
  // After the last write of a task.
  void fence() const {
    if (past_cache) stream_fence();
  }

  static constexpr int64_t kStreamBytes = 8 << 20;
};

}  // namespace aft::AFT_ISA
