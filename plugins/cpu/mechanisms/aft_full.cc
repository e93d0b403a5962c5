// AFT-full (Zhai et al., arXiv 2105.14103, equation 2).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c] + w[t,u]) V[u,c] / (sum_u exp(K[u,c] + w[t,u]) + eps)
//           causal: u <= t
// Cost:     bound by multiply-adds: 4 T FLOPs per token and channel (2 T in causal form).
// Method:   exp(K + w) = exp(w - row maximum) exp(K - m) exp(row maximum + m), and the last factor cancels: two matrix
//           products with the same left side, computed together (matmul/matrix_product.h). The entries (exp(K - m) V,
//           exp(K - m)) are the right side, computed once, in blocks of keys; m is the largest key per channel, in
//           causal form the largest up to the block's end. Per task a block of rows takes the blocks of keys one after
//           the other. Row maxima are found on the way: a row's sums are rescaled when a block has a larger bias, a
//           channel's when a block has a larger key.
//           The weights exp(w - row maximum) of a constant w are kept in bfloat16 and in integers, relative to the
//           maximum of the whole row: half and a quarter of the memory traffic, and a quarter less time. In float32
//           they are not kept: 3 % of the time are too little for a second matrix of T x T.
// Numerics: where the maxima of w and K lie far apart the products underflow. Cells whose denominator is too small to
//           be trusted are summed again by the definition (sums/exact_fallback.h). In bfloat16 numerator and
//           denominator share the rounding of exp(w - row maximum) and of exp(K - m): it shifts weight between keys,
//           but a mean of equal values stays exact.
// See:      sums/bias_weights.h, matmul/matrix_product.h, matmul/product_bias_weights.h, sums/exact_fallback.h

#include <cmath>

#include "sums/bias_weights.h"
#include "sums/exact_fallback.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

constexpr int64_t kChannels = 256;  // taken together; a row block's sums stay in the second-level cache
constexpr int64_t kTiles = 96 / kTileRows;
constexpr int64_t kRowsAhead = 4;  // of the position bias: rows further apart compete for few lines of a cache

template <class T, class Product, Gate gate>
class FullChannels {
 public:
  FullChannels(const AftFull& p, const Output<T>& output, int64_t first_channel)
      : p_(p),
        output_(output),
        first_channel_(first_channel),
        channels_(min(kChannels, p.channels - first_channel)),
        panels_(ceil_div(channels_, kLanes)),
        rows_(kTileRows * max(1, min(kTiles, p.batch * p.tokens / (8 * kTileRows)))),
        row_blocks_(ceil_div(p.tokens, rows_)),
        key_blocks_(ceil_div(p.tokens, kKeys)),
        query_(static_cast<const T*>(p.query) + first_channel),
        key_(static_cast<const T*>(p.key) + first_channel),
        value_(static_cast<const T*>(p.value) + first_channel),
        bias_(static_cast<const T*>(p.position_bias)),
        complete_(complete_denominator(p.eps)),
        log_eps_(std::log(p.eps)),
        key_maxima_(p.batch * key_blocks_ * panels_ * kLanes),
        scales_(Product::kScaled ? p.batch * key_blocks_ * panels_ * kPanel : 0),
        entries_(p.batch * steps(p.tokens) * panels_ * kPanel) {}

  void run(const Parallel& parallel) {
    const auto for_key_blocks = [&](auto body) {
      parallel_for(parallel, p_.batch * key_blocks_,
                   [&](int64_t task) { body(task / key_blocks_, task % key_blocks_ * kKeys); });
    };
    for_key_blocks([&](int64_t b, int64_t u) { find_maximum(b, u); });
    for (int64_t b = 0; b < p_.batch; ++b) combine_maxima(b);
    for_key_blocks([&](int64_t b, int64_t u) {
      if constexpr (Product::kScaled)
        fill_scaled_entries(b, u);
      else
        fill_entries(b, u);
    });
    // Begin with the last rows, which take longest in causal form: a long task at the end would leave threads idle.
    parallel_for(parallel, p_.batch * row_blocks_,
                 [&](int64_t task) { block(task / row_blocks_, row_blocks_ - 1 - task % row_blocks_); });
  }

 private:
  using Weights = LeftRows<Product>;
  static constexpr int64_t kKeys = Weights::kChunk;

  static int64_t steps(int64_t keys) { return steps_of<Product>(keys); }

  // The key maxima, and below the scales, of the block of keys that begins at u.
  float* key_maximum(int64_t b, int64_t u) const {
    return key_maxima_.data() + (b * key_blocks_ + u / kKeys) * panels_ * kLanes;
  }
  float* scales(int64_t b, int64_t u) const {
    return scales_.data() + (b * key_blocks_ + u / kKeys) * panels_ * kPanel;
  }
  float* entries(int64_t b, int64_t u) const {
    return entries_.data() + (b * steps(p_.tokens) + steps(u)) * panels_ * kPanel;
  }
  int64_t block_keys(int64_t b, int64_t u) const { return max(0, min(kKeys, length_of(p_, b) - u)); }

  void find_maximum(int64_t b, int64_t u) const {
    const int64_t end = u + block_keys(b, u);
    for (int64_t c = 0; c < channels_; c += kLanes) {
      Vec m = splat(kNoKey);
      for (int64_t key = u; key < end; ++key)
        m = raised_by(m, load(key_ + (b * p_.tokens + key) * p_.channels + c, channels_ - c));
      store(key_maximum(b, u) + c, m);
    }
  }

  void combine_maxima(int64_t b) const {
    for (int64_t c = 0; c < channels_; c += kLanes) {
      Vec m = splat(kNoKey);
      for (int64_t u = 0; u < p_.tokens; u += kKeys) {
        m = raised_by(m, load(key_maximum(b, u) + c));
        store(key_maximum(b, u) + c, m);
      }
      if (!p_.causal)
        for (int64_t u = 0; u < p_.tokens; u += kKeys) store(key_maximum(b, u) + c, m);
    }
  }

  void fill_entries(int64_t b, int64_t u) const {
    const int64_t count = block_keys(b, u);
    const float* m = key_maximum(b, u);
    for (int64_t step = 0; step < steps(count); ++step)
      for (int64_t panel = 0; panel < panels_; ++panel) {
        Vec numerator[Product::kPerWord] = {}, denominator[Product::kPerWord] = {};
        const int64_t c = panel * kLanes;
        for (int64_t i = 0; i < min(Product::kPerWord, count - step * Product::kPerWord); ++i) {
          const int64_t at = (b * p_.tokens + u + step * Product::kPerWord + i) * p_.channels + c;
          denominator[i] = Product::rounded(exp(load(key_ + at, channels_ - c) - load(m + c)));
          numerator[i] = denominator[i] * load(value_ + at, channels_ - c);
        }
        float* words = entries(b, u) + panel * steps(count) * kPanel;
        store_words<Product>(words, step, 0, Product::pack_weights(numerator));
        store_words<Product>(words, step, 1, Product::pack_weights(denominator));
      }
  }

  // Entries as whole numbers; the scales of the block take them back. The weight of a key is the same number in
  // numerator and denominator.
  void fill_scaled_entries(int64_t b, int64_t u) const {
    const int64_t count = block_keys(b, u);
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const int64_t c = panel * kLanes;
      const auto at = [&](const T* x, int64_t i) AFT_LAMBDA_INLINE {
        return load(x + (b * p_.tokens + u + i) * p_.channels + c, channels_ - c);
      };
      Vec maximum = splat(kNoKey), largest{}, sum{};
      for (int64_t i = 0; i < count; ++i) maximum = raised_by(maximum, at(key_, i));
      const auto weight = [&](int64_t i) AFT_LAMBDA_INLINE {
        return Product::rounded_weight(exp(at(key_, i) - maximum) * Product::kLargestWeight, i);
      };
      const auto weighted = [&](int64_t i)
                                AFT_LAMBDA_INLINE { return weight(i) * (at(value_, i) / Product::kLargestWeight); };
      for (int64_t i = 0; i < count; ++i) {
        largest = raised_by(largest, absolute(weighted(i)));
        sum += weight(i) + weighted(i);
      }
      const Vec inverse = largest > Product::kLargestWeight * __FLT_MIN__ ? Product::kLargestWeight / largest : Vec{};
      for (int64_t step = 0; step < steps(count); ++step) {
        Vec numerator[Product::kPerWord] = {}, denominator[Product::kPerWord] = {};
        for (int64_t i = 0; i < min(Product::kPerWord, count - step * Product::kPerWord); ++i) {
          const int64_t key = step * Product::kPerWord + i;
          denominator[i] = weight(key);
          numerator[i] = Product::rounded_numerator(weighted(key) * inverse, key);
        }
        float* words = entries(b, u) + panel * steps(count) * kPanel;
        store_words<Product>(words, step, 0, Product::pack_weights(numerator));
        store_words<Product>(words, step, 1, Product::pack_weights(denominator));
      }
      // The scale carries a NaN, because whole numbers cannot hold one.
      const Vec scale = exp(maximum - load(key_maximum(b, u) + c)) / Product::kLargestWeight + (sum - sum);
      store(scales(b, u) + panel * kPanel, scale * largest);
      store(scales(b, u) + panel * kPanel + kLanes, scale);
    }
  }

  void block(int64_t b, int64_t i) const {
    const int64_t begin = i * rows_, length = length_of(p_, b);
    const int64_t end = min(begin + rows_, p_.tokens), counted = max(begin, min(end, length));
    const int64_t keys = p_.causal ? counted : length, rows = round_up(counted - begin, kTileRows);
    float* sums = task_memory(rows_ * (width() + Weights::floats_per_row(kKeys) + 1));
    const Weights weights(sums + rows_ * width(), rows_);
    float* row_maxima = weights.words(0, rows_);
    zero(sums, rows * width());
    for (int64_t r = 0; r < rows; ++r) row_maxima[r] = kNoKey;

    for (int64_t u = 0; u < keys; u += kKeys) {
      const int64_t count = min(kKeys, keys - u);
      // In causal form the rows before the first key have no part in the block.
      const int64_t first = p_.causal ? max(0, u - begin) / kTileRows * kTileRows : 0;
      if (u > 0) rescale_sums(key_maximum(b, u - kKeys), key_maximum(b, u), rows - first, sums + first * width());
      const float* left = weights.words(0, 0);
      if (p_.packed_bias)
        left = packed_weights<Product>(*p_.packed_bias).words(u / kKeys, begin);
      else if constexpr (!Product::kScaled)
        for (int64_t r = first; r < rows; ++r)
          compute_weights(begin + r, u, count, row_maxima[r], weights.words(0, r), sums + r * width());
      const auto panel_at = [&](int64_t panel) AFT_LAMBDA_INLINE {
        const float* words = entries(b, u) + panel * steps(block_keys(b, u)) * kPanel;
        return Panel<Product>{words, steps(count), panel * kPanel, scales(b, u), nullptr};
      };
      multiply_panels<Product>(left + first * Weights::kPitch, rows - first, panels_, panel_at,
                               [&](int64_t row, int64_t column, const Vec(&values)[kTileVectors]) AFT_LAMBDA_INLINE {
                                 float* sum = sums + (first + row) * width() + column;
                                 for (int v = 0; v < kTileVectors; ++v)
                                   store(sum + v * kLanes, load(sum + v * kLanes) + values[v]);
                               });
    }
    if (p_.packed_bias && p_.eps > 0.0f)
      for (int64_t t = begin; t < counted; ++t)
        row_maxima[t - begin] = row_maximum(bias_ + t * p_.position_bias_width, p_.packed_bias->rows, kNoKey);
    for (int64_t t = begin; t < counted; ++t) {
      // Sums are relative to the key maximum of the last block in the row's tile. Unless causal, all blocks have the same.
      const int64_t tile_end = begin + ((t - begin) / kTileRows + 1) * kTileRows;
      const float* key_maxima = key_maximum(b, min(keys, tile_end) - 1);
      write_row(b, t, sums + (t - begin) * width(), row_maxima[t - begin], key_maxima);
    }
    for (int64_t t = counted; t < end; ++t)
      for (int64_t c = 0; c < channels_; c += kLanes)
        output_.write(first_channel_ + (b * p_.tokens + t) * p_.channels + c, Vec{}, channels_ - c);
    output_.fence();
  }

  // The sums of a row: for each panel its numerators, then its denominators.
  int64_t width() const { return panels_ * kPanel; }

  void rescale_sums(const float* before, const float* after, int64_t rows, float* sums) const {
    for (int64_t c = 0; c < panels_ * kLanes; c += kLanes, sums += kPanel) {
      const Vec from = load(before + c), to = load(after + c);
      if (!any((IntVec)(from != to))) continue;
      const Vec factor = exp(from - to);
      for (int64_t r = 0; r < rows; ++r)
        for (int v = 0; v < kTileVectors; ++v) multiply_by(sums + r * width() + v * kLanes, factor);
    }
  }

  AFT_INLINE static void multiply_by(float* sum, Vec factor) { store(sum, load(sum) * factor); }

  // The weights of row t for keys [u, u + count), relative to the row's maximum so far.
  void compute_weights(int64_t t, int64_t u, int64_t count, float& maximum, float* words, float* sums) const {
    const int64_t row = min(t, p_.tokens - 1), seen = p_.causal ? max(0, min(count, row + 1 - u)) : count;
    const T *bias = bias_ + row * p_.position_bias_width + u, *ahead = bias + kRowsAhead * p_.position_bias_width;
    for (int64_t i = 0; i < count; i += kLineElements<T>) prefetch(ahead + i);
    const float raised = row_maximum(bias, seen, maximum);
    if (raised != maximum) {
      const Vec factor = exp(splat(maximum - raised));
      for (int64_t i = 0; i < width(); i += kLanes) multiply_by(sums + i, factor);
      maximum = raised;
    }
    encode_weights<Product>(bias, seen, count, raised, words);
  }

  // Writes gate times numerator / denominator. The sums are relative to the maxima.
  void write_row(int64_t b, int64_t t, const float* sums, float bias_maximum, const float* key_maxima) const {
    for (int64_t c = 0; c < channels_; c += kLanes, sums += kPanel) {
      const int64_t at = (b * p_.tokens + t) * p_.channels + c;
      Vec numerator = load(sums), denominator = load(sums + kLanes);
      if (__builtin_expect(any((IntVec)(denominator < complete_)), 0))
        complete(b, t, c, load(key_maxima + c) + bias_maximum, numerator, denominator);
      output_.write(first_channel_ + at, gated_ratio<gate>(load(query_ + at, channels_ - c), numerator, denominator),
                    channels_ - c);
    }
  }

  // Adds eps to the denominators. Sums too small to be trusted are computed again by the definition.
  void complete(int64_t b, int64_t t, int64_t c, Vec maximum, Vec& numerator, Vec& denominator) const {
    if (p_.eps > 0.0f) denominator += eps_beside(log_eps_ + log_of_one(), maximum);
    if (any((IntVec)(denominator < kTrustedDenominator))) sum_exactly(b, t, c, numerator, denominator);
  }

  // Returns the logarithm of the number that the sums hold for a weight of 1.
  static float log_of_one() {
    if constexpr (Product::kScaled) return std::log(Product::kLargestLeft);
    return 0.0f;
  }

  void sum_exactly(int64_t b, int64_t t, int64_t c, Vec& numerator, Vec& denominator) const {
    const int64_t length = length_of(p_, b), first = b * p_.tokens * p_.channels + c;
    const T* bias = bias_ + t * p_.position_bias_width;
    exact_sums(
        p_.causal ? min(t + 1, length) : length,
        [&](int64_t u) { return load(key_ + first + u * p_.channels, channels_ - c); },
        [&](int64_t u) { return splat(to_float(bias[u])); },
        [&](int64_t u) { return load(value_ + first + u * p_.channels, channels_ - c); }, log_eps_, numerator,
        denominator);
  }

  const AftFull& p_;
  const Output<T>& output_;
  const int64_t first_channel_, channels_, panels_, rows_, row_blocks_, key_blocks_;
  const T *query_, *key_, *value_, *bias_;
  const float complete_, log_eps_;
  Scratch key_maxima_, scales_, entries_;
};

struct PackedForThisCall {
  const PackedWeight* bias;
  ~PackedForThisCall() { delete bias; }
};

}  // namespace

PackedWeight* pack_position_bias(const AftFull& p) {
  if (p.causal) return nullptr;
  PackedWeight* packed = nullptr;
  for (int i = 0; i < p.methods.count && !packed; ++i) {
    if (p.methods.methods[i] == Method::kFloat32) return nullptr;
    with_element(p.element, [&](auto element) {
      with_weight_method(p.methods.methods[i],
                         [&](auto product) { packed = pack_bias<decltype(product), decltype(element)>(p); });
    });
  }
  return packed;
}

void aft_full(const AftFull& given, const Parallel& parallel) {
  AftFull p = given;
  // Find the range of the biases only for products in whole numbers: it decides whether these are exact enough.
  const bool packs = !p.constant_bias && p.methods.count > 0 && is_scaled(p.methods.methods[0]);
  const PackedForThisCall packed{packs ? AFT_ISA::pack_position_bias(p) : nullptr};
  if (packs) p.packed_bias = packed.bias;
  with_element(p.element, [&](auto element) {
    with_gate(p.gate, [&](auto gate) {
      const auto run = [&](auto product) {
        using T = decltype(element);
        using Product = decltype(product);
        const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
        for (int64_t c = 0; c < p.channels; c += kChannels)
          FullChannels<T, Product, gate.value>(p, output, c).run(parallel);
      };
      with_weight_method(p.packed_bias ? p.packed_bias->method : float_method(p.methods), run);
    });
  });
}

}  // namespace aft::AFT_ISA
