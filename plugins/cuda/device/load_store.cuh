// Tensor elements, float32, float16 or bfloat16, read and written as vectors of float32.
#pragma once

#include "device/device.cuh"

namespace aft::cuda {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Elements in 16 bytes, the most one instruction moves.
template <class T>
constexpr int kVector = 16 / sizeof(T);

// The type that a vector of that many bytes is moved as.
template <int bytes>
struct Words;
template <>
struct Words<2> {
  using type = uint16_t;
};
template <>
struct Words<4> {
  using type = uint32_t;
};
template <>
struct Words<8> {
  using type = uint2;
};
template <>
struct Words<16> {
  using type = uint4;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(Half x) { return machine::half_to_float(x.bits); }
__device__ __forceinline__ float to_float(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// Two floats as one word of T, rounded to nearest even; beyond the range of T infinity, and for NaN a NaN.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<Half>(float low, float high) {
  return machine::pack_half(low, high);
}
template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  return machine::pack_bfloat(low, high);
}

// N elements as they lie in memory: loads can be issued ahead of the arithmetic and held at their own width.
// `p` is aligned to the vector's size.
template <class T, int N>
struct Raw {
  union {
    typename Words<N * sizeof(T)>::type words;
    T elements[N];
  };

  Raw() = default;
  __device__ __forceinline__ explicit Raw(const T* p) : words(machine::load<typename Words<N * sizeof(T)>::type>(p)) {}

  __device__ __forceinline__ float operator[](int i) const { return to_float(elements[i]); }
};

template <int N>
__device__ __forceinline__ void store(float* p, const float (&x)[N]) {
  Raw<float, N> raw;
#pragma unroll
  for (int i = 0; i < N; ++i) raw.elements[i] = x[i];
  machine::store(p, raw.words);
}
template <class T, int N>
__device__ __forceinline__ void store(T* p, const float (&x)[N]) {
  if constexpr (N == 1) {
    p->bits = static_cast<uint16_t>(pack<T>(x[0], 0.0f));
  } else {
    union {
      typename Words<N * sizeof(T)>::type words;
      uint32_t pairs[N / 2];
    } raw;
#pragma unroll
    for (int i = 0; i < N; i += 2) raw.pairs[i / 2] = pack<T>(x[i], x[i + 1]);
    machine::store(p, raw.words);
  }
}

}  // namespace aft::cuda
