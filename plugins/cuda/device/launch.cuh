// From the C interface to kernels: launching, shared memory, choosing template arguments, workspace.
#pragma once

#include "device/device.cuh"
#include "device/load_store.cuh"
#include "kernels.h"

namespace aft::cuda {

using std::int64_t;

constexpr int kWarp = 32;
constexpr int64_t kGridLimit = 65535;  // of grid.y and grid.z; grid.x may be 2^31 - 1

// The most one block can have on every architecture we compile for (sm_86, 89 and 120 have least).
constexpr size_t kMostShared = 99 * 1024;

// A [batch, tokens, channels] tensor: element [b, t, c] lies b * batch_stride + t * token_stride + c elements after
// `data`.
struct StridedTensor {
  const void* data;
  int64_t batch_stride, token_stride;
};

// A Sequence with the strides of its tensors.
struct StridedSequence {
  Element element;
  bool causal;
  int64_t batch, tokens, channels;
  StridedTensor query, key, value;
  const int64_t* lengths;  // [batch]
  void* output;            // [batch, tokens, channels], packed
};

// The parameters of a mechanism for its kernels, which read the tensors of `sequence`.
template <class Params>
struct Strided : Params {
  StridedSequence sequence;
};

// Keys have as many channels as queries, or one for each of `key_channels` heads.
template <class Params>
Strided<Params> strided(const Params& p, int64_t key_channels) {
  const auto packed = [&](const void* data, int64_t channels) {
    return StridedTensor{data, p.tokens * channels, channels};
  };
  return {p,
          {p.element, p.causal, p.batch, p.tokens, p.channels, packed(p.query, p.channels), packed(p.key, key_channels),
           packed(p.value, p.channels), p.lengths, p.output}};
}
template <class Params>
Strided<Params> strided(const Params& p) {
  return strided(p, p.channels);
}

// Whether the output has no elements.
inline bool is_empty(const Sequence& s) { return s.batch * s.tokens * s.channels == 0; }

struct NoShared {};

template <class T>
struct Same {
  using type = T;
};

// The block's shared memory, a trivial struct; the kernel's launch names the same struct.
template <class T>
__device__ __forceinline__ T& shared_memory() {
  return machine::shared_memory<T>();
}

// Enqueues kernel(arguments...) with a T& shared_memory<T>() for every block, T being `Shared`.
template <class Shared = NoShared, class... P>
int launch(void (*kernel)(P...), dim3 grid, int threads, cudaStream_t stream, typename Same<P>::type... arguments) {
  static_assert(sizeof(Shared) <= kMostShared, "more shared memory than sm_86, sm_89 and sm_120 have");
  void* pointers[] = {&arguments...};
  return machine::launch<Shared>(kernel, grid, static_cast<unsigned>(threads), stream, pointers);
}

// Calls f with a value of the tensors' element type; returns the result of f.
template <class F>
int with_element(Element element, const F& f) {
  switch (element) {
    case Element::kFloat32: return f(float{});
    case Element::kFloat16: return f(Half{});
    case Element::kBfloat16: return f(BFloat16{});
  }
  return 1;  // cudaErrorInvalidValue
}

// Valid keys of document b.
__device__ __forceinline__ int64_t length_of(const StridedSequence& s, int64_t b) {
  const int64_t length = s.lengths[b];
  return length < 0 ? 0 : length < s.tokens ? length : s.tokens;
}

// Row t of document b.
template <class T>
__host__ __device__ __forceinline__ const T* row(const StridedTensor& tensor, int64_t b, int64_t t) {
  return static_cast<const T*>(tensor.data) + b * tensor.batch_stride + t * tensor.token_stride;
}

// Whether every row of the tensor starts at a multiple of 16 bytes.
template <class T>
bool rows_aligned(const StridedTensor& tensor) {
  constexpr int64_t unit = 16 / sizeof(T);
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.batch_stride % unit == 0 &&
         tensor.token_stride % unit == 0;
}

// Whether query, key, value and output can all be read and written 16 bytes at a time.
template <class T>
bool all_aligned(const StridedSequence& s) {
  return rows_aligned<T>(s.query) && rows_aligned<T>(s.key) && rows_aligned<T>(s.value) &&
         rows_aligned<T>({s.output, s.tokens * s.channels, s.channels});
}

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <class T>
__host__ __device__ constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace aft::cuda
