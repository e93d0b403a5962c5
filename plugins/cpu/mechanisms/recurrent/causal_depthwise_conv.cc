// The short convolution of Mamba, DeltaNet and Gated DeltaNet: every channel by itself, over the last tokens.
//
// Computes: Y_t = act(bias + sum_j weight_j x_{t - K + 1 + j}), act(y) = y or y / (1 + exp(-y)); x before token 0 is
//           the past state, or 0
// Cost:     bound by memory: 8 bytes per token and channel against 2 K FLOPs and an exponential.
// Method:   a task takes a stretch of tokens and a block of channels whose rows stay in the first-level cache. A tile
//           of tokens shares each tap's weights.
// Numerics: sums of K terms, in float32.
// See:      recurrent_linear_attention.cc, whose layers have it in front

#include "simd/load_store.h"
#include "simd/math.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

constexpr int64_t kStretch = 256;        // tokens of a task
constexpr int64_t kBlockChannels = 256;  // of a task
constexpr int kTileTokens = 4;
constexpr int kTileVecs = 2;
static_assert(CausalDepthwiseConv::kRowUnit % (kTileVecs * kLanes) == 0);

// Bias and weight as float32, in rows of all channels and whole vectors.
struct Weights {
  const float *bias, *taps;  // [row] and [taps, row]
  int64_t row;
};

template <class T>
void widen_bias(const CausalDepthwiseConv& p, float* row) {
  const T* bias = static_cast<const T*>(p.bias);
  zero(row, p.weight_row());
  for (int64_t c = 0; bias && c < p.channels; c += kLanes) store(row + c, load(bias + c, p.channels - c));
}

template <class T>
struct Document {
  const T *input, *past, *zeros;  // zeros: a row of them, in place of a past
  int64_t channels, taps;

  // Returns the row of token t, which may lie before the first token.
  AFT_INLINE const T* row(int64_t t) const {
    if (__builtin_expect(t >= 0, 1)) return input + t * channels;
    return past ? past + (t + taps - 1) * channels : zeros;
  }
};

template <bool silu>
AFT_INLINE Vec activate(Vec y) {
  return silu ? y / (1.0f + exp(at_most(splat(kExpHigh), -y))) : y;
}

template <bool silu, int tokens, int vecs, class T>
AFT_INLINE void convolve(const Document<T>& document, const Weights& weights, int64_t t, int64_t c,
                         const Output<T>& output, int64_t at) {
  const int64_t left = document.channels - c;
  Vec sum[tokens][vecs];
  for (int i = 0; i < tokens; ++i)
    for (int v = 0; v < vecs; ++v) sum[i][v] = load(weights.bias + c + v * kLanes);
  for (int64_t j = 0; j < document.taps; ++j)
    for (int v = 0; v < vecs; ++v) {
      const Vec weight = load(weights.taps + j * weights.row + c + v * kLanes);
      for (int i = 0; i < tokens; ++i)
        sum[i][v] += weight * load(document.row(t + i - document.taps + 1 + j) + c + v * kLanes, left - v * kLanes);
    }
  for (int i = 0; i < tokens; ++i) {
    for (int v = 0; v < vecs; ++v) {
      prefetch(document.row(t + i + kPrefetchRows) + c + v * kLanes);
      sum[i][v] = activate<silu>(sum[i][v]);
    }
    output.write(at + i * document.channels, sum[i], left);
  }
}

// A tile of tokens by the channels from `first` to `last`. No vector lies wholly past the last channel: it would be
// written to the next row, as whole lines that go past the cache are.
template <bool silu, int tokens, class T>
AFT_INLINE void convolve_tokens(const Document<T>& document, const Weights& weights, int64_t t, int64_t first,
                                int64_t last, const Output<T>& output, int64_t row_at) {
  int64_t c = first;
  for (; c + (kTileVecs - 1) * kLanes < last; c += kTileVecs * kLanes)
    convolve<silu, tokens, kTileVecs>(document, weights, t, c, output, row_at + c);
  for (; c < last; c += kLanes) convolve<silu, tokens, 1>(document, weights, t, c, output, row_at + c);
}

template <bool silu, class T>
void convolve_block(const Document<T>& document, const Weights& weights, int64_t begin, int64_t end, int64_t first,
                    int64_t last, const Output<T>& output, int64_t document_at) {
  int64_t t = begin;
  for (; t + kTileTokens <= end; t += kTileTokens)
    convolve_tokens<silu, kTileTokens>(document, weights, t, first, last, output, document_at + t * document.channels);
  for (; t < end; ++t)
    convolve_tokens<silu, 1>(document, weights, t, first, last, output, document_at + t * document.channels);
}

// Stores the last inputs of a document, or of its past where the document is shorter than the taps.
template <class T>
void store_state(const CausalDepthwiseConv& p, const Document<T>& document, int64_t length, int64_t b) {
  T* to = static_cast<T*>(p.present_state) + b * (p.taps - 1) * p.channels;
  for (int64_t t = length - p.taps + 1; t < length; ++t, to += p.channels) {
    const T* from = document.row(t);
    for (int64_t c = 0; c < p.channels; c += kLanes) store(to + c, load(from + c, p.channels - c), p.channels - c);
  }
}

template <class T>
void run(const CausalDepthwiseConv& p, const Parallel& parallel) {
  const int64_t row = p.weight_row();
  const Scratch bias(row), taps(p.widened_weight ? 0 : p.taps * row), zeros(p.channels);
  widen_bias<T>(p, bias.data());
  if (!p.widened_weight) widen_conv_weight(p, taps.data());
  const Weights weights{bias.data(), p.widened_weight ? p.widened_weight : taps.data(), row};
  zero(zeros.data(), p.channels);
  const int64_t stretches = max(1, ceil_div(p.tokens, kStretch)), blocks = ceil_div(p.channels, kBlockChannels);
  const int64_t elements = p.batch * p.tokens * p.channels;
  const Output<T> output(p.output, elements, p.channels);
  parallel_for(parallel, p.batch * stretches * blocks, elements, [&](int64_t task) {
    const int64_t b = task / (stretches * blocks), begin = task / blocks % stretches * kStretch;
    const int64_t first = task % blocks * kBlockChannels, last = min(first + kBlockChannels, p.channels);
    const int64_t length = length_of(p, b), at = b * p.tokens * p.channels;
    const T* past = static_cast<const T*>(p.past_state);
    const Document<T> document{static_cast<const T*>(p.input) + at,
                               past ? past + b * (p.taps - 1) * p.channels : nullptr,
                               reinterpret_cast<const T*>(zeros.data()), p.channels, p.taps};
    const int64_t end = min(begin + kStretch, length);
    if (p.silu)
      convolve_block<true>(document, weights, begin, end, first, last, output, at);
    else
      convolve_block<false>(document, weights, begin, end, first, last, output, at);
    for (int64_t t = max(begin, length); t < min(begin + kStretch, p.tokens); ++t)
      for (int64_t c = first; c < last; c += kLanes) output.write(at + t * p.channels + c, Vec{}, last - c);
    if (begin == 0 && first == 0 && p.present_state) store_state(p, document, length, b);
    output.fence();
  });
}

}  // namespace

void causal_depthwise_conv(const CausalDepthwiseConv& p, const Parallel& parallel) {
  with_element(p.element, [&](auto element) { run<decltype(element)>(p, parallel); });
}

}  // namespace aft::AFT_ISA
