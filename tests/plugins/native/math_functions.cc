#include "math_functions.h"

#include "encoder/activation.h"
#include "simd/load_store.h"
#include "simd/math.h"

namespace aft::AFT_ISA {
namespace {

template <class F>
AFT_INLINE void for_vectors(const float* x, int64_t count, float* y, const F& f) {
  for (int64_t i = 0; i < count; i += kLanes) store(y + i, f(load(x + i, count - i)), count - i);
}

void exp_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE { return exp(v); });
}
void sigmoid_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE {
    return gated_ratio<Gate::kSigmoid>(v, splat(1.0f), splat(1.0f));
  });
}
void tanh_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE { return tanh(v); });
}
void gelu_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE { return gelu(v); });
}
void coarse_gelu_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE { return coarse_gelu(v); });
}
void gelu_tanh_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE { return activate<false>(Activation::kGeluTanh, v); });
}
void relu_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE { return activate<false>(Activation::kRelu, v); });
}
void silu_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE { return activate<false>(Activation::kSilu, v); });
}
void half_of(const float* x, int64_t count, float* y) {
  for_vectors(x, count, y, [](Vec v) AFT_LAMBDA_INLINE {
    Half halves[kLanes];
    store(halves, v);
    return load(halves);
  });
}

}  // namespace

const MathFunctions math_functions{exp_of,       sigmoid_of, tanh_of, gelu_of, coarse_gelu_of,
                                   gelu_tanh_of, relu_of,    silu_of, half_of};

}  // namespace aft::AFT_ISA
