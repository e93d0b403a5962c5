// LayerNormFastformer, the attention half of a Fastformer layer (Wu et al., arXiv 2108.09084), heads of width d.
//
// Computes: N = layer_norm(X)
//           alpha = softmax_t(N A),               g_q = (sum_t alpha_t N_t) Wq + bq
//           beta  = softmax_t(N Wk diag(g_q) B),  g_k = g_q * ((sum_t beta_t N_t) Wk + bk)
//           Y = X + N Wq (I + diag(g_k) W) + (bq * g_k) W + bq + b
//           In g_q and g_k each head has its own columns of Wq and Wk.
// Cost:     two sweeps over X pool its normalized rows, 8 T D h FLOPs, and a third multiplies them. Bound by the
//           multiply-adds of the third: with one matrix per document 2 T D^2 + 2 D^3; with Wq and W in turn, for
//           documents of fewer than D tokens, 4 T D^2.
// Method:   query and key are not computed for every token: the poolings are of the normalized rows. With Wq and W in
//           turn, queries stay in the second-level cache.
// See:      row_softmax_pool.h, row_blocks.h, norm.h

#include "encoder/norm.h"
#include "encoder/row_blocks.h"
#include "encoder/row_softmax_pool.h"

namespace aft::AFT_ISA {
namespace {

class FastformerLayer {
 public:
  FastformerLayer(const LayerNormFastformer& p, const Parallel& parallel)
      : p_(p),
        parallel_(parallel),
        width_(p.weight->rows),
        shape_(width_, p.heads),
        chunk_(chunk_tokens(p.tokens)),
        chunks_(ceil_div(p.tokens, chunk_)),
        logit_floats_(shape_.padded_heads * shape_.padded_channels),
        pool_floats_(RowPool::floats(shape_)),
        memory_(logit_floats_ + p.batch * (logit_floats_ + chunks_ * pool_floats_ + 2 * shape_.padded_channels)),
        alpha_(memory_.data()),
        betas_(alpha_ + logit_floats_),
        pools_(betas_ + p.batch * logit_floats_),
        globals_(pools_ + p.batch * chunks_ * pool_floats_) {}

  void run() const {
    spread_rows([&](int64_t c, int64_t h) { return p_.alpha_weight[c * p_.heads + h]; }, alpha_);
    pool([&](int64_t) { return alpha_; },
         [&](int64_t b, const RowPool& means) {
           project(means, p_.query_weight, p_.query_bias, global_query(b));
           make_beta(b);
         });
    pool([&](int64_t b) { return beta(b); },
         [&](int64_t b, const RowPool& means) {
           float *g_q = global_query(b), *g_k = global_key(b);
           project(means, p_.key_weight, p_.key_bias, g_k);
           for (int64_t c = 0; c < width_; ++c) g_k[c] *= g_q[c];
         });
    with_method(p_.weight->method, [&](auto product) {
      using Product = decltype(product);
      if (p_.tokens <= width_) return multiply_in_turn<Product>();
      const Scratch matrix((width_ + 1) * width_);
      for (int64_t b = 0; b < p_.batch; ++b) multiply_folded<Product>(b, matrix.data());
    });
  }

 private:
  float* beta(int64_t b) const { return betas_ + b * logit_floats_; }
  float* global_query(int64_t b) const { return globals_ + 2 * b * shape_.padded_channels; }
  float* global_key(int64_t b) const { return global_query(b) + shape_.padded_channels; }

  // A matrix of weights for logits, [channels, heads], as rows per head: rows[h, c] = value(c, h).
  template <class Value>
  void spread_rows(const Value& value, float* rows) const {
    zero(rows, logit_floats_);
    for (int64_t c = 0; c < width_; ++c)
      for (int64_t h = 0; h < p_.heads; ++h) rows[h * shape_.padded_channels + c] = value(c, h);
  }

  // The logits' weights of the second pooling: Wk diag(g_q) B.
  void make_beta(int64_t b) const {
    const float* g_q = global_query(b);
    float* rows = beta(b);
    spread_rows([&](int64_t c, int64_t h) { return g_q[c] * p_.beta_weight[c * p_.heads + h]; }, rows);
    float* columns = task_memory(width_ * shape_.padded_heads);
    head_logits(shape_, p_.key_weight, width_, width_, rows, columns);
    spread_rows([&](int64_t c, int64_t h) { return columns[c * shape_.padded_heads + h]; }, rows);
  }

  // Pools every document's normalized rows, their logits being products with weights(document), and calls
  // use(document, means).
  template <class Weights, class Use>
  void pool(const Weights& weights, const Use& use) const {
    const auto pool_at = [&](int64_t b, int64_t chunk) {
      return RowPool(shape_, pools_ + (b * chunks_ + chunk) * pool_floats_);
    };
    parallel_for(parallel_, p_.batch * chunks_, [&](int64_t task) {
      const int64_t b = task / chunks_, begin = task % chunks_ * chunk_;
      const int64_t end = min(begin + chunk_, length_of(p_, b));
      float* rows = task_memory(kPoolTokens * (shape_.padded_channels + shape_.padded_heads));
      float* logits = rows + kPoolTokens * shape_.padded_channels;
      const RowPool sums = pool_at(b, task % chunks_);
      sums.clear();
      for (int64_t t = begin; t < end; t += kPoolTokens) {
        const int64_t tokens = min(kPoolTokens, end - t);
        for (int64_t i = 0; i < tokens; ++i) normalize(b * p_.tokens + t + i, rows + i * shape_.padded_channels);
        head_logits(shape_, rows, shape_.padded_channels, tokens, weights(b), logits);
        sums.add(rows, tokens, logits);
      }
    });
    parallel_for(parallel_, p_.batch, [&](int64_t b) {
      const RowPool means = pool_at(b, 0);
      for (int64_t chunk = 1; chunk < chunks_; ++chunk) means.merge(pool_at(b, chunk));
      means.divide();
      use(b, means);
    });
  }

  void normalize(int64_t row, float* normalized) const {
    normalize_row(read_elements(p_.element, p_.input, row * width_, width_, normalized), width_, p_.norm, normalized);
  }

  // result = bias + each head's mean times the head's own columns of the weight.
  void project(const RowPool& means, const float* weight, const float* bias, float* result) const {
    for (int64_t h = 0; h < p_.heads; ++h)
      for (int64_t c = h * shape_.width, end = c + shape_.width; c < end; c += kLanes) {
        const float* mean = means.row(h);
        Vec sum = load(bias + c, width_ - c);
        for (int64_t k = 0; k < width_; ++k) sum += splat(mean[k]) * load(weight + k * width_ + c, width_ - c);
        store(result + c, sum, end - c);
      }
  }

  // Multiplies by Wq diag(g_k) W + Wq. Below that matrix lies the document's bias, as if bq were one row more of Wq.
  template <class Product>
  void multiply_folded(int64_t b, float* matrix) const {
    using Left = LeftRows<Product>;
    const int64_t left_floats = Left::floats_per_row(width_), row_floats = shape_.padded_channels;
    const float *g_k = global_key(b), *bias = matrix + width_ * width_;
    for_row_blocks<Product>(width_ + 1, row_floats, left_floats, parallel_,
                            [&](int64_t first, int64_t rows, float* memory) {
                              const Left left(memory + row_floats, rows);
                              float* folded = matrix + first * width_;
                              for (int64_t r = 0; r < rows; ++r) {
                                const bool is_bias = first + r == width_;
                                const float* row = is_bias ? p_.query_bias : p_.query_weight + (first + r) * width_;
                                for (int64_t c = 0; c < width_; ++c) {
                                  memory[c] = row[c] * g_k[c];
                                  folded[r * width_ + c] = is_bias ? row[c] + p_.bias[c] : row[c];
                                }
                                left.set(r, memory, width_);
                              }
                              multiply_and_add(left, *p_.weight, rows, folded, nullptr, folded);
                            });

    const Packed weight{AFT_ISA::pack_weight(matrix, width_, width_, Product::kMethod)};
    const int64_t output_floats = OutputRows::floats(p_.element, width_);
    for_row_blocks<Product>(
        p_.tokens, row_floats, left_floats + output_floats, parallel_, [&](int64_t first, int64_t rows, float* memory) {
          const Left left(memory + row_floats, rows);
          float* converted = memory + row_floats + rows * left_floats;
          first += b * p_.tokens;
          set_normalized(left, first, rows, memory);
          const float* x = read_elements(p_.element, p_.input, first * width_, rows * width_, converted);
          const OutputRows output(p_.element, p_.output, first, rows, width_, converted);
          multiply_and_add(left, *weight.packed, rows, x, bias, output.data());
          output.write_back();
        });
  }

  // Multiplies by Wq, then by W. The queries of a block of rows, perhaps of several documents, stay in the cache.
  template <class Product>
  void multiply_in_turn() const {
    using Left = LeftRows<Product>;
    const int64_t left_floats = Left::floats_per_row(width_), row_floats = shape_.padded_channels;
    const int64_t per_row = left_floats + width_ + OutputRows::floats(p_.element, width_);
    for_row_blocks<Product>(
        p_.batch * p_.tokens, row_floats, per_row, parallel_, [&](int64_t first, int64_t rows, float* memory) {
          const Left left(memory + row_floats, rows);
          float* queries = memory + row_floats + rows * left_floats;
          set_normalized(left, first, rows, memory);
          multiply_and_add(left, *p_.packed_query_weight, rows, nullptr, p_.query_bias, queries);
          for (int64_t r = 0; r < rows; ++r) {
            const float* g_k = global_key((first + r) / p_.tokens);
            float* query = queries + r * width_;
            for (int64_t c = 0; c < width_; ++c) memory[c] = query[c] * g_k[c];
            left.set(r, memory, width_);
            const float* x = read_elements(p_.element, p_.input, (first + r) * width_, width_, memory);
            for (int64_t c = 0; c < width_; ++c) query[c] += x[c];
          }
          const OutputRows output(p_.element, p_.output, first, rows, width_, queries + rows * width_);
          multiply_and_add(left, *p_.weight, rows, queries, p_.bias, output.data());
          output.write_back();
        });
  }

  template <class Left>
  void set_normalized(const Left& left, int64_t first, int64_t rows, float* row) const {
    for (int64_t r = 0; r < rows; ++r) {
      normalize(first + r, row);
      left.set(r, row, width_);
    }
  }

  struct Packed {
    const PackedWeight* packed;
    ~Packed() { delete packed; }
  };

  const LayerNormFastformer& p_;
  const Parallel& parallel_;
  int64_t width_;
  PoolShape shape_;
  int64_t chunk_, chunks_, logit_floats_, pool_floats_;
  Scratch memory_;
  float *alpha_, *betas_, *pools_, *globals_;
};

}  // namespace

void layer_norm_fastformer(const LayerNormFastformer& p, const Parallel& parallel) {
  FastformerLayer(p, parallel).run();
}

}  // namespace aft::AFT_ISA
