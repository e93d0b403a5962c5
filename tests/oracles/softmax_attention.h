// Softmax attention by its formula in double precision, with bounds of the errors that come of rounded logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "mechanisms.h"

namespace oracle {

// The settings of softmax attention; -1 as a window: all keys. sink [heads] and bias [heads, 2 bias_reach + 1] or null.
struct SoftmaxAttention {
  double scale, softcap;
  int64_t window_left, window_right;
  const double *sink, *bias;
  int64_t bias_reach;
  const double *cos, *sin;  // [positions, pairs]
  int64_t positions, pairs;
  bool interleaved;
  int64_t query_start;
  double unit;  // the error of a computed logit, relative to the sum of the sizes of its terms
};

// A row of a head whose first channels are rotated, and the sum of the sizes of the terms of each channel.
struct Rotated {
  Values channels, sizes;
};

// Su et al., RoFormer, arXiv 2104.09864, eq. 34.
inline Rotated rotated(const double* row, int64_t width, int64_t position, const SoftmaxAttention& a) {
  Rotated turned{Values(row, row + width), Values(row, row + width)};
  for (double& size : turned.sizes) size = std::abs(size);
  const int64_t at = std::clamp<int64_t>(position, 0, a.positions - 1) * a.pairs;
  for (int64_t i = 0; i < a.pairs; ++i) {
    const int64_t first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.pairs;
    const double x = row[first], y = row[second], cos = a.cos[at + i], sin = a.sin[at + i];
    turned.channels[first] = x * cos - y * sin;
    turned.channels[second] = y * cos + x * sin;
    turned.sizes[first] = std::abs(x * cos) + std::abs(y * sin);
    turned.sizes[second] = std::abs(y * cos) + std::abs(x * sin);
  }
  return turned;
}

// The logits of the keys that a row sees, which begin with key `begin`, and bounds of their errors.
struct Logits {
  int64_t begin;
  Values values, errors;
};

inline Logits logits_of(const Document& d, const Heads& heads, const SoftmaxAttention& a, int64_t row, int64_t h) {
  const int64_t t = row + a.query_start;
  Logits result{a.window_left < 0 ? 0 : std::max<int64_t>(0, t - a.window_left), {}, {}};
  const int64_t end = a.window_right < 0 ? heads.keys : std::min(heads.keys, t + a.window_right + 1);
  const double scale = a.scale > 0 ? a.scale : 1 / std::sqrt(static_cast<double>(heads.width));
  const auto capped = [&](double x) { return a.softcap > 0 ? a.softcap * std::tanh(x / a.softcap) : x; };
  const Rotated query = rotated(d.query + row * d.channels + h * heads.width, heads.width, t, a);
  for (int64_t u = result.begin; u < end; ++u) {
    const double* from = d.key + u * heads.key_channels() + heads.group(h) * heads.width;
    const Rotated key = rotated(from, heads.width, u, a);
    double product = 0, size = 0;
    for (int64_t c = 0; c < heads.width; ++c) {
      product += scale * query.channels[c] * key.channels[c];
      size += scale * query.sizes[c] * key.sizes[c];
    }
    double logit = capped(product), error = a.unit * size;
    // A cap is monotone, so it maps bounds to bounds. Those of a saturated one are close together.
    if (a.softcap > 0)
      error = std::max(capped(product + error) - logit, logit - capped(product - error)) + a.unit * std::abs(logit);
    const int64_t distance = std::clamp(u - t, -a.bias_reach, a.bias_reach);
    const double bias = a.bias ? a.bias[h * (2 * a.bias_reach + 1) + distance + a.bias_reach] : 0;
    result.values.push_back(logit + bias);
    result.errors.push_back(error + a.unit * std::abs(bias));
  }
  return result;
}

// log sum_v exp(x[v]) over all v but u, for each u, and over all.
struct LogSums {
  Values without;
  double all;
};

inline LogSums log_sums_of(const Values& x) {
  const size_t top = std::max_element(x.begin(), x.end()) - x.begin();
  double second = -INFINITY, sum = 0;
  for (size_t u = 0; u < x.size(); ++u)
    if (u != top) second = std::max(second, x[u]);
  for (size_t u = 0; u < x.size(); ++u)
    if (u != top && second > -INFINITY) sum += std::exp(x[u] - second);
  // Without the largest, the others need a sum of their own: a difference of sums has none of its digits.
  LogSums result{Values(x.size()), 0};
  const double rest = second + std::log(sum), share = std::exp(rest - x[top]);
  for (size_t u = 0; u < x.size(); ++u)
    result.without[u] = u == top ? rest : x[top] + std::log1p(std::max(0.0, share - std::exp(x[u] - x[top])));
  result.all = x[top] + std::log1p(share);
  return result;
}

// Rows that are not computed, and those without a key, are 0, and their log_sum is -inf.
struct SoftmaxAttentionResult {
  Values output;         // [tokens, output channels]
  Values log_sum;        // [tokens, heads], the logarithms of the divisors
  Values weight_error;   // [tokens, heads], a bound of the sum of the errors of a row's weights
  Values log_sum_error;  // [tokens, heads]
};

// Vaswani et al., Attention Is All You Need, arXiv 1706.03762, eq. 1, of some rows over the keys in a window.
inline SoftmaxAttentionResult softmax_attention(const Document& d, const Heads& heads, const SoftmaxAttention& a,
                                                const std::vector<int64_t>& rows) {
  SoftmaxAttentionResult result{Values(d.tokens * heads.output_channels()), Values(d.tokens * heads.heads, -INFINITY),
                                Values(d.tokens * heads.heads), Values(d.tokens * heads.heads)};
  for (const int64_t row : rows)
    for (int64_t h = 0; h < heads.heads && row < d.length; ++h) {
      Logits logits = logits_of(d, heads, a, row, h);
      const size_t keys = logits.values.size();
      if (a.sink) {  // a last key with the value 0
        logits.values.push_back(a.sink[h]);
        logits.errors.push_back(a.unit * std::abs(a.sink[h]));
      }
      if (logits.values.empty()) continue;
      Values low = logits.values, high = logits.values;
      for (size_t u = 0; u < low.size(); ++u) {
        low[u] -= logits.errors[u];
        high[u] += logits.errors[u];
      }
      const LogSums sums = log_sums_of(logits.values), lowest = log_sums_of(low), highest = log_sums_of(high);
      const int64_t at = row * heads.heads + h;
      result.log_sum[at] = sums.all;
      result.log_sum_error[at] = std::max(highest.all - sums.all, sums.all - lowest.all);
      if (keys == 0) continue;
      Values weights(keys);
      for (size_t u = 0; u < keys; ++u) {
        weights[u] = std::exp(logits.values[u] - sums.all);
        // A weight is largest where its logit is at its upper bound, and all others at their lower ones.
        const double most = 1 / (1 + std::exp(lowest.without[u] - high[u]));
        const double least = 1 / (1 + std::exp(highest.without[u] - low[u]));
        result.weight_error[at] += std::max(most - weights[u], weights[u] - least);
      }
      const double* value = d.value + logits.begin * heads.value_channels() + heads.group(h) * heads.value_width;
      const Values mixed = weighted_sum(weights, value, heads.value_channels(), heads.value_width);
      std::copy(mixed.begin(), mixed.end(), result.output.begin() + at * heads.value_width);
    }
  return result;
}

}  // namespace oracle
