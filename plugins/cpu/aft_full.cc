// AFT-full (Zhai et al., arXiv 2105.14103, equation 2):
//
//   Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c] + w[t,u]) V[u,c] / sum_u exp(K[u,c] + w[t,u])      causal: u <= t
//
// Bound by multiply-adds: 4 T FLOPs per token and channel (2 T in causal form).
//
// exp(K + w) = exp(w - row maximum) exp(K - m) exp(row maximum + m), and the last factor cancels: two matrix
// products with the same left side, taken together. Per task a block of rows; for each block of keys the
// entries (exp(K - m) V, exp(K - m)) are computed once into the second-level cache, then tile by tile of rows
// the weights into the first, and every vector of channels is multiplied. Row maxima are found on the way:
// a row's sums are rescaled when a key block raises its maximum. m is the largest key per channel, in causal
// form up to the block's last row. Where the maxima of w and K lie far apart the products underflow; cells
// whose denominator comes out too small to be trusted are summed again as they are defined.

#include "exact_row.h"
#include "running_sum.h"
#include "tasks.h"
#include "weight_tile.h"

namespace aft::AFT_ISA {
namespace {

constexpr int64_t kChannels = 256;  // taken together; with the keys' entries they fill the second-level cache
constexpr int64_t kKeys = 256;
constexpr int64_t kTiles = 192 / kWeightRows;

template <class T, Gate gate>
class FullChannels {
 public:
  FullChannels(const AftFull& p, const Output<T>& output, int64_t first_channel)
      : p_(p),
        output_(output),
        first_channel_(first_channel),
        channels_(min(kChannels, p.channels - first_channel)),
        panels_(ceil_div(channels_, kLanes)),
        rows_(kWeightRows * max(1, min(kTiles, p.batch * p.tokens / (8 * kWeightRows)))),
        blocks_(ceil_div(p.tokens, rows_)),
        query_(static_cast<const T*>(p.query) + first_channel),
        key_(static_cast<const T*>(p.key) + first_channel),
        value_(static_cast<const T*>(p.value) + first_channel),
        bias_(static_cast<const T*>(p.position_bias)),
        references_(p.batch * blocks_ * panels_ * kLanes) {}

  void run(const Parallel& parallel) {
    parallel_for(parallel, p_.batch * blocks_, [&](int64_t task) { find_maximum(task / blocks_, task % blocks_); });
    for (int64_t b = 0; b < p_.batch; ++b) combine_maxima(b);
    // The last rows first: in causal form they take longest.
    parallel_for(parallel, p_.batch * blocks_,
                 [&](int64_t task) { block(task / blocks_, blocks_ - 1 - task % blocks_); });
  }

 private:
  static constexpr int64_t kResult = 2 * kWeightRows * kLanes;  // numerators and denominators of a tile's panel

  float* reference(int64_t b, int64_t i) const { return references_.data() + (b * blocks_ + i) * panels_ * kLanes; }

  void find_maximum(int64_t b, int64_t i) const {
    const int64_t end = min((i + 1) * rows_, length_of(p_, b));
    for (int64_t c = 0; c < channels_; c += kLanes) {
      Vec m = splat(kNoKey);
      for (int64_t u = i * rows_; u < end; ++u)
        m = maximum_of(m, load(key_ + (b * p_.tokens + u) * p_.channels + c, channels_ - c));
      store(reference(b, i) + c, m);
    }
  }

  void combine_maxima(int64_t b) const {
    for (int64_t c = 0; c < channels_; c += kLanes) {
      for (int64_t i = 1; i < blocks_; ++i)
        store(reference(b, i) + c, maximum_of(load(reference(b, i) + c), load(reference(b, i - 1) + c)));
      if (!p_.causal)
        for (int64_t i = 0; i + 1 < blocks_; ++i) store(reference(b, i) + c, load(reference(b, blocks_ - 1) + c));
    }
  }

  void block(int64_t b, int64_t i) const {
    const int64_t begin = i * rows_, length = length_of(p_, b);
    const int64_t end = min(begin + rows_, p_.tokens), counted = max(begin, min(end, length));
    const int64_t keys = p_.causal ? counted : length;
    const int64_t tiles = ceil_div(counted - begin, kWeightRows), tile_floats = panels_ * kResult;
    float* entries =
        task_memory(panels_ * kKeys * 2 * kLanes + tiles * tile_floats + kWeightRows * kWeightPitch + rows_);
    float* results = entries + panels_ * kKeys * 2 * kLanes;
    float* weights = results + tiles * tile_floats;
    float* highest = weights + kWeightRows * kWeightPitch;  // per row
    __builtin_memset(results, 0, tiles * tile_floats * sizeof(float));
    for (int64_t r = 0; r < rows_; ++r) highest[r] = kNoKey;

    for (int64_t u = 0; u < keys; u += kKeys) {
      const int64_t count = min(kKeys, keys - u);
      fill_entries(b, u, count, reference(b, i), entries);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t t = begin + tile * kWeightRows;
        const int64_t reached = p_.causal ? min(count, t + kWeightRows - u) : count;
        if (reached <= 0) continue;
        weigh(t, u, reached, highest + tile * kWeightRows, weights, results + tile * tile_floats);
        for (int64_t panel = 0; panel < panels_; ++panel)
          multiply_weights(weights, entries + panel * kKeys * 2 * kLanes, reached,
                           results + tile * tile_floats + panel * kResult);
      }
    }
    for (int64_t t = begin; t < counted; ++t) {
      const int64_t tile = (t - begin) / kWeightRows, row = (t - begin) % kWeightRows;
      finish(b, t, results + tile * tile_floats + row * 2 * kLanes);
    }
    for (int64_t t = counted; t < end; ++t)
      for (int64_t c = 0; c < channels_; c += kLanes)
        output_.write(first_channel_ + (b * p_.tokens + t) * p_.channels + c, Vec{}, channels_ - c);
    output_.finish();
  }

  void fill_entries(int64_t b, int64_t first, int64_t count, const float* reference, float* entries) const {
    for (int64_t u = 0; u < count; ++u)
      for (int64_t panel = 0, c = 0; panel < panels_; ++panel, c += kLanes) {
        const int64_t at = (b * p_.tokens + first + u) * p_.channels + c;
        const Vec weight = exp(load(key_ + at, channels_ - c) - load(reference + c));
        float* entry = entries + (panel * kKeys + u) * 2 * kLanes;
        store(entry, weight * load(value_ + at, channels_ - c));
        store(entry + kLanes, weight);
      }
  }

  // The weights of rows t .. for keys [u, u + count), relative to the rows' maxima so far.
  void weigh(int64_t t, int64_t u, int64_t count, float* highest, float* weights, float* results) const {
    for (int64_t r = 0; r < kWeightRows; ++r, weights += kWeightPitch) {
      const int64_t row = min(t + r, p_.tokens - 1), seen = p_.causal ? max(0, min(count, row + 1 - u)) : count;
      const T* bias = bias_ + row * p_.position_bias_width + u;
      const float raised = row_maximum(bias, seen, highest[r]);
      if (raised != highest[r]) {
        rescale_row(results + r * 2 * kLanes, exp(splat(highest[r] - raised)));
        highest[r] = raised;
      }
      for (int64_t k = 0; k < seen; k += kLanes) store(weights + k, exp(load(bias + k, seen - k) - raised), seen - k);
      for (int64_t k = seen; k < count; ++k) weights[k] = 0.0f;
    }
  }

  static float row_maximum(const T* bias, int64_t count, float highest) {
    Vec m = splat(highest);
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) m = maximum_of(m, load(bias + k));
    highest = max_lanes(m);
    for (; k < count; ++k) highest = to_float(bias[k]) > highest ? to_float(bias[k]) : highest;
    return highest;
  }

  void rescale_row(float* row, Vec factor) const {
    for (int64_t panel = 0; panel < panels_; ++panel, row += kResult)
      for (int v = 0; v < 2; ++v) store(row + v * kLanes, load(row + v * kLanes) * factor);
  }

  void finish(int64_t b, int64_t t, const float* row) const {
    for (int64_t c = 0; c < channels_; c += kLanes, row += kResult) {
      const int64_t at = (b * p_.tokens + t) * p_.channels + c;
      Vec numerator = load(row), denominator = load(row + kLanes);
      if (__builtin_expect(any((IntVec)(denominator < kTrustedDenominator)), 0))
        sum_exactly(b, t, c, numerator, denominator);
      output_.write(first_channel_ + at, gated_ratio<gate>(load(query_ + at, channels_ - c), numerator, denominator),
                    channels_ - c);
    }
  }

  void sum_exactly(int64_t b, int64_t t, int64_t c, Vec& numerator, Vec& denominator) const {
    const int64_t length = length_of(p_, b), first = b * p_.tokens * p_.channels + c;
    const T* bias = bias_ + t * p_.position_bias_width;
    exact_sums(
        p_.causal ? min(t + 1, length) : length,
        [&](int64_t u) { return load(key_ + first + u * p_.channels, channels_ - c) + to_float(bias[u]); },
        [&](int64_t u) { return load(value_ + first + u * p_.channels, channels_ - c); }, numerator, denominator);
  }

  const AftFull& p_;
  const Output<T>& output_;
  const int64_t first_channel_, channels_, panels_, rows_, blocks_;
  const T *query_, *key_, *value_, *bias_;
  Scratch references_;
};

}  // namespace

void aft_full(const AftFull& p, const Parallel& parallel) {
  with_element(p.element, [&](auto element) {
    with_gate(p.gate, [&](auto gate) {
      using T = decltype(element);
      const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
      for (int64_t c = 0; c < p.channels; c += kChannels) FullChannels<T, gate.value>(p, output, c).run(parallel);
    });
  });
}

}  // namespace aft::AFT_ISA
