// LayerNormFastformer against the layer as its authors write it, where queries and keys exist for every token.

#include "problem.h"

struct Layer {
  const Case& c;
  Numbers norm_weight, norm_bias, query_weight, query_bias, key_weight, key_bias, alpha_weight, beta_weight, weight,
      bias;

  static constexpr double kEpsilon = 1e-5;
  using Matrix = oracle::Values;  // [rows, width]

  Matrix normalize(const oracle::Document& d) const {
    Matrix rows(d.length * c.channels);
    for (int64_t t = 0; t < d.length; ++t) {
      const double* x = d.value + t * c.channels;
      double mean = 0.0, variance = 0.0;
      for (int64_t k = 0; k < c.channels; ++k) mean += x[k] / c.channels;
      for (int64_t k = 0; k < c.channels; ++k) variance += std::pow(x[k] - mean, 2) / c.channels;
      for (int64_t k = 0; k < c.channels; ++k)
        rows[t * c.channels + k] = (x[k] - mean) / std::sqrt(variance + kEpsilon) * norm_weight[k] + norm_bias[k];
    }
    return rows;
  }

  static Matrix multiply(const Matrix& rows, const Numbers& matrix, int64_t depth) {
    const int64_t width = static_cast<int64_t>(matrix.size()) / depth;
    const int64_t count = static_cast<int64_t>(rows.size()) / depth;
    Matrix result(count * width);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t i = 0; i < width; ++i) result[t * width + i] += rows[t * depth + k] * matrix[k * width + i];
    return result;
  }
  Matrix linear(const Matrix& rows, const Numbers& matrix, const Numbers& offset) const {
    Matrix result = multiply(rows, matrix, c.channels);
    for (size_t i = 0; i < result.size(); ++i) result[i] += offset[i % c.channels];
    return result;
  }

  Matrix pool(const Matrix& rows, const Matrix& logits) const {
    const int64_t count = static_cast<int64_t>(rows.size()) / c.channels;
    return oracle::pool(count, c.channels, c.heads, logits, rows.data());
  }

  Matrix operator()(const oracle::Document& d) const {
    const Matrix normalized = normalize(d);
    const Matrix query = linear(normalized, query_weight, query_bias);
    const Matrix global_query = pool(query, multiply(normalized, alpha_weight, c.channels));
    Matrix product = linear(normalized, key_weight, key_bias);
    for (size_t i = 0; i < product.size(); ++i) product[i] *= global_query[i % c.channels];
    const Matrix global_key = pool(product, multiply(product, beta_weight, c.channels));
    Matrix scaled = query;
    for (size_t i = 0; i < scaled.size(); ++i) scaled[i] *= global_key[i % c.channels];
    Matrix result = linear(scaled, weight, bias);
    for (size_t i = 0; i < result.size(); ++i) result[i] += query[i] + d.value[i];
    return result;
  }
};

static int try_layer(const Case& c, const Bounds& bounds) {
  Problem problem(c, bounds, c.channels);
  problem.sequence.query = problem.sequence.value;  // whose padded rows are NaN
  problem.sequence.key = {};
  Layer layer{c, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  const int64_t d = c.channels;
  const float unit = std::sqrt(3.0f / static_cast<float>(d));  // makes a product as large as its rows
  const float logits = unit * (c.data == Data::kLarge ? 100.0f : c.data == Data::kSmall ? 1.0f : 20.0f);
  const aft::cuda::LayerNormFastformer call{problem.sequence,
                                        problem.input(d, 1.5f, layer.norm_weight),
                                        problem.input(d, 0.5f, layer.norm_bias),
                                        static_cast<float>(Layer::kEpsilon),
                                        problem.input(d * d, unit, layer.query_weight),
                                        problem.input(d, 0.5f, layer.query_bias),
                                        problem.input(d * d, unit, layer.key_weight),
                                        problem.input(d, 0.5f, layer.key_bias),
                                        problem.input(d * c.heads, logits, layer.alpha_weight),
                                        problem.input(d * c.heads, logits, layer.beta_weight),
                                        problem.input(d * d, unit, layer.weight),
                                        problem.input(d, 0.5f, layer.bias),
                                        c.heads};
  return problem.check(call, aft_cuda_layer_norm_fastformer_workspace, aft_cuda_layer_norm_fastformer, layer);
}

// The layer has no causal form: of a case's two forms one is enough, and of the others a few are of other shapes. Long
// documents have a tile of tokens in a chunk of the poolings, and then two; many heads take two groups.
static int try_case(const Case& c, const Bounds& bounds) {
  Case own = c;
  own.causal = false;
  if (c.tokens == 700) {
    if (c.causal && c.element != Element::kFloat32) return 0;
    own.tokens = c.causal ? 16450 : 4097;
    own.batch = 1;
    own.lengths = {own.tokens - 1};
    if (c.causal) own.layout = Layout::kUnaligned;
  } else if (c.tokens == 65 && c.channels == 72 && !c.causal) {
    own.heads = 24;
  } else if (c.tokens == 127 && c.channels == 64 && !c.causal) {  // of which 32 or 16 rows fit a tile
    own.channels = 288;
    own.heads = 16;
    own.layout = Layout::kPacked;
  } else if (c.channels != 160 && !c.causal) {
    return 0;
  }
  return try_layer(own, bounds);
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, with_more_widths(try_case));
}
