// The mechanisms by their formulas, in double precision, one output element at a time.
//
// Tensors are packed as the kernels take them. Each function returns the output [tokens, channels] of one document,
// whose first `length` rows are meant.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"

namespace definition {

using Values = std::vector<double>;

struct Document {
  bool causal;
  int64_t tokens, length, channels, heads;
  const double *query, *key, *value;

  int64_t width() const { return channels / heads; }
  int64_t keys(int64_t t) const { return causal ? std::min(t + 1, length) : length; }
};

inline double gate(aft::Gate gate, double x) {
  if (gate == aft::Gate::kSigmoid) return 1 / (1 + std::exp(-x));
  return gate == aft::Gate::kTanh ? std::tanh(x) : 1;
}

// sum_u softmax(logit)_u value(u) over u in [0, keys).
template <class Logit, class Value>
double weighted_mean(int64_t keys, const Logit& logit, const Value& value) {
  Values logits(keys);
  for (int64_t u = 0; u < keys; ++u) logits[u] = logit(u);
  const double highest = keys ? *std::max_element(logits.begin(), logits.end()) : 0;
  double numerator = 0, denominator = 0;
  for (int64_t u = 0; u < keys; ++u) {
    const double weight = std::exp(logits[u] - highest);
    numerator += weight * value(u);
    denominator += weight;
  }
  return keys ? numerator / denominator : 0;
}

// output(t, c) for the rows that count.
template <class Element>
Values rows(const Document& d, const Element& element) {
  Values output(d.tokens * d.channels);
  for (int64_t t = 0; t < d.length; ++t)
    for (int64_t c = 0; c < d.channels; ++c) output[t * d.channels + c] = element(t, c);
  return output;
}

// The AFT family: key(u, c) and bias(t, u, c) say which mechanism.
template <class Key, class Bias>
Values attention_free(const Document& d, aft::Gate chosen, const Key& key, const Bias& bias) {
  return rows(d, [&](int64_t t, int64_t c) {
    return gate(chosen, d.query[t * d.channels + c]) *
           weighted_mean(
               d.keys(t), [&](int64_t u) { return key(u, c) + bias(t, u, c); },
               [&](int64_t u) { return d.value[u * d.channels + c]; });
  });
}

inline double softmax_of_query(const Document& d, int64_t t, int64_t c) {
  const double* head = d.query + t * d.channels + c / d.width() * d.width();
  double sum = 0;
  for (int64_t i = 0; i < d.width(); ++i) sum += std::exp(head[i] - d.query[t * d.channels + c]);
  return 1 / sum;
}

inline Values efficient_attention(const Document& d, aft::Normalization normalization, double scale) {
  const bool softmax = normalization == aft::Normalization::kSoftmax;
  return rows(d, [&](int64_t t, int64_t c) {
    const int64_t head = c / d.width() * d.width(), keys = d.keys(t);
    double sum = 0;
    for (int64_t i = head; i < head + d.width(); ++i) {
      const auto key = [&](int64_t u) { return d.key[u * d.channels + i]; };
      const auto value = [&](int64_t u) { return d.value[u * d.channels + c]; };
      if (softmax) {
        sum += softmax_of_query(d, t, i) * weighted_mean(keys, key, value);
      } else {
        for (int64_t u = 0; u < keys; ++u) sum += d.query[t * d.channels + i] * key(u) * value(u) / keys;
      }
    }
    return scale * sum;
  });
}

inline Values linear_attention(const Document& d, aft::FeatureMap map, double eps) {
  const auto phi = [&](double x) { return x > 0 ? (map == aft::FeatureMap::kElu ? x + 1 : x)
                                                : (map == aft::FeatureMap::kElu ? std::exp(x) : 0); };
  Values score(d.heads * d.length * d.length);
  for (int64_t h = 0; h < d.heads; ++h)
    for (int64_t t = 0; t < d.length; ++t)
      for (int64_t u = 0; u < d.keys(t); ++u)
        for (int64_t i = h * d.width(); i < (h + 1) * d.width(); ++i)
          score[(h * d.length + t) * d.length + u] += phi(d.query[t * d.channels + i]) * phi(d.key[u * d.channels + i]);
  return rows(d, [&](int64_t t, int64_t c) {
    const double* scores = score.data() + (c / d.width() * d.length + t) * d.length;
    double numerator = 0, denominator = 0;
    for (int64_t u = 0; u < d.keys(t); ++u) {
      numerator += scores[u] * d.value[u * d.channels + c];
      denominator += scores[u];
    }
    return numerator / (denominator + eps);
  });
}

// Per head the mean of x [length, channels] over the tokens up to t, weighted by the softmax of x weight / sqrt(d).
inline Values pool(const Document& d, const double* x, const double* weight) {
  Values logits(d.length * d.heads);
  for (int64_t t = 0; t < d.length; ++t)
    for (int64_t h = 0; h < d.heads; ++h)
      for (int64_t c = 0; c < d.channels; ++c)
        logits[t * d.heads + h] += x[t * d.channels + c] * weight[c * d.heads + h] / std::sqrt(d.width());
  return rows(d, [&](int64_t t, int64_t c) {
    return weighted_mean(
        d.keys(t), [&](int64_t u) { return logits[u * d.heads + c / d.width()]; },
        [&](int64_t u) { return x[u * d.channels + c]; });
  });
}

inline Values fastformer(const Document& d, const double* alpha_weight, const double* beta_weight) {
  Values p = pool(d, d.query, alpha_weight);
  for (size_t i = 0; i < p.size(); ++i) p[i] *= d.key[i];
  Values output = pool(d, p.data(), beta_weight);
  for (size_t i = 0; i < output.size(); ++i) output[i] *= d.value[i];
  return output;
}

}  // namespace definition
