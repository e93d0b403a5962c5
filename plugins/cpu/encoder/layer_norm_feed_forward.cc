// LayerNormFeedForward.
//
// Computes: Y = X + H W_out + b_out, H = f(norm(X) W_in + b_in) or, gated, f(norm(X) W_in + b_in) (norm(X) W_up + b_up)
// Cost:     bound by multiply-adds: 4 D F FLOPs per row, gated 6 D F, against 8 D bytes. The hidden layer, F = 4 D wide
//           as a rule, would be another 8 F bytes at each step between its products; here it never reaches memory.
// Method:   a task normalizes a block of rows into the second-level cache. Then, for one chunk of hidden columns after
//           the other: the product with those columns of W_in; bias and activation on each tile, which leaves the chunk
//           encoded as a left side; its product with those rows of W_out, added to the output, which begins as X +
//           b_out and stays in the cache. Gated, a few panels at a time are multiplied by W_up first; the tiles of W_in
//           find these products in the cache.
// See:      row_blocks.h, activation.h, norm.h, matmul/matrix_product.h

#include "encoder/activation.h"
#include "encoder/norm.h"
#include "encoder/row_blocks.h"

namespace aft::AFT_ISA {
namespace {

template <class Product>
class FeedForwardBlock {
 public:
  using Left = LeftRows<Product>;
  static constexpr int64_t kSums = Left::kChunk;  // hidden columns at a time
  static constexpr int64_t kUpColumns = 4 * kPanel;

  // Hidden sums have a place of their own only where a tile is not finished: the left side comes in several
  // chunks, or hidden rows are encoded by their range.
  static bool keeps_sums(const LayerNormFeedForward& p) { return Product::kScaled || p.weight_in->rows > Left::kChunk; }
  static int64_t fixed_floats(const LayerNormFeedForward& p) { return round_up(p.weight_in->rows, kLanes); }
  static int64_t floats_per_row(const LayerNormFeedForward& p) {
    return Left::floats_per_row(p.weight_in->rows) + Left::kPitch + (keeps_sums(p) ? kSums : 0) +
           (p.weight_up ? kUpColumns : 0) + OutputRows::floats(p.element, p.weight_in->rows);
  }

  FeedForwardBlock(const LayerNormFeedForward& p, int64_t first, int64_t rows, float* memory)
      : p_(p),
        width_(p.weight_in->rows),
        hidden_width_(p.weight_in->columns),
        rows_(rows),
        row_(memory),
        left_(memory + fixed_floats(p), rows),
        hidden_(left_.words(ceil_div(width_, Left::kChunk), 0), rows),
        sums_(hidden_.words(1, 0)),
        up_(sums_ + (keeps_sums(p) ? rows * kSums : 0)),
        converted_(up_ + (p.weight_up ? rows * kUpColumns : 0)),
        input_(read_elements(p.element, p.input, first * width_, rows * width_, converted_)),
        output_(p.element, p.output, first, rows, width_, converted_) {}

  void run() const {
    for (int64_t r = 0; r < rows_; ++r) left_.set(r, normalize_row(input_ + r * width_, width_, p_.norm, row_), width_);
    for (int64_t chunk = 0; chunk * Left::kChunk < hidden_width_; ++chunk) {
      compute_hidden(chunk * Left::kChunk, min(hidden_width_, (chunk + 1) * Left::kChunk));
      multiply(hidden_, 0, *p_.weight_out, chunk, 0, width_, rows_,
               AddTo(output_.data(), width_, input_, p_.bias_out, chunk == 0));
    }
    output_.write_back();
  }

 private:
  // Computes and encodes columns [begin, end) of the hidden layer. The form of most encoders has code without a choice.
  void compute_hidden(int64_t begin, int64_t end) const {
    constexpr bool kCoarse = Product::kMethod != Method::kFloat32;
    if (p_.weight_up)
      for (int64_t column = begin; column < end; column += kUpColumns) {
        const int64_t stop = min(end, column + kUpColumns);
        multiply_up(column, stop);
        multiply_in(begin, column, stop, [&](int64_t row, int64_t c, Vec x) AFT_LAMBDA_INLINE {
          return activate<kCoarse>(p_.activation, x) * load(up_ + row * kUpColumns + c - column);
        });
      }
    else if (p_.activation == Activation::kGelu)
      multiply_in(begin, begin, end,
                  [](int64_t, int64_t, Vec x) AFT_LAMBDA_INLINE { return activate<kCoarse>(Activation::kGelu, x); });
    else
      multiply_in(begin, begin, end,
                  [&](int64_t, int64_t, Vec x) AFT_LAMBDA_INLINE { return activate<kCoarse>(p_.activation, x); });
    if constexpr (Product::kScaled)
      for (int64_t r = 0; r < rows_; ++r) Product::encode(sums_ + r * kSums, end - begin, hidden_.words(0, r));
  }

  // up = norm(X) W_up + b_up in columns [column, stop).
  void multiply_up(int64_t column, int64_t stop) const {
    for (int64_t chunk = 0; chunk * Left::kChunk < width_; ++chunk)
      multiply(left_, chunk, *p_.weight_up, chunk, column, stop, rows_,
               [&](int64_t row, int64_t tile, const Vec(&values)[kTileVectors]) AFT_LAMBDA_INLINE {
                 for (int v = 0; v < kTileVectors; ++v) {
                   const int64_t c = tile + v * kLanes;
                   float* up = up_ + row * kUpColumns + c - column;
                   Vec sum = values[v];
                   if (chunk > 0)
                     sum += load(up);
                   else if (p_.bias_up)
                     sum += load(p_.bias_up + c, hidden_width_ - c);
                   store(up, sum);
                 }
               });
  }

  // Encodes hidden(row, column, norm(X) W_in + b_in) in columns [column, stop) of the chunk that starts at `begin`, or
  // leaves it in the sums where a row is encoded by its range.
  template <class HiddenOf>
  void multiply_in(int64_t begin, int64_t column, int64_t stop, const HiddenOf& hidden) const {
    const int64_t last = ceil_div(width_, Left::kChunk) - 1;
    for (int64_t chunk = 0; chunk < last; ++chunk)
      multiply(left_, chunk, *p_.weight_in, chunk, column, stop, rows_,
               [&](int64_t row, int64_t tile, const Vec(&values)[kTileVectors]) AFT_LAMBDA_INLINE {
                 for (int v = 0; v < kTileVectors; ++v) {
                   float* sum = sums_ + row * kSums + tile - begin + v * kLanes;
                   store(sum, chunk == 0 ? values[v] : values[v] + load(sum));
                 }
               });
    multiply(left_, last, *p_.weight_in, last, column, stop, rows_,
             [&](int64_t row, int64_t tile, const Vec(&values)[kTileVectors]) AFT_LAMBDA_INLINE {
               float* sum = sums_ + row * kSums + tile - begin;
               Vec activated[kTileVectors];
               for (int v = 0; v < kTileVectors; ++v) {
                 const int64_t c = tile + v * kLanes;
                 Vec x = values[v];
                 if (p_.bias_in) x += load(p_.bias_in + c, hidden_width_ - c);
                 if (last > 0) x += load(sum + v * kLanes);
                 activated[v] = hidden(row, c, x);
               }
               encode_tile(activated, row, tile - begin, sum);
             });
  }

  AFT_INLINE void encode_tile(const Vec (&activated)[kTileVectors], int64_t row, int64_t column, float* sum) const {
    if constexpr (Product::kScaled)
      for (int v = 0; v < kTileVectors; ++v) store(sum + v * kLanes, activated[v]);
    else
      Product::encode_panel(activated, column, hidden_.words(0, row));
  }

  const LayerNormFeedForward& p_;
  int64_t width_, hidden_width_, rows_;
  float* row_;
  Left left_, hidden_;
  float *sums_, *up_, *converted_;
  const float* input_;
  OutputRows output_;
};

}  // namespace

void layer_norm_feed_forward(const LayerNormFeedForward& p, const Parallel& parallel) {
  with_method(p.weight_in->method, [&](auto product) {
    using Product = decltype(product);
    using Block = FeedForwardBlock<Product>;
    for_row_blocks<Product>(p.rows, Block::fixed_floats(p), Block::floats_per_row(p), parallel,
                            [&](int64_t first, int64_t rows, float* memory) { Block(p, first, rows, memory).run(); });
  });
}

}  // namespace aft::AFT_ISA
