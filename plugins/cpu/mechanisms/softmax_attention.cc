// Softmax attention ("Attention Is All You Need", Vaswani et al., arXiv 1706.03762, equation 1), per head.
//
// Computes: Y_t = sum_u exp(s_tu) V_u / (sum_u exp(s_tu) + exp(sink)),  s_tu = cap(scale Q_t . K_u) + bias(u - t)
//           over the keys u of a window, t - window_left <= u <= t + window_right; cap(x) = c tanh(x / c). Q and K may be
//           rotated by their positions (RoFormer, Su et al., arXiv 2104.09864, equation 34).
// Cost:     bound by multiply-adds: d + e for each pair of a query and a key that it sees, beside an exponential.
// Method:   the keys and values of a head are packed once for the products, both of which are in floating point. A task takes a block of queries, of all heads
//           that share a key, through tiles of up to 256 keys: a product gives the logits of a tile, a pass its weights,
//           and a second product their sums. Tiles outside the window are not touched. Rows are rotated in the first-level
//           cache before they are packed. Scratch memory grows with the tokens, not with their square.
// Numerics: weights are relative to the largest logit so far; when that rises, the sums are multiplied by the exponential
//           of the difference. Sums over a tile are added to those before it, so no chain of additions is long. A row that
//           sees no key is 0.
// Rejected: products in integers of 8 or 16 bits. A row of weights has one step there: beside one key of weight 1,
//           thousands of keys with weights below 1/4096 would be lost, and these may have half of the sum.
//           A first pass for the largest logit of each row, which computes every product with the keys twice.
// See:      sums/packed_keys.h, matmul/matrix_product.h

#include "matmul/matrix_product.h"
#include "simd/math.h"
#include "simd/parallel.h"
#include "sums/packed_keys.h"
#include "sums/running_softmax.h"

namespace aft::AFT_ISA {
namespace {

// Rows of a task: whole tiles of the products, few enough that their queries, weights and sums stay in the
// second-level cache.
constexpr int64_t kTaskRows = 8 * kTileRows;
// Rows of a task in a narrow window: every row of a task meets all keys that one of them sees.
constexpr int64_t kWindowRows = 2 * kTileRows;
// Queries of a strip, whose keys a task packs for itself.
constexpr int64_t kStripTokens = 512;

// Whether a window is so narrow that tasks pack the keys that they see.
inline bool is_narrow(const SoftmaxAttention& p) {
  return p.window_left >= 0 && p.window_right >= 0 && p.window_left + p.window_right <= 2 * kStripTokens;
}

// The sizes of a call.
struct Sizes : GroupShapes {
  KeyHeads packed;
  int64_t width, value_width;  // of a head
  int64_t keys;
  int64_t block_tokens;  // queries of one head in a task

  explicit Sizes(const SoftmaxAttention& p)
      : GroupShapes(p),
        packed{key, value, round_up(value.width, kPanel)},
        width(query.width),
        value_width(value.width),
        keys(key_tokens_of(p)),
        block_tokens(min(p.tokens, max(1, (is_narrow(p) ? kWindowRows : kTaskRows) / group))) {}

  // Of the keys of a panel while they are rotated.
  int64_t rotation_floats() const { return kPanel * key.padded; }
  int64_t rows() const { return block_tokens * group; }
};

// The rows of a task: their queries and weights as left sides of the products, the logits of a tile, the sums of values,
// and what these are relative to.
template <class Product>
struct TaskRows {
  static constexpr int64_t kPitch = kTileKeys<Product> + 16;  // of logits
  // Weights whose words are as wide as logits take their place.
  static constexpr bool kInPlace = Product::kPerWord == 1;
  static_assert(!kInPlace || kPitch == LeftRows<Product>::kPitch);

  float *queries, *logits, *weights, *sums, *totals, *largest;
  int64_t columns;  // of sums

  static int64_t floats(const Sizes& sizes) {
    return sizes.rows() * (LeftRows<Product>::floats_per_row(sizes.width) + kPitch +
                           (kInPlace ? 0 : LeftRows<Product>::kPitch) + sizes.packed.value_columns + 2);
  }
  TaskRows(float* memory, const Sizes& sizes)
      : queries(memory),
        logits(queries + sizes.rows() * LeftRows<Product>::floats_per_row(sizes.width)),
        weights(kInPlace ? logits : logits + sizes.rows() * kPitch),
        sums(weights + sizes.rows() * LeftRows<Product>::kPitch),
        totals(sums + sizes.rows() * sizes.packed.value_columns),
        largest(totals + sizes.rows()),
        columns(sizes.packed.value_columns) {}
};

// One row of a tile: keys [first, first + count), of which it sees [begin, end).
struct Span {
  int64_t first, count, begin, end;
};

// The numbers of a vector's lanes.
AFT_INLINE IntVec lane_numbers() {
  IntVec numbers{};
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  return numbers;
}

// Lanes of the vector at column c that lie in [begin, end).
AFT_INLINE IntVec lanes_inside(int64_t c, int64_t begin, int64_t end) {
  const IntVec numbers = lane_numbers();
  return (numbers >= static_cast<int32_t>(begin - c)) & (numbers < static_cast<int32_t>(end - c));
}

// The logits of the keys that a row sees, from their products with the query.
void finish_logits(const SoftmaxAttention& p, const float* bias, int64_t position, const Span& span, float* logits) {
  for (int64_t c = (span.begin - span.first) / kLanes * kLanes; c < span.end - span.first; c += kLanes) {
    Vec x = load(logits + c);
    if (p.softcap > 0) x = p.softcap * tanh(x / p.softcap);
    if (bias)
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t distance = span.first + c + i - position;
        x[i] += bias[max(-p.bias_reach, min(distance, p.bias_reach)) + p.bias_reach];
      }
    store(logits + c, x);
  }
}

// The largest logit of the keys that a row sees.
float largest_logit(const Span& span, const float* logits) {
  Vec tops[kTileVectors] = {splat(kNoKey), splat(kNoKey)};
  const int64_t begin = span.begin - span.first, end = span.end - span.first;
  for (int64_t c = begin / kPanel * kPanel; c < end; c += kPanel) {
    const bool is_inside = c >= begin && c + kPanel <= end;
    for (int v = 0; v < kTileVectors; ++v) {
      const Vec x = load(logits + c + v * kLanes);
      const Vec seen = is_inside ? x : lanes_inside(c + v * kLanes, begin, end) ? x : splat(kNoKey);
      tops[v] = raised_by(tops[v], seen);
    }
  }
  return max_lanes(raised_by(tops[0], tops[1]));
}

// The weights relative to `top` of the logits of a row, encoded; 0 for keys that it does not see, up to `width`, which is
// a multiple of kPanel. Returns their sum.
template <class Product>
float weigh(float top, const Span& span, int64_t width, const float* logits, float* words) {
  Vec totals[kTileVectors] = {};
  const int64_t begin = span.begin - span.first, end = span.end - span.first;
  const Vec none[kTileVectors] = {};
  int64_t c = 0;
  for (; c + kPanel <= begin; c += kPanel) Product::encode_panel(none, c, words);
  for (; c < end; c += kPanel) {
    Vec weights[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) weights[v] = exp(load(logits + c + v * kLanes) - top);
    if (c < begin || c + kPanel > end)
      for (int v = 0; v < kTileVectors; ++v) weights[v] = lanes_inside(c + v * kLanes, begin, end) ? weights[v] : Vec{};
    Product::encode_panel(weights, c, words);
    for (int v = 0; v < kTileVectors; ++v) totals[v] += weights[v];
  }
  for (; c < width; c += kPanel) Product::encode_panel(none, c, words);
  return sum_lanes(totals[0] + totals[1]);
}

// The first key that queries from `first` on see, and the end of those that queries before `end` see.
inline int64_t first_key(const SoftmaxAttention& p, int64_t first) {
  return p.window_left < 0 ? 0 : max(0, first + p.query_start - p.window_left);
}
inline int64_t last_key(const SoftmaxAttention& p, int64_t document, int64_t end) {
  const int64_t length = key_length_of(p, document);
  return p.window_right < 0 ? length : max(0, min(length, end + p.query_start + p.window_right));
}

// What all tasks read: the call, and its sink and bias in float32 or null.
struct Shared {
  const SoftmaxAttention& p;
  const Sizes& sizes;
  const float *sink, *bias;
};

// A block of queries of the heads that share one key and value.
template <class Product, class T>
class Block {
 public:
  Block(const Shared& shared, const PackedKeys<Product>& packed, int64_t document, int64_t kv_head, int64_t first,
        int64_t tokens, float* memory)
      : shared_(shared),
        packed_(packed),
        p_(shared.p),
        sizes_(shared.sizes),
        document_(document),
        kv_head_(kv_head),
        first_(first),
        tokens_(tokens),
        count_(tokens_ * sizes_.group),
        rows_(memory, sizes_),
        rotated_(memory + TaskRows<Product>::floats(sizes_)) {}

  void run(const Output<T>& output) {
    start();
    const int64_t end = last_key(p_, document_, first_ + tokens_);
    for (int64_t u = first_key(p_, first_) / kPanel * kPanel, next; u < end; u = next) {
      next = min(end, (u / kTile + 1) * kTile);
      multiply_keys(u, next - u);
      weigh_tile(u, next - u);
      add_values(u, next - u);
    }
    write(output);
    if (p_.log_sum) write_log_sums();
  }

 private:
  using Left = LeftRows<Product>;
  using Rows = TaskRows<Product>;
  static constexpr int64_t kTile = kTileKeys<Product>;

  int64_t token_of(int64_t row) const { return first_ + row % tokens_; }
  int64_t position_of(int64_t row) const { return token_of(row) + p_.query_start; }
  int64_t head_of(int64_t row) const { return kv_head_ * sizes_.group + row / tokens_; }

  void start() {
    const T* query = static_cast<const T*>(p_.query);
    const float* sink = shared_.sink;
    const float scale = p_.scale > 0 ? p_.scale : 1.0f / __builtin_sqrtf(static_cast<float>(sizes_.width));
    const Left left(rows_.queries, count_);
    for (int64_t r = 0; r < count_; ++r) {
      const T* row = query + (document_ * p_.tokens + token_of(r)) * p_.channels + head_of(r) * sizes_.width;
      prefetch(row + kPrefetchRows * p_.channels);
      if (p_.cos_cache)
        rotate(p_, row, sizes_.width, position_of(r), rotated_);
      else
        copy(row);
      for (int64_t c = 0; c < sizes_.width; c += kLanes) store(rotated_ + c, load(rotated_ + c) * scale);
      left.set(r, rotated_, sizes_.width);
      // A sink is a key that was seen before all others, and has the value 0.
      rows_.largest[r] = sink ? sink[head_of(r)] : kNoKey;
      rows_.totals[r] = sink ? 1.0f : 0.0f;
    }
    zero(rows_.sums, count_ * rows_.columns);
  }

  void copy(const T* row) {
    for (int64_t c = 0; c < sizes_.width; c += kLanes) store(rotated_ + c, load(row + c, sizes_.width - c));
  }

  // The products of the queries with keys [first, first + count).
  void multiply_keys(int64_t first, int64_t count) {
    const Left left(rows_.queries, count_);
    for (int64_t chunk = 0; chunk * Left::kChunk < sizes_.width; ++chunk) {
      const int64_t steps = steps_of<Product>(min(Left::kChunk, sizes_.width - chunk * Left::kChunk));
      const auto panel_at = [&](int64_t i) AFT_LAMBDA_INLINE {
        return Panel<Product>{packed_.panel_at(first + i * kPanel, chunk), steps, i * kPanel, nullptr, nullptr};
      };
      const auto sink = [&](int64_t row, int64_t column, const Vec(&sums)[kTileVectors]) AFT_LAMBDA_INLINE {
        float* logits = rows_.logits + row * Rows::kPitch + column;
        for (int v = 0; v < kTileVectors; ++v)
          store(logits + v * kLanes, chunk ? load(logits + v * kLanes) + sums[v] : sums[v]);
      };
      multiply_panels<Product>(left.words(chunk, 0), count_, ceil_div(count, kPanel), panel_at, sink);
    }
  }

  void weigh_tile(int64_t first, int64_t count) {
    const int64_t length = key_length_of(p_, document_), width = round_up(count, kPanel);
    for (int64_t r = 0; r < count_; ++r) {
      const int64_t position = position_of(r);
      float *logits = rows_.logits + r * Rows::kPitch, *words = rows_.weights + r * Left::kPitch;
      Span span{first, count, first, min(first + count, length)};
      if (p_.window_left >= 0) span.begin = max(first, position - p_.window_left);
      if (p_.window_right >= 0) span.end = min(span.end, position + p_.window_right + 1);
      if (span.begin >= span.end) {
        zero(words, width / Product::kPerWord);
        continue;
      }
      const float* bias = shared_.bias ? shared_.bias + head_of(r) * (2 * p_.bias_reach + 1) : nullptr;
      const float before = rows_.largest[r];
      if (p_.softcap > 0 || bias) finish_logits(p_, bias, position, span, logits);
      const float in_tile = largest_logit(span, logits);
      const float top = in_tile > before ? in_tile : before;
      const float total = weigh<Product>(top, span, width, logits, words);
      rows_.largest[r] = top;
      if (top > before) {
        const Vec kept = exp(splat(before - top));
        rows_.totals[r] *= kept[0];
        float* sums = rows_.sums + r * rows_.columns;
        for (int64_t c = 0; c < rows_.columns; c += kLanes) store(sums + c, load(sums + c) * kept);
      }
      rows_.totals[r] += total;
    }
  }

  // Adds the weighted values of a tile to the sums.
  void add_values(int64_t first, int64_t count) {
    const int64_t height = steps_of<Product>(packed_.tile_keys(first)), steps = steps_of<Product>(count);
    const float* words = packed_.tile_at(first) + first % kTile / Product::kPerWord * kPanel;
    const auto panel_at = [&](int64_t i) AFT_LAMBDA_INLINE {
      return Panel<Product>{words + i * height * kPanel, steps, i * kPanel, nullptr, nullptr};
    };
    const auto sink = [&](int64_t row, int64_t column, const Vec(&sums)[kTileVectors]) AFT_LAMBDA_INLINE {
      float* to = rows_.sums + row * rows_.columns + column;
      for (int v = 0; v < kTileVectors; ++v) store(to + v * kLanes, load(to + v * kLanes) + sums[v]);
    };
    multiply_panels<Product>(rows_.weights, count_, rows_.columns / kPanel, panel_at, sink);
  }

  void write(const Output<T>& output) {
    for (int64_t r = 0; r < count_; ++r) {
      const float* sums = rows_.sums + r * rows_.columns;
      const float total = rows_.totals[r];
      const Vec scale = splat(total > 0 ? 1.0f / total : total == 0 ? 0.0f : total);  // NaN stays
      const int64_t at = ((document_ * p_.tokens + token_of(r)) * sizes_.heads + head_of(r)) * sizes_.value_width;
      for (int64_t c = 0; c < sizes_.value_width; c += kLanes)
        output.write(at + c, load(sums + c) * scale, sizes_.value_width - c);
    }
  }

  void write_log_sums() const {
    for (int64_t r = 0; r < count_; ++r)
      p_.log_sum[(document_ * p_.tokens + token_of(r)) * sizes_.heads + head_of(r)] =
          rows_.totals[r] == 0 ? -__builtin_inff() : rows_.largest[r] + __builtin_logf(rows_.totals[r]);
  }

  const Shared& shared_;
  const PackedKeys<Product>& packed_;
  const SoftmaxAttention& p_;
  const Sizes& sizes_;
  int64_t document_, kv_head_, first_, tokens_, count_;
  Rows rows_;
  float* rotated_;
};

// Attends the queries [first, end) of the heads that share one key and value.
template <class Product, class T>
void attend(const Shared& shared, const PackedKeys<Product>& packed, int64_t document, int64_t kv_head, int64_t first,
            int64_t end, float* memory) {
  const SoftmaxAttention& p = shared.p;
  const Sizes& sizes = shared.sizes;
  const HeadShape& shape = sizes.output;
  const Output<T> output(p.output, p.batch * p.tokens * shape.stride, shape.width);
  const int64_t length = min(length_of(p, document), end);
  for (int64_t t = first; t < length; t += sizes.block_tokens)
    Block<Product, T>(shared, packed, document, kv_head, t, min(sizes.block_tokens, length - t), memory).run(output);
  clear_rows(shape, output, document * p.tokens, max(first, length), end, kv_head * sizes.group, sizes.group);
  if (p.log_sum)
    for (int64_t t = max(first, length); t < end; ++t)
      for (int64_t h = kv_head * sizes.group; h < (kv_head + 1) * sizes.group; ++h)
        p.log_sum[(document * p.tokens + t) * sizes.heads + h] = -__builtin_inff();
  output.fence();
}

// All keys are packed first, for every task.
template <class Product, class T>
void attend_all(const Shared& shared, const Parallel& parallel) {
  const SoftmaxAttention& p = shared.p;
  const Sizes& sizes = shared.sizes;
  constexpr int64_t kTile = kTileKeys<Product>;
  const int64_t heads = sizes.kv_heads, floats = PackedKeys<Product>::floats(sizes.packed, sizes.keys);
  const Scratch memory(p.batch * heads * floats);
  const auto packed = [&](int64_t b, int64_t head) {
    return PackedKeys<Product>(sizes.packed, memory.data() + (b * heads + head) * floats, 0, key_length_of(p, b));
  };
  const int64_t tiles = ceil_div(sizes.keys, kTile), blocks = ceil_div(p.tokens, sizes.block_tokens);
  parallel_for(parallel, p.batch * heads * tiles, [&](int64_t task) {
    const int64_t b = task / tiles / heads, head = task / tiles % heads, first = task % tiles * kTile;
    if (first < key_length_of(p, b))
      pack_tile<Product, T>(p, sizes.packed, b, head, first, packed(b, head), task_memory(sizes.rotation_floats()));
  });
  parallel_for(parallel, p.batch * heads * blocks, [&](int64_t task) {
    const int64_t b = task / blocks / heads, head = task / blocks % heads, first = task % blocks * sizes.block_tokens;
    attend<Product, T>(shared, packed(b, head), b, head, first, min(p.tokens, first + sizes.block_tokens),
                       task_memory(TaskRows<Product>::floats(sizes) + sizes.rotation_floats()));
  });
}

// Each task packs the keys of a strip of queries, in memory that stays in the thread's cache. Keys near the border of two
// strips are packed twice.
template <class Product, class T>
void attend_in_strips(const Shared& shared, const Parallel& parallel) {
  const SoftmaxAttention& p = shared.p;
  const Sizes& sizes = shared.sizes;
  constexpr int64_t kTile = kTileKeys<Product>;
  const int64_t heads = sizes.kv_heads, strips = ceil_div(p.tokens, kStripTokens);
  const int64_t most = min(sizes.keys, kStripTokens + p.window_left + p.window_right + kTile);
  parallel_for(parallel, p.batch * heads * strips, [&](int64_t task) {
    // The heads of a strip follow each other: their rows share pages of memory.
    const int64_t b = task / heads / strips, first = task / heads % strips * kStripTokens, head = task % heads;
    const int64_t end = min(p.tokens, first + kStripTokens);
    const int64_t last = last_key(p, b, end), begin = min(first_key(p, first), last) / kTile * kTile;
    float* memory = task_memory(PackedKeys<Product>::floats(sizes.packed, most) + TaskRows<Product>::floats(sizes) +
                                sizes.rotation_floats());
    float* rows = memory + PackedKeys<Product>::floats(sizes.packed, most);
    const PackedKeys<Product> packed(sizes.packed, memory, begin, last);
    for (int64_t u = begin; u < last; u += kTile)
      pack_tile<Product, T>(p, sizes.packed, b, head, u, packed, rows + TaskRows<Product>::floats(sizes));
    attend<Product, T>(shared, packed, b, head, first, end, rows);
  });
}

// Copies an optional tensor to float32.
template <class T>
const float* widened(const void* tensor, int64_t count, float* memory) {
  if (!tensor) return nullptr;
  const T* from = static_cast<const T*>(tensor);
  for (int64_t i = 0; i < count; ++i) memory[i] = to_float(from[i]);
  return memory;
}

}  // namespace

void softmax_attention(const SoftmaxAttention& p, const Parallel& parallel) {
  const Sizes sizes(p);
  const int64_t biases = p.bias ? sizes.heads * (2 * p.bias_reach + 1) : 0;
  const Scratch beside(sizes.heads + biases);
  with_element(p.element, [&](auto element) {
    using T = decltype(element);
    const Shared shared{p, sizes, widened<T>(p.sink, sizes.heads, beside.data()),
                        widened<T>(p.bias, biases, beside.data() + sizes.heads)};
    with_method(float_method(p.methods), [&](auto product) {
      using Product = decltype(product);
      if constexpr (Product::kScaled)
        __builtin_trap();
      else if (is_narrow(p))
        attend_in_strips<Product, T>(shared, parallel);
      else
        attend_all<Product, T>(shared, parallel);
    });
  });
}

}  // namespace aft::AFT_ISA
