// The fused CPU kernels: one parameter struct and one function per mechanism. The CUDA kernels (cuda/kernels.h) take
// the same structs. So there are a few settings that the CPU kernels do not support.
//
// No runtime is involved: tensors are plain pointers, threads come from the caller. The caller has
// checked shapes and values; the kernels assume them. Sequence tensors are packed [batch, tokens,
// channels]; float16 is read and written as such and computed in float32. Key u of document b
// counts if u < lengths[b], and in causal form only for rows t >= u. Padded rows get finite numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "method.h"

namespace aft {

// Runs body(context, task) for every task in [0, tasks), in any order, on any threads, and returns
// when all are done. `threads` says how many may run at once; it steers how the work is cut.
struct Parallel {
  void (*run)(void* pool, size_t tasks, void (*body)(void* context, size_t task), void* context);
  void* pool;
  int threads;
};

// The CPU kernels do not support bfloat16.
enum class Element { kFloat32, kFloat16, kBfloat16 };
enum class Gate { kSigmoid, kTanh, kNone, kRelu };
enum class Normalization { kSoftmax, kScaling };
enum class FeatureMap { kElu, kRelu, kIdentity };
enum class Normalizer { kAdd, kClamp, kNone };
enum class Direction { kForward, kReverse, kBidirectional };

// The parameters of every mechanism. Element is the type of every tensor but lengths.
struct Sequence {
  Element element;
  bool causal;
  int64_t batch, tokens, channels;
  const void *query, *key, *value;
  const int64_t* lengths;  // [batch]
  void* output;
};

struct AftSimple : Sequence {
  Gate gate;
  int64_t key_channels;  // divides the channels; 0: as many
  float eps;             // added to sum exp(key)
};

struct PackedWeight;

struct AftFull : Sequence {
  Gate gate;
  float eps;                    // added to sum exp(key + bias)
  Precision precision;          // of the products
  MethodOrder methods;          // of the CPU's products: the first that the range of the biases allows
  const void* position_bias;    // row t, column u
  int64_t position_bias_width;  // elements from one row to the next, >= tokens
  bool constant_bias;           // packed_bias is the result of pack_position_bias, null or not
  const PackedWeight* packed_bias;
};

struct AftLocal : Sequence {
  Gate gate;
  float eps;          // as in AftFull
  const void* band;   // band[t, j] is the bias of key t + j - (window - 1)
  int64_t band_rows;  // 1 (the same row for every t) or >= tokens
  int64_t window;     // s; a row has 2s-1 entries, s in causal form
};

struct AftConv : Sequence {  // key is [batch, tokens, heads]
  Gate gate;
  float eps;           // as in AftFull
  const void* filter;  // [heads, taps]
  int64_t heads, taps;
};

// Heads of which several may share a key and a value: key is [batch, key_tokens, kv_heads * d], value
// [batch, key_tokens, kv_heads * e], query [batch, tokens, heads * d] and output [batch, tokens, heads * e].
struct GroupedHeads : Sequence {
  int64_t heads;
  int64_t kv_heads;            // divides heads; 0: heads
  int64_t value_width;         // e; 0: d
  int64_t key_tokens;          // where there are key_lengths, never in causal form; else as many as tokens
  const int64_t* key_lengths;  // [batch], of the keys that count; null: lengths
};

struct EfficientAttention : GroupedHeads {
  Normalization normalization;
  float scale;
};

struct LinearAttention : GroupedHeads {
  FeatureMap feature_map;
  Normalizer normalizer;
  float eps;
};

struct SoftmaxAttention : GroupedHeads {  // never `causal`: window_right is 0 instead
  float scale;                            // of the products; 0: 1 / sqrt(d)
  float softcap;                          // c of c tanh(x / c); 0: none
  int64_t window_left, window_right;      // keys that a query sees on each side, at most 2^40; -1: all
  const void* sink;                       // [heads], null: none
  const void* bias;                       // [heads, 2 bias_reach + 1], by the distance of the key; null: none
  int64_t bias_reach;
  const void *cos_cache, *sin_cache;  // [positions, rotary_pairs], for the first channels of each head; null: none
  int64_t positions;                  // at least key_tokens; others than these count as the nearest
  int64_t rotary_pairs;
  bool interleaved;     // pairs of channels 2c and 2c + 1, else c and c + rotary_pairs
  int64_t query_start;  // position of the first query, within +-2^40; key u has position u
  float* log_sum;       // [batch, tokens, heads], null: not needed
};

struct Fastformer : Sequence {
  const void *alpha_weight, *beta_weight;  // [channels, heads]
  int64_t heads;
};

// A state of [key_width, value_width] per state head, kept by a recurrence over the tokens. Query head i reads state
// i / (query_heads / state_heads).
struct RecurrentLinearAttention {
  Element element;
  Direction direction;
  bool normalized;     // divides by query z + eps, z being one column more of the state
  bool channel_decay;  // decay is [batch, tokens, state_heads * key_width], else [batch, tokens, state_heads]
  bool head_beta;      // beta is [batch, tokens, state_heads], else [batch, tokens, 1]
  int64_t batch, tokens, query_heads, state_heads, key_width, value_width;
  float scale, eps;
  const void *query, *key, *value;
  const void* past_state;    // [batch, states, key_width, state_columns], null: zeros
  const void *decay, *beta;  // null where the rule has none
  const int64_t* lengths;    // [batch]
  void* output;
  void* present_state;  // as past_state; null: not needed

  int64_t states() const { return direction == Direction::kBidirectional ? 2 * state_heads : state_heads; }
  int64_t state_columns() const { return value_width + (normalized ? 1 : 0); }
};

struct CausalDepthwiseConv {
  Element element;
  bool silu;
  int64_t batch, tokens, channels, taps;
  const void *input, *weight, *bias, *past_state;  // weight [channels, taps]; bias and past_state may be null
  const int64_t* lengths;                          // [batch]
  void *output, *present_state;                    // [batch, taps - 1, channels]; null: not needed
  const float* widened_weight;                     // the result of widen_conv_weight; null: taken from weight

  static constexpr int64_t kRowUnit = 32;
  // Floats of widened_weight from one tap to the next: whole vectors of every instruction set.
  int64_t weight_row() const { return (channels + kRowUnit - 1) / kRowUnit * kRowUnit; }
};

void aft_simple(const AftSimple&, const Parallel&);
void aft_full(const AftFull&, const Parallel&);
void aft_local(const AftLocal&, const Parallel&);
void aft_conv(const AftConv&, const Parallel&);
void efficient_attention(const EfficientAttention&, const Parallel&);
void linear_attention(const LinearAttention&, const Parallel&);
void softmax_attention(const SoftmaxAttention&, const Parallel&);
void fastformer(const Fastformer&, const Parallel&);
void recurrent_linear_attention(const RecurrentLinearAttention&, const Parallel&);
void causal_depthwise_conv(const CausalDepthwiseConv&, const Parallel&);

// Packs the weights exp(position_bias) for aft_full, by the first of the methods that allows the range of the biases of
// each row. It reads the element, causal, tokens, methods and position_bias [tokens, tokens] of p. The result is null
// where there is nothing to pack:
// - in float32;
// - in causal form, whose products are never in integers: a block of keys has one scale for its entries, and a row may
//   see only the smallest of them.
std::shared_ptr<const PackedWeight> pack_position_bias(const AftFull& p);

// Converts the weight of p for causal_depthwise_conv to float32 rows [taps, weight_row] of all channels, in which
// floats past the channels are 0. It reads the element, channels, taps and weight.
void widen_conv_weight(const CausalDepthwiseConv& p, float* rows);

// Converts `count` numbers of float16.
void half_to_float(const void* halves, int64_t count, float* floats);

// The instruction set chosen for this machine: "avx512", "avx2" or "baseline".
// The environment variable AFTEXPORT_ISA asks for a lower one; throws where it has a name that is not known.
const char* instruction_set();

}  // namespace aft
