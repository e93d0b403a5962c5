// The AVX-512 intrinsics that the kernels use, as Intel's guide to intrinsics defines them, for a processor without
// them. Included before everything else, by CMake's AFT_EMULATE_AVX512. The kernels' vectors keep their 512 bits; the
// compiler takes each as two of 256.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Unsigned __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

template <class To, class From>
To cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct FloatHalves {
  __m256 low, high;
};
struct IntHalves {
  __m256i low, high;
};
struct HalfOfInts {
  __m128i low, high;
};

inline __m512 set1_ps(float x) { return (__m512)(x - Floats{}); }
inline __m512 setzero_ps() { return (__m512)Floats{}; }
inline __m512i set1_epi32(int x) { return (__m512i)(x - Ints{}); }
inline __m512i or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i slli_epi32(__m512i a, int bits) { return (__m512i)((Ints)a << bits); }
inline __m256i castsi512_si256(__m512i a) { return cast<IntHalves>(a).low; }
inline __m256i extracti64x4_epi64(__m512i a, int half) {
  return half ? cast<IntHalves>(a).high : cast<IntHalves>(a).low;
}

// Of NaN and a number, the second.
inline __m512 max_ps(__m512 a, __m512 b) { return (Floats)a > (Floats)b ? a : b; }
inline __m512 min_ps(__m512 a, __m512 b) { return (Floats)a < (Floats)b ? a : b; }

inline int test_epi32_mask(__m512i a, __m512i b) {
  int mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (((Ints)a)[i] & ((Ints)b)[i]) != 0 ? 1 << i : 0;
  return mask;
}

inline __m512 maskz_loadu_ps(unsigned mask, const float* from) {
  Floats lanes;
  for (int i = 0; i < 16; ++i) lanes[i] = mask >> i & 1 ? from[i] : 0.0f;
  return (__m512)lanes;
}

inline void stream_ps(float* to, __m512 values) { *reinterpret_cast<__m512*>(to) = values; }

inline float reduce_add_ps(__m512 values) {
  Floats sums = (Floats)values;
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

inline float reduce_max_ps(__m512 values) {
  Floats largest = (Floats)values;
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) largest[i] = largest[i] > largest[i + half] ? largest[i] : largest[i + half];
  return largest[0];
}

inline __m512 permutexvar_ps(__m512i places, __m512 values) {
  Floats lanes;
  for (int i = 0; i < 16; ++i) lanes[i] = ((Floats)values)[((Ints)places)[i] & 15];
  return (__m512)lanes;
}

// Of every piece of 128 bits, in turn one of `a` and one of `b`: its lower half or its upper.
template <class Vector>
Vector unpack(Vector a, Vector b, int upper) {
  constexpr int kPiece = 16 / sizeof a[0], kHalf = kPiece / 2;
  Vector lanes;
  for (int piece = 0; piece < 4; ++piece)
    for (int i = 0; i < kHalf; ++i) {
      const int from = piece * kPiece + upper * kHalf + i, to = piece * kPiece + 2 * i;
      lanes[to] = a[from];
      lanes[to + 1] = b[from];
    }
  return lanes;
}
inline __m512 unpacklo_ps(__m512 a, __m512 b) { return (__m512)unpack((Floats)a, (Floats)b, 0); }
inline __m512 unpackhi_ps(__m512 a, __m512 b) { return (__m512)unpack((Floats)a, (Floats)b, 1); }
inline __m512d unpacklo_pd(__m512d a, __m512d b) { return (__m512d)unpack((Doubles)a, (Doubles)b, 0); }
inline __m512d unpackhi_pd(__m512d a, __m512d b) { return (__m512d)unpack((Doubles)a, (Doubles)b, 1); }

// Two pieces of 128 bits of `a`, then two of `b`.
inline __m512 shuffle_f32x4(__m512 a, __m512 b, int pieces) {
  const Floats from[2] = {(Floats)a, (Floats)b};
  Floats lanes;
  for (int i = 0; i < 16; ++i) lanes[i] = from[i / 8][4 * (pieces >> (i / 4 * 2) & 3) + i % 4];
  return (__m512)lanes;
}

inline Floats floor(Floats values) {  // within the range of int32, or NaN
  const Floats cut = __builtin_convertvector(__builtin_convertvector(values, Ints), Floats);
  const Floats whole = cut > values ? cut - 1.0f : cut;
  return values == values ? whole : values;
}

template <int rounding>
__m512 roundscale_ps(__m512 values) {
  static_assert(rounding == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  return (__m512)floor((Floats)values);
}

// Times 2 to the integer below, in two steps: a half of it is a float's exponent.
inline __m512 scalef_ps(__m512 values, __m512 powers) {
  const Floats least = -252.0f - Floats{}, most = 252.0f - Floats{};
  Floats limited = (Floats)powers < least ? least : (Floats)powers;
  limited = limited > most ? most : limited;
  const Ints whole = __builtin_convertvector(floor(limited), Ints), half = whole >> 1;
  return (__m512)((Floats)values * (Floats)((half + 127) << 23) * (Floats)((whole - half + 127) << 23));
}

inline __m512 cvtph_ps(__m256i values) {
  const auto halves = cast<HalfOfInts>(values);
  return cast<__m512>(FloatHalves{_mm256_cvtph_ps(halves.low), _mm256_cvtph_ps(halves.high)});
}

template <int rounding>
__m256i cvtps_ph(__m512 values) {
  const auto halves = cast<FloatHalves>(values);
  return cast<__m256i>(
      HalfOfInts{_mm256_cvtps_ph(halves.low, rounding), _mm256_cvtps_ph(halves.high, rounding)});
}

// Of what is out of range, and of NaN, the largest integer.
inline __m512i cvtps_epu32(__m512 values) {
  Unsigned whole;
  for (int i = 0; i < 16; ++i) {
    const float rounded = std::nearbyint(((Floats)values)[i]);
    whole[i] = rounded >= 0 && rounded < 4294967296.0f ? static_cast<uint32_t>(rounded) : UINT32_MAX;
  }
  return (__m512i)whole;
}

inline __m128i cvtusepi32_epi8(__m512i values) {
  const Unsigned whole = (Unsigned)values;
  return (__m128i)__builtin_convertvector(whole > 255 ? 255 - Unsigned{} : whole, Bytes);
}

inline __m512i cvtepu16_epi32(__m256i values) { return (__m512i)__builtin_convertvector((Words)values, Unsigned); }

// bfloat16, to nearest even; a subnormal number becomes 0, and a NaN stays one.
inline __m256i cvtneps_pbh(__m512 values) {
  const Unsigned bits = (Unsigned)values;
  const Unsigned number = (bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits + 0x7fff + (bits >> 16 & 1);
  const Unsigned rounded = (Floats)values == (Floats)values ? number : bits | 0x400000;
  return (__m256i)__builtin_convertvector(rounded >> 16, Words);
}
inline __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
  return cast<__m512bh>(IntHalves{cvtneps_pbh(low), cvtneps_pbh(high)});
}

// sums[i] += the products of the integers, of Left and Right, that are next to each other in 32 bits.
template <class Left, class Right>
Ints add_products(Ints sums, __m512i left, __m512i right) {
  constexpr int kCount = 4 / sizeof(Left);
  Left a[16 * kCount];
  Right b[16 * kCount];
  std::memcpy(a, &left, sizeof a);
  std::memcpy(b, &right, sizeof b);
  for (int i = 0; i < 16 * kCount; ++i) sums[i / kCount] += a[i] * b[i];
  return sums;
}
inline __m512i madd_epi16(__m512i a, __m512i b) { return (__m512i)add_products<int16_t, int16_t>(Ints{}, a, b); }
inline __m512i dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
  return (__m512i)add_products<int16_t, int16_t>((Ints)sums, a, b);
}
inline __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  return (__m512i)add_products<uint8_t, int8_t>((Ints)sums, a, b);
}

// Of two bfloat16 in 32 bits, the product of the upper ones first.
inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  const Unsigned left = cast<Unsigned>(a), right = cast<Unsigned>(b);
  const Floats upper = (Floats)sums + (Floats)(left & 0xffff0000) * (Floats)(right & 0xffff0000);
  return (__m512)(upper + (Floats)(left << 16) * (Floats)(right << 16));
}

}  // namespace emulated

#define _mm512_castsi512_si256 emulated::castsi512_si256
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_epu32 emulated::cvtps_epu32
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(values, rounding) emulated::cvtps_ph<(rounding)>(values)
#define _mm512_cvtusepi32_epi8 emulated::cvtusepi32_epi8
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 emulated::dpwssd_epi32
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 emulated::extracti64x4_epi64
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_maskz_loadu_ps emulated::maskz_loadu_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_or_si512 emulated::or_si512
#define _mm512_permutexvar_ps emulated::permutexvar_ps
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(values, rounding) emulated::roundscale_ps<(rounding)>(values)
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_setzero_ps emulated::setzero_ps
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 emulated::shuffle_f32x4
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_stream_ps emulated::stream_ps
#define _mm512_test_epi32_mask emulated::test_epi32_mask
#define _mm512_unpackhi_pd emulated::unpackhi_pd
#define _mm512_unpackhi_ps emulated::unpackhi_ps
#define _mm512_unpacklo_pd emulated::unpacklo_pd
#define _mm512_unpacklo_ps emulated::unpacklo_ps

// Only now, as the compiler's own headers would take them for leave.
#define __AVX512F__ 1
#if defined(AFT_EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(AFT_EMULATE_BF16)
#define __AVX512BF16__ 1
#endif
