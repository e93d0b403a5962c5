// The attention mechanisms by the formulas of their papers, in double precision.
//
// Each function returns the output [tokens, channels] of one document: sums over every pair of a row and a key. Beyond
// the papers:
// - Key u counts for row t if u < length, and u <= t in causal form.
// - Padding is not read, and its rows are 0.
// - A mean over keys of -inf is 0.
// - eps of attention-free forms is added to a sum of exp(K + w) as the formula has it.
// - Linear and Efficient Attention may have keys of their own number, several heads with one key and value, and values
//   of another width.
// mechanisms.py has the same formulas, and softmax_attention.h that of softmax attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace oracle {

using Values = std::vector<double>;

enum class Gate { kSigmoid, kTanh, kNone, kRelu };
enum class Normalization { kSoftmax, kScaling };
enum class FeatureMap { kElu, kRelu, kIdentity };
enum class Normalizer { kAdd, kClamp, kNone };

constexpr double kMinEps = 1e-20;  // a smaller eps of linear attention counts as this one

struct Document {
  bool causal;
  int64_t tokens, length, channels;
  const double *query, *key, *value;  // [tokens, channels]; the key of AFT-conv is [tokens, heads]

  int64_t visible(int64_t t) const { return causal ? std::min(t + 1, length) : length; }
};

// Heads of the query, of key and value, and the channels of one; `keys` of them count, all in causal form.
struct Heads {
  int64_t heads, groups, width, value_width, keys;

  Heads(const Document& d, int64_t heads, int64_t groups = 0, int64_t value_width = 0, int64_t keys = -1)
      : heads(heads),
        groups(groups ? groups : heads),
        width(d.channels / heads),
        value_width(value_width ? value_width : width),
        keys(keys < 0 ? d.length : keys) {}

  int64_t visible(const Document& d, int64_t t) const { return d.causal ? d.visible(t) : keys; }
  int64_t group(int64_t head) const { return head / (heads / groups); }
  int64_t key_channels() const { return groups * width; }
  int64_t value_channels() const { return groups * value_width; }
  int64_t output_channels() const { return heads * value_width; }
};

// exp(logit(u)) / (sum_u exp(logit(u)) + eps) for u in [0, count).
template <class Logit>
Values softmax(int64_t count, const Logit& logit, double eps = 0) {
  Values weights(count);
  double highest = -INFINITY, sum = 0;
  for (int64_t u = 0; u < count; ++u) highest = std::max(highest, weights[u] = logit(u));
  if (highest == -INFINITY) highest = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - highest);
  sum += eps > 0 ? std::exp(std::log(eps) - highest) : 0;
  for (double& weight : weights) weight = sum == 0 ? 0 : weight / sum;
  return weights;
}

// sum_u weights[u] rows[u]: `width` numbers of each row, which lie `stride` apart.
inline Values weighted_sum(const Values& weights, const double* rows, int64_t stride, int64_t width) {
  Values sums(width);
  for (size_t u = 0; u < weights.size(); ++u, rows += stride)
    for (int64_t c = 0; c < width; ++c) sums[c] += weights[u] * rows[c];
  return sums;
}

inline double gated(Gate gate, double query, double mean) {
  if (gate == Gate::kSigmoid) return mean / (1 + std::exp(-query));
  if (gate == Gate::kRelu) return mean * std::max(query, 0.0);
  return gate == Gate::kTanh ? mean * std::tanh(query) : mean;
}

// The form that all AFT have in common, where bias(t, u, k) is w for column k of the key:
//   Y_t = gate(Q_t) * sum_u exp(K_u + w_tu) V_u / (sum_u exp(K_u + w_tu) + eps)
template <class Bias>
Values attention_free(const Document& d, Gate gate, int64_t key_columns, const Bias& bias, double eps = 0) {
  const int64_t width = d.channels / key_columns;
  Values output(d.tokens * d.channels);
  for (int64_t t = 0; t < d.length; ++t)
    for (int64_t k = 0; k < key_columns; ++k) {
      const Values weights =
          softmax(d.visible(t), [&](int64_t u) { return d.key[u * key_columns + k] + bias(t, u, k); }, eps);
      const Values means = weighted_sum(weights, d.value + k * width, d.channels, width);
      for (int64_t c = 0; c < width; ++c) {
        const int64_t at = t * d.channels + k * width + c;
        output[at] = gated(gate, d.query[at], means[c]);
      }
    }
  return output;
}

// w of the key that is j-th in the window of a row; 0 outside.
inline double in_window(const double* biases, int64_t width, int64_t j) { return j >= 0 && j < width ? biases[j] : 0; }

// Zhai et al., An Attention Free Transformer, arXiv 2105.14103, eq. 2:
//   Y_t = gate(Q_t) * sum_u exp(K_u + w_tu) V_u / (sum_u exp(K_u + w_tu) + eps)
// w_tu is position_bias[t * width + u].
inline Values aft_full(const Document& d, Gate gate, const double* position_bias, int64_t width, double eps = 0) {
  return attention_free(
      d, gate, d.channels, [&](int64_t t, int64_t u, int64_t) { return position_bias[t * width + u]; }, eps);
}

// arXiv 2105.14103, eq. 4: w_tu = w[t, u] if |t - u| < window, else 0, in eq. 2.
// A row of the band, or the only one, has the biases of keys t - (window - 1) and on, up to t in causal form.
inline Values aft_local(const Document& d, Gate gate, const double* band, int64_t band_rows, int64_t window,
                        double eps = 0) {
  const int64_t left = window - 1, width = d.causal ? window : 2 * window - 1;
  return attention_free(
      d, gate, d.channels,
      [&](int64_t t, int64_t u, int64_t) {
        return in_window(band + (band_rows == 1 ? 0 : t * width), width, u - t + left);
      },
      eps);
}

// arXiv 2105.14103, eq. 5: Y_t = gate(Q_t) * sum_u exp(K_u) V_u / (sum_u exp(K_u) + eps).
// A key may have fewer channels, of which each serves a head of the value.
inline Values aft_simple(const Document& d, Gate gate, int64_t key_channels = 0, double eps = 0) {
  return attention_free(
      d, gate, key_channels ? key_channels : d.channels, [](int64_t, int64_t, int64_t) { return 0.0; }, eps);
}

// arXiv 2105.14103, eq. 6:
//   num = conv1d(exp(K) V, exp(w) - 1) + sum_u exp(K_u) V_u
//   den = conv1d(exp(K), exp(w) - 1) + sum_u exp(K_u),  Y = gate(Q) * num / (den + eps)
// A tap takes exp(K) from the sum and adds exp(w + K): the same as the bias w in a window, else 0. The filter is
// [heads, taps], with "same" padding, or all to the left in causal form.
inline Values aft_conv(const Document& d, Gate gate, int64_t heads, const double* filter, int64_t taps,
                       double eps = 0) {
  const int64_t left = d.causal ? taps - 1 : (taps - 1) / 2;
  return attention_free(
      d, gate, heads,
      [&](int64_t t, int64_t u, int64_t head) { return in_window(filter + head * taps, taps, u - t + left); }, eps);
}

// rho_k(K)^T V over the first `keys` keys: row i has key channel i by the channels of its head's value.
inline Values contexts(const Document& d, const Heads& h, Normalization normalization, int64_t keys) {
  Values result;
  for (int64_t i = 0; i < h.key_channels(); ++i) {
    const auto key = [&](int64_t u) { return d.key[u * h.key_channels() + i]; };
    Values normalized(keys);
    for (int64_t u = 0; u < keys; ++u) normalized[u] = key(u) / static_cast<double>(keys);
    if (normalization == Normalization::kSoftmax) normalized = softmax(keys, key);
    const double* values = d.value + i / h.width * h.value_width;
    const Values row = weighted_sum(normalized, values, h.value_channels(), h.value_width);
    result.insert(result.end(), row.begin(), row.end());
  }
  return result;
}

// Shen et al., Efficient Attention, arXiv 1812.01243, per head:
//   Y = scale * rho_q(Q) (rho_k(K)^T V)
// softmax: rho_q over the channels of each query, rho_k over the keys of each key channel. scaling: both divide by
// sqrt(n), n the number of keys, here all by n at once. Scale and causal form are not of the paper.
inline Values efficient_attention(const Document& d, const Heads& h, Normalization normalization, double scale) {
  Values output(d.tokens * h.output_channels()), context;
  for (int64_t t = 0; t < d.length; ++t) {
    if (t == 0 || d.causal) context = contexts(d, h, normalization, h.visible(d, t));
    for (int64_t head = 0; head < h.heads; ++head) {
      const double* query = d.query + t * d.channels + head * h.width;
      Values normalized(query, query + h.width);
      if (normalization == Normalization::kSoftmax) normalized = softmax(h.width, [&](int64_t i) { return query[i]; });
      const double* own = context.data() + h.group(head) * h.width * h.value_width;
      const Values row = weighted_sum(normalized, own, h.value_width, h.value_width);
      for (int64_t c = 0; c < h.value_width; ++c)
        output[t * h.output_channels() + head * h.value_width + c] = scale * row[c];
    }
  }
  return output;
}

// Per head sum_t softmax_t(logits[t, head]) x[t] over the first `count` rows of x [., channels]:
// Fastformer's sum over the tokens.
inline Values pool(int64_t count, int64_t channels, int64_t heads, const Values& logits, const double* x) {
  const int64_t width = channels / heads;
  Values means;
  for (int64_t head = 0; head < heads; ++head) {
    const Values weights = softmax(count, [&](int64_t t) { return logits[t * heads + head]; });
    const Values part = weighted_sum(weights, x + head * width, channels, width);
    means.insert(means.end(), part.begin(), part.end());
  }
  return means;
}

// Those means for every row of x [length, channels], with the logits x weight / sqrt(d).
inline Values pool_by_weight(const Document& d, int64_t heads, const double* x, const double* weight) {
  const double root = std::sqrt(static_cast<double>(d.channels / heads));
  Values logits, means, output;
  for (int64_t t = 0; t < d.length; ++t) {
    const Values row = weighted_sum(Values(x + t * d.channels, x + (t + 1) * d.channels), weight, heads, heads);
    for (double logit : row) logits.push_back(logit / root);
  }
  for (int64_t t = 0; t < d.length; ++t) {
    if (t == 0 || d.causal) means = pool(d.visible(t), d.channels, heads, logits, x);
    output.insert(output.end(), means.begin(), means.end());
  }
  return output;
}

// Wu et al., Fastformer, arXiv 2108.09084, as in the authors' code:
//   alpha = softmax_T(Q Wa / sqrt(d)),  g_q[h] = sum_t alpha[t, h] Q[t, h],  P = K * g_q
//   beta  = softmax_T(P Wb / sqrt(d)),  g_k[h] = sum_t beta[t, h] P[t, h],   Y = V * g_k
// A head's logits read all channels, and the second mean is of P. The weights are [channels, heads]. In causal form,
// which is not of the paper, both means are of the tokens up to the row.
inline Values fastformer(const Document& d, int64_t heads, const double* alpha_weight, const double* beta_weight) {
  Values product = pool_by_weight(d, heads, d.query, alpha_weight);
  for (size_t i = 0; i < product.size(); ++i) product[i] *= d.key[i];
  Values output = pool_by_weight(d, heads, product.data(), beta_weight);
  for (size_t i = 0; i < output.size(); ++i) output[i] *= d.value[i];
  output.resize(d.tokens * d.channels);
  return output;
}

// phi of x: elu(x) + 1 (eq. 7), relu(x), or x.
inline Values features(FeatureMap map, const double* x, int64_t count) {
  Values result(x, x + count);
  if (map == FeatureMap::kIdentity) return result;
  for (double& v : result) v = map == FeatureMap::kRelu ? std::max(v, 0.0) : v > 0 ? v + 1 : std::exp(v);
  return result;
}

// Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236, eq. 5, per head:
//   Y_t = sum_u (phi(Q_t) phi(K_u)^T) V_u / (sum_u phi(Q_t) phi(K_u)^T + eps)
// eps, its use as a minimum of the divisor (clamp), and the form without a divisor (none) are not of the paper.
inline Values linear_attention(const Document& d, const Heads& h, FeatureMap map, double eps,
                               Normalizer normalizer = Normalizer::kAdd) {
  const Values query = features(map, d.query, d.length * d.channels);
  const Values key = features(map, d.key, (d.causal ? d.length : h.keys) * h.key_channels());
  Values output(d.tokens * h.output_channels());
  eps = std::max(eps, kMinEps);
  for (int64_t t = 0; t < d.length; ++t)
    for (int64_t head = 0; head < h.heads; ++head) {
      Values scores(h.visible(d, t));
      double sum = 0;
      for (size_t u = 0; u < scores.size(); ++u) {
        for (int64_t i = 0; i < h.width; ++i)
          scores[u] += query[t * d.channels + head * h.width + i] *
                       key[u * h.key_channels() + h.group(head) * h.width + i];
        sum += scores[u];
      }
      const double divisor = normalizer == Normalizer::kNone    ? 1
                             : normalizer == Normalizer::kClamp ? std::max(sum, eps)
                                                                : sum + eps;
      const double* values = d.value + h.group(head) * h.value_width;
      const Values sums = weighted_sum(scores, values, h.value_channels(), h.value_width);
      for (int64_t c = 0; c < h.value_width; ++c)
        output[t * h.output_channels() + head * h.value_width + c] = sums[c] / divisor;
    }
  return output;
}

enum class UpdateRule { kLinear, kGated, kDelta, kGatedDelta };
enum class Direction { kForward, kReverse, kBidirectional };

// A document of a recurrence with matrices as states. Rows of tokens are [heads * width]; past_state is null or
// [states, key_width, value_width (+ 1)].
struct Recurrence {
  UpdateRule rule;
  Direction direction;
  bool normalized, channel_decay, head_beta;
  int64_t tokens, length, query_heads, state_heads, key_width, value_width;
  double scale, eps;
  const double *query, *key, *value, *past_state, *decay, *beta;

  bool decays() const { return rule == UpdateRule::kGated || rule == UpdateRule::kGatedDelta; }
  bool erases() const { return rule == UpdateRule::kDelta || rule == UpdateRule::kGatedDelta; }
  int64_t state_columns() const { return value_width + (normalized ? 1 : 0); }
};

struct RecurrenceResult {
  Values output, present_state;
};

// S = diag(exp(decay_t)) S of one head.
inline void decay_state(const Recurrence& r, int64_t t, int64_t head, double* state) {
  if (!r.decays()) return;
  for (int64_t c = 0; c < r.key_width; ++c) {
    const int64_t channel = r.channel_decay ? r.key_width * r.state_heads * t + head * r.key_width + c
                                            : r.state_heads * t + head;
    for (int64_t e = 0; e < r.state_columns(); ++e) state[c * r.state_columns() + e] *= std::exp(r.decay[channel]);
  }
}

// S = S + key_t new_t^T with new_t = value_t, or beta_t (value_t - S^T key_t). The last column of a normalized one is
// for values of 1.
inline void write_state(const Recurrence& r, int64_t t, int64_t head, double* state) {
  const double* key = r.key + (t * r.state_heads + head) * r.key_width;
  for (int64_t e = 0; e < r.state_columns(); ++e) {
    double written = e < r.value_width ? r.value[(t * r.state_heads + head) * r.value_width + e] : 1;
    if (r.erases()) {
      for (int64_t c = 0; c < r.key_width; ++c) written -= key[c] * state[c * r.state_columns() + e];
      written *= r.beta[r.head_beta ? t * r.state_heads + head : t];
    }
    for (int64_t c = 0; c < r.key_width; ++c) state[c * r.state_columns() + e] += key[c] * written;
  }
}

// sums[query head, state column] += query_t^T S
inline void read_state(const Recurrence& r, int64_t t, int64_t head, const double* state, double* sums) {
  const int64_t group = r.query_heads / r.state_heads;
  for (int64_t j = head * group; j < (head + 1) * group; ++j)
    for (int64_t c = 0; c < r.key_width; ++c)
      for (int64_t e = 0; e < r.state_columns(); ++e)
        sums[j * r.state_columns() + e] +=
            r.query[(t * r.query_heads + j) * r.key_width + c] * state[c * r.state_columns() + e];
}

// ONNX LinearAttention-27, token by token, with the directions, the normalizer and the decays by channel of
// RecurrentLinearAttention:
//   S = diag(exp(decay_t)) S;  new_t = value_t, or beta_t (value_t - S^T key_t);  S = S + key_t new_t^T
//   Y_t = scale query_t^T S, or query_t^T S / (query_t^T z + eps), z the last column of S
// In both directions at once S is the sum of both, that of the reverse direction before it takes up token t.
inline RecurrenceResult recurrent_linear_attention(const Recurrence& r) {
  const bool both = r.direction == Direction::kBidirectional;
  const int64_t head_state = r.key_width * r.state_columns(), row = r.query_heads * r.state_columns();
  RecurrenceResult result{Values(r.tokens * r.query_heads * r.value_width),
                          Values((both ? 2 : 1) * r.state_heads * head_state)};
  if (r.past_state) result.present_state.assign(r.past_state, r.past_state + result.present_state.size());
  Values sums(r.tokens * row);
  for (int direction = r.direction == Direction::kReverse; direction < (r.direction == Direction::kForward ? 1 : 2);
       ++direction)
    for (int64_t i = 0; i < r.length; ++i)
      for (int64_t head = 0; head < r.state_heads; ++head) {
        const int64_t t = direction == 0 ? i : r.length - 1 - i;
        const bool second = both && direction == 1;
        double* state = result.present_state.data() + (head + (second ? r.state_heads : 0)) * head_state;
        decay_state(r, t, head, state);
        if (second) read_state(r, t, head, state, sums.data() + t * row);
        write_state(r, t, head, state);
        if (!second) read_state(r, t, head, state, sums.data() + t * row);
      }
  for (int64_t i = 0; i < r.length * r.query_heads; ++i)
    for (int64_t e = 0; e < r.value_width; ++e) {
      const double* sum = sums.data() + i * r.state_columns();
      const double factor = r.normalized ? 1 / (sum[r.value_width] + std::max(r.eps, kMinEps)) : r.scale;
      result.output[i * r.value_width + e] = sum[e] * factor;
    }
  return result;
}

// A document of a convolution over the last `taps` tokens, channel by channel; bias and past_state may be null.
struct Convolution {
  bool silu;
  int64_t tokens, length, channels, taps;
  const double *input, *weight, *bias, *past_state;

  // Token t, which may be before the first.
  double at(int64_t t, int64_t c) const {
    if (t >= 0) return input[t * channels + c];
    return past_state ? past_state[(t + taps - 1) * channels + c] : 0;
  }
};

// ONNX CausalConvWithState-27 with channels last:
//   Y_t = act(bias + sum_j weight_j x_{t - taps + 1 + j}),  act(y) = y or y / (1 + exp(-y))
inline RecurrenceResult causal_depthwise_conv(const Convolution& d) {
  RecurrenceResult result{Values(d.tokens * d.channels), {}};
  for (int64_t t = 0; t < d.length; ++t)
    for (int64_t c = 0; c < d.channels; ++c) {
      double sum = d.bias ? d.bias[c] : 0;
      for (int64_t j = 0; j < d.taps; ++j) sum += d.weight[c * d.taps + j] * d.at(t - d.taps + 1 + j, c);
      result.output[t * d.channels + c] = d.silu ? sum / (1 + std::exp(-sum)) : sum;
    }
  for (int64_t t = d.length - d.taps + 1; t < d.length; ++t)
    for (int64_t c = 0; c < d.channels; ++c) result.present_state.push_back(d.at(t, c));
  return result;
}

}  // namespace oracle
