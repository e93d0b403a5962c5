// The operators around the attention in a transformer encoder: one parameter struct and one function each.
//
// Input, residual and output are packed [rows, width], rows being batch x tokens, of type `element`; float16 is
// read and written as such and computed in float32, which all parameters are. As in kernels.h no runtime is
// involved, threads come from the caller, and the caller has checked shapes and values.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "matmul/packed_weight.h"

namespace aft {

// A norm over the channels of a row. Without a weight there is none; the bias may be null.
struct Norm {
  const float *weight, *bias;
  float epsilon;
  bool rms = false;  // divides by the root of the mean square, else by the standard deviation around the mean
};

enum class Activation { kGelu, kGeluTanh, kRelu, kSilu };

struct Linear {
  const PackedWeight* weight;
  const float* bias;  // here and below, null: none
  void* output;
};

// output = norm(input) weight + bias for every one of the linear layers, which agree in their weights' rows
// and method.
struct LayerNormLinear {
  Element element;
  int64_t rows;
  const void* input;
  Norm norm;
  const Linear* linears;
  int64_t count;
};

// output = input + hidden weight_out + bias_out, hidden = activation(norm(input) weight_in + bias_in), which is
// multiplied by norm(input) weight_up + bias_up where there is a weight_up. It has the columns of weight_in.
struct LayerNormFeedForward {
  Element element;
  int64_t rows;
  const void* input;
  Norm norm;
  const PackedWeight* weight_in;
  const float* bias_in;
  const PackedWeight* weight_out;
  const float* bias_out;
  void* output;
  Activation activation = Activation::kGelu;
  const PackedWeight* weight_up = nullptr;
  const float* bias_up = nullptr;
};

// output = residual + input weight + bias
struct LinearResidual {
  Element element;
  int64_t rows;
  const void* input;
  const PackedWeight* weight;
  const float* bias;
  const void* residual;
  void* output;
};

// output = input + the Fastformer layer of layer_norm(input); encoder/layer_norm_fastformer.cc has the formula. Rows
// are batch x tokens; key u of document b counts if u < lengths[b]. Weights are [width, width] or, of the logits,
// [width, heads].
struct LayerNormFastformer {
  Element element;
  int64_t batch, tokens, heads;
  const void* input;
  Norm norm;
  const float* query_weight;
  const PackedWeight* packed_query_weight;
  const float* query_bias;
  const float *key_weight, *key_bias;
  const float *alpha_weight, *beta_weight;
  const PackedWeight* weight;
  const float* bias;
  const int64_t* lengths;
  void* output;
};

void layer_norm_linear(const LayerNormLinear&, const Parallel&);
void layer_norm_feed_forward(const LayerNormFeedForward&, const Parallel&);
void linear_residual(const LinearResidual&, const Parallel&);
void layer_norm_fastformer(const LayerNormFastformer&, const Parallel&);

}  // namespace aft
