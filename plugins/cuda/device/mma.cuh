// Matrix products of a warp: c += a b with float32 sums.
//
// Fragments, with g = lane / 4 and t = lane % 4, of 16-bit a [16, 16], b [16, 8] and float32 c [16, 8]; two
// elements a word, the lower column of a and the lower row of b in the low half:
//   a[0] = a[g][2t, 2t+1]   a[1] = a[g+8][2t, 2t+1]   a[2] = a[g][2t+8, 2t+9]   a[3] = a[g+8][2t+8, 2t+9]
//   b[0] = b[2t, 2t+1][g]   b[1] = b[2t+8, 2t+9][g]
//   c[0], c[1] = c[g][2t, 2t+1]                       c[2], c[3] = c[g+8][2t, 2t+1]
// and of tf32 a [16, 8], b [8, 8], an element a word, c as above:
//   a[0] = a[g][t]   a[1] = a[g+8][t]   a[2] = a[g][t+4]   a[3] = a[g+8][t+4]
//   b[0] = b[t][g]   b[1] = b[t+4][g]
#pragma once

#include "device/load_store.cuh"

namespace aft::cuda {

// T is Half or BFloat16. All lanes of the warp call together, as with every function here.
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void multiply_add<Half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  machine::mma_half(c, a, b);
}
template <>
__device__ __forceinline__ void multiply_add<BFloat16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  machine::mma_bfloat(c, a, b);
}

// a and b by to_tf32.
__device__ __forceinline__ void multiply_add_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  machine::mma_tf32(c, a, b);
}
// Rounded to 11 significant bits.
__device__ __forceinline__ uint32_t to_tf32(float x) { return machine::to_tf32(x); }

// Reads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8i + j passes the address, a multiple of
// 16, of row j of matrix i; r[i] becomes elements [g][2t, 2t+1] of matrix i, transposed: [2t, 2t+1][g].
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) { machine::ldmatrix<false>(r, row); }
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  machine::ldmatrix<true>(r, row);
}

}  // namespace aft::cuda
