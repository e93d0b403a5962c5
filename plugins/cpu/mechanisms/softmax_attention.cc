// Softmax attention ("Attention Is All You Need", Vaswani et al., arXiv 1706.03762, equation 1), per head.
//
// Computes: Y_t = sum_u exp(s_tu) V_u / (sum_u exp(s_tu) + exp(sink)),  s_tu = cap(scale Q_t . K_u) + bias(u - t)
//           over the keys u of a window, t - window_left <= u <= t + window_right; cap(x) = c tanh(x / c). Q and K may be
//           rotated by their positions (RoFormer, Su et al., arXiv 2104.09864, equation 34).
// Cost:     bound by multiply-adds: d + e for each pair of a query and a key that it sees, beside an exponential.
// Method:   the keys and values of a head are packed once for the products. A task takes a block of queries, of all heads
//           that share a key, through tiles of up to 256 keys: a product gives the logits of a tile, a pass its weights,
//           and a second product their sums. Tiles outside the window are not touched. Rows are rotated in the first-level
//           cache before they are packed. Scratch memory grows with the tokens, not with their square.
// Numerics: weights are relative to the largest logit so far; when that rises, the sums are multiplied by the exponential
//           of the difference. Sums over a tile are added to those before it, so no chain of additions is long. A row that
//           sees no key is 0.
// Rejected: a first pass for the largest logit of each row, which computes every product with the keys twice.
// See:      matmul/matrix_product.h

#include "matmul/matrix_product.h"
#include "matmul/product_fp32.h"
#include "simd/math.h"
#include "simd/parallel.h"
#include "simd/transpose.h"
#include "sums/head_rows.h"
#include "sums/running_softmax.h"

namespace aft::AFT_ISA {
namespace {

using Product = Float32Product;
using Left = LeftRows<Product>;

// Keys of a tile: as many as one chunk of the product of weights and values has.
constexpr int64_t kTileKeys = Left::kChunk;
// Rows of a task: whole tiles of the products, few enough that their queries, weights and sums stay in the
// second-level cache.
constexpr int64_t kTaskRows = 8 * kTileRows;
// Queries of a strip, whose keys a task packs for itself.
constexpr int64_t kStripTokens = 512;

// The sizes of a call.
struct Sizes : GroupShapes {
  int64_t width, value_width;  // of a head
  int64_t row;                 // floats of a row of a head that was rotated
  int64_t keys;
  int64_t chunks;         // of the channels of a head, for the product of queries and keys
  int64_t value_columns;  // value_width rounded up to whole panels
  int64_t block_tokens;   // queries of one head in a task

  explicit Sizes(const SoftmaxAttention& p)
      : GroupShapes(p),
        width(query.width),
        value_width(value.width),
        row(round_up(query.width, kLanes)),
        keys(key_tokens_of(p)),
        chunks(ceil_div(width, Left::kChunk)),
        value_columns(round_up(value_width, kPanel)),
        block_tokens(min(p.tokens, max(1, kTaskRows / group))) {}

  // Of the keys of a panel while they are rotated.
  int64_t rotation_floats() const { return kPanel * row; }
  int64_t rows() const { return block_tokens * group; }
};

// Keys [first, end) of a head and their values, packed; first is a multiple of kTileKeys. Keys lie in panels of kPanel,
// the channels one after the other; values in tiles, of each the panels of kPanel channels, the keys one after the other.
struct Packed {
  float *keys, *values;
  int64_t first, end;

  static int64_t key_floats(const Sizes& sizes, int64_t count) { return round_up(count, kPanel) * sizes.width; }
  static int64_t floats(const Sizes& sizes, int64_t count) {
    return key_floats(sizes, count) + count * sizes.value_columns;
  }
  Packed(const Sizes& sizes, float* memory, int64_t first, int64_t end)
      : keys(memory), values(memory + key_floats(sizes, end - first)), first(first), end(end) {}

  float* keys_at(const Sizes& sizes, int64_t key) const { return keys + (key - first) * sizes.width; }
  // The start of the tile that holds a key, and the number of keys in it.
  float* tile_at(const Sizes& sizes, int64_t key) const {
    return values + (key - first) / kTileKeys * kTileKeys * sizes.value_columns;
  }
  int64_t tile_keys(int64_t key) const { return min(kTileKeys, end - key / kTileKeys * kTileKeys); }
};

// Copies a row of a head and rotates its first channels by its position.
template <class T>
void rotate(const SoftmaxAttention& p, const T* from, int64_t width, int64_t position, float* row) {
  const int64_t pairs = p.rotary_pairs, at = max(0, min(position, p.positions - 1)) * pairs;
  const T *cos = static_cast<const T*>(p.cos_cache) + at, *sin = static_cast<const T*>(p.sin_cache) + at;
  for (int64_t c = 0; c < width; c += kLanes) store(row + c, load(from + c, width - c));
  if (p.interleaved) {
    for (int64_t c = 0; c < pairs; ++c) {
      const float a = row[2 * c], b = row[2 * c + 1], cosine = to_float(cos[c]), sine = to_float(sin[c]);
      row[2 * c] = a * cosine - b * sine;
      row[2 * c + 1] = b * cosine + a * sine;
    }
    return;
  }
  for (int64_t c = 0; c < pairs; c += kLanes) {
    const int64_t count = pairs - c;
    const Vec a = load(row + c, count), b = load(row + pairs + c, count);
    const Vec cosine = load(cos + c, count), sine = load(sin + c, count);
    store(row + c, a * cosine - b * sine, count);
    store(row + pairs + c, b * cosine + a * sine, count);
  }
}

// Packs keys [first, first + kPanel) of a head.
template <class T>
void pack_keys(const T* key, int64_t stride, int64_t width, int64_t count, float* panel) {
  for (int64_t c = 0; c < width; c += kLanes)
    for (int64_t v = 0; v < kTileVectors; ++v) {
      Vec rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t u = v * kLanes + i;
        rows[i] = u < count ? load(key + u * stride + c, width - c) : Vec{};
        prefetch(key + (u + kPrefetchRows) * stride + c);
      }
      transpose(rows);
      for (int64_t i = 0; i < min(kLanes, width - c); ++i) store(panel + (c + i) * kPanel + v * kLanes, rows[i]);
    }
}

// Packs a tile of `count` values.
template <class T>
void pack_values(const T* value, int64_t stride, const Sizes& sizes, int64_t count, float* tile) {
  for (int64_t c = 0; c < sizes.value_columns; c += kPanel, tile += count * kPanel)
    for (int64_t u = 0; u < count; ++u)
      for (int64_t v = 0; v < kPanel; v += kLanes) {
        prefetch(value + (u + kPrefetchRows) * stride + c + v);
        store(tile + u * kPanel + v, load(value + u * stride + c + v, max(0, sizes.value_width - c - v)));
      }
}

// The rows of a task: their logits or weights in a tile, the sums of values, and what these are relative to.
struct TaskRows {
  float *queries, *weights, *sums, *totals, *largest;
  int64_t columns;  // of sums

  static int64_t floats(const Sizes& sizes) {
    return sizes.rows() * (Left::kPitch * (sizes.chunks + 1) + sizes.value_columns + 2);
  }
  TaskRows(float* memory, const Sizes& sizes)
      : queries(memory),
        weights(queries + sizes.rows() * Left::kPitch * sizes.chunks),
        sums(weights + sizes.rows() * Left::kPitch),
        totals(sums + sizes.rows() * sizes.value_columns),
        largest(totals + sizes.rows()),
        columns(sizes.value_columns) {}
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

// The logits of the keys that a row sees, from their products with the query; returns the largest.
float finish_logits(const SoftmaxAttention& p, const float* bias, int64_t position, const Span& span, float* logits) {
  Vec top = splat(kNoKey);
  const int64_t begin = span.begin - span.first, end = span.end - span.first;
  for (int64_t c = begin / kLanes * kLanes; c < end; c += kLanes) {
    Vec x = load(logits + c);
    if (p.softcap > 0) x = p.softcap * tanh(x / p.softcap);
    if (bias)
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t distance = span.first + c + i - position;
        x[i] += bias[max(-p.bias_reach, min(distance, p.bias_reach)) + p.bias_reach];
      }
    if (p.softcap > 0 || bias) store(logits + c, x);
    if (c < begin || c + kLanes > end) x = lanes_inside(c, begin, end) ? x : splat(kNoKey);
    top = raised_by(top, x);
  }
  return max_lanes(top);
}

// The logits become weights relative to `top`, 0 for keys that the row does not see; returns their sum.
float weigh(float top, const Span& span, float* logits) {
  Vec total{};
  const int64_t begin = span.begin - span.first, end = span.end - span.first, width = round_up(span.count, kLanes);
  int64_t c = 0;
  for (; c + kLanes <= begin; c += kLanes) store(logits + c, Vec{});
  for (; c < end; c += kLanes) {
    Vec weight = exp(load(logits + c) - top);
    if (c < begin || c + kLanes > end) weight = lanes_inside(c, begin, end) ? weight : Vec{};
    store(logits + c, weight);
    total += weight;
  }
  for (; c < width; c += kLanes) store(logits + c, Vec{});
  return sum_lanes(total);
}

// Packs the tile that begins with key `first`.
template <class T>
void pack_tile(const SoftmaxAttention& p, const Sizes& sizes, int64_t document, int64_t kv_head, int64_t first,
               const Packed& packed, float* rotated) {
  const int64_t key_stride = sizes.key.stride, value_stride = sizes.value.stride;
  const int64_t count = packed.tile_keys(first), row = document * sizes.keys + first;
  const T* key = static_cast<const T*>(p.key) + row * key_stride + kv_head * sizes.width;
  const T* value = static_cast<const T*>(p.value) + row * value_stride + kv_head * sizes.value_width;
  for (int64_t u = 0; u < count; u += kPanel) {
    const int64_t in_panel = min(kPanel, count - u);
    float* panel = packed.keys_at(sizes, first + u);
    if (p.cos_cache) {
      for (int64_t i = 0; i < in_panel; ++i) {
        prefetch(key + (u + i + kPrefetchRows) * key_stride);
        rotate(p, key + (u + i) * key_stride, sizes.width, first + u + i, rotated + i * sizes.row);
      }
      pack_keys(rotated, sizes.row, sizes.width, in_panel, panel);
    } else {
      pack_keys(key + u * key_stride, key_stride, sizes.width, in_panel, panel);
    }
  }
  pack_values(value, value_stride, sizes, count, packed.tile_at(sizes, first));
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
template <class T>
class Block {
 public:
  Block(const Shared& shared, const Packed& packed, int64_t document, int64_t kv_head, int64_t first, int64_t tokens,
        float* memory)
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
        rotated_(memory + TaskRows::floats(sizes_)) {}

  void run(const Output<T>& output) {
    start();
    const int64_t end = last_key(p_, document_, first_ + tokens_);
    for (int64_t u = first_key(p_, first_) / kPanel * kPanel, next; u < end; u = next) {
      next = min(end, (u / kTileKeys + 1) * kTileKeys);
      multiply_keys(u, next - u);
      weigh_tile(u, next - u);
      add_values(u, next - u);
    }
    write(output);
    if (p_.log_sum) write_log_sums();
  }

 private:
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
      if (p_.cos_cache) {
        prefetch(row + kPrefetchRows * p_.channels);
        rotate(p_, row, sizes_.width, position_of(r), rotated_);
        set_query(left, r, rotated_, sizes_.row, scale);
      } else {
        set_query(left, r, row, p_.channels, scale);
      }
      // A sink is a key that was seen before all others, and has the value 0.
      rows_.largest[r] = sink ? sink[head_of(r)] : kNoKey;
      rows_.totals[r] = sink ? 1.0f : 0.0f;
    }
    zero(rows_.sums, count_ * rows_.columns);
  }

  template <class From>
  void set_query(const Left& left, int64_t r, const From* row, int64_t stride, float scale) {
    for (int64_t chunk = 0; chunk < sizes_.chunks; ++chunk) {
      float* words = left.words(chunk, r);
      const int64_t channels = min(Left::kChunk, sizes_.width - chunk * Left::kChunk);
      for (int64_t c = 0; c < channels; c += kLanes) {
        prefetch(row + kPrefetchRows * stride + chunk * Left::kChunk + c);
        store(words + c, load(row + chunk * Left::kChunk + c, channels - c) * scale);
      }
    }
  }

  // The products of the queries with keys [first, first + count).
  void multiply_keys(int64_t first, int64_t count) {
    const float* keys = packed_.keys_at(sizes_, first);
    const Left left(rows_.queries, count_);
    for (int64_t chunk = 0; chunk < sizes_.chunks; ++chunk) {
      const int64_t done = chunk * Left::kChunk, channels = min(Left::kChunk, sizes_.width - done);
      const auto panel_at = [&](int64_t i) AFT_LAMBDA_INLINE {
        return Panel<Product>{keys + i * kPanel * sizes_.width + done * kPanel, channels, i * kPanel, nullptr, nullptr};
      };
      const auto sink = [&](int64_t row, int64_t column, const Vec(&sums)[kTileVectors]) AFT_LAMBDA_INLINE {
        float* logits = rows_.weights + row * Left::kPitch + column;
        for (int v = 0; v < kTileVectors; ++v)
          store(logits + v * kLanes, chunk ? load(logits + v * kLanes) + sums[v] : sums[v]);
      };
      multiply_panels<Product>(left.words(chunk, 0), count_, ceil_div(count, kPanel), panel_at, sink);
    }
  }

  void weigh_tile(int64_t first, int64_t count) {
    const int64_t length = key_length_of(p_, document_);
    for (int64_t r = 0; r < count_; ++r) {
      const int64_t position = position_of(r);
      float* logits = rows_.weights + r * Left::kPitch;
      Span span{first, count, first, min(first + count, length)};
      if (p_.window_left >= 0) span.begin = max(first, position - p_.window_left);
      if (p_.window_right >= 0) span.end = min(span.end, position + p_.window_right + 1);
      if (span.begin >= span.end) {
        zero(logits, round_up(count, kLanes));
        continue;
      }
      const float* bias = shared_.bias ? shared_.bias + head_of(r) * (2 * p_.bias_reach + 1) : nullptr;
      const float before = rows_.largest[r];
      const float in_tile = finish_logits(p_, bias, position, span, logits);
      const float top = in_tile > before ? in_tile : before;
      const float total = weigh(top, span, logits);
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
    const int64_t height = packed_.tile_keys(first);
    const float* words = packed_.tile_at(sizes_, first) + first % kTileKeys * kPanel;
    const auto panel_at = [&](int64_t i) AFT_LAMBDA_INLINE {
      return Panel<Product>{words + i * height * kPanel, count, i * kPanel, nullptr, nullptr};
    };
    const auto sink = [&](int64_t row, int64_t column, const Vec(&sums)[kTileVectors]) AFT_LAMBDA_INLINE {
      float* to = rows_.sums + row * rows_.columns + column;
      for (int v = 0; v < kTileVectors; ++v) store(to + v * kLanes, load(to + v * kLanes) + sums[v]);
    };
    multiply_panels<Product>(rows_.weights, count_, sizes_.value_columns / kPanel, panel_at, sink);
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
  const Packed& packed_;
  const SoftmaxAttention& p_;
  const Sizes& sizes_;
  int64_t document_, kv_head_, first_, tokens_, count_;
  TaskRows rows_;
  float* rotated_;
};

// Attends the queries [first, end) of the heads that share one key and value.
template <class T>
void attend(const Shared& shared, const Packed& packed, int64_t document, int64_t kv_head, int64_t first, int64_t end,
            float* memory) {
  const SoftmaxAttention& p = shared.p;
  const Sizes& sizes = shared.sizes;
  const HeadShape& shape = sizes.output;
  const Output<T> output(p.output, p.batch * p.tokens * shape.stride, shape.width);
  const int64_t length = min(length_of(p, document), end);
  for (int64_t t = first; t < length; t += sizes.block_tokens)
    Block<T>(shared, packed, document, kv_head, t, min(sizes.block_tokens, length - t), memory).run(output);
  clear_rows(shape, output, document * p.tokens, max(first, length), end, kv_head * sizes.group, sizes.group);
  if (p.log_sum)
    for (int64_t t = max(first, length); t < end; ++t)
      for (int64_t h = kv_head * sizes.group; h < (kv_head + 1) * sizes.group; ++h)
        p.log_sum[(document * p.tokens + t) * sizes.heads + h] = -__builtin_inff();
  output.fence();
}

// All keys are packed first, for every task.
template <class T>
void attend_all(const Shared& shared, const Parallel& parallel) {
  const SoftmaxAttention& p = shared.p;
  const Sizes& sizes = shared.sizes;
  const int64_t heads = sizes.kv_heads, floats = Packed::floats(sizes, sizes.keys);
  const Scratch memory(p.batch * heads * floats);
  const auto packed = [&](int64_t b, int64_t head) {
    return Packed(sizes, memory.data() + (b * heads + head) * floats, 0, key_length_of(p, b));
  };
  const int64_t tiles = ceil_div(sizes.keys, kTileKeys), blocks = ceil_div(p.tokens, sizes.block_tokens);
  parallel_for(parallel, p.batch * heads * tiles, [&](int64_t task) {
    const int64_t b = task / tiles / heads, head = task / tiles % heads, first = task % tiles * kTileKeys;
    if (first < key_length_of(p, b))
      pack_tile<T>(p, sizes, b, head, first, packed(b, head), task_memory(sizes.rotation_floats()));
  });
  parallel_for(parallel, p.batch * heads * blocks, [&](int64_t task) {
    const int64_t b = task / blocks / heads, head = task / blocks % heads, first = task % blocks * sizes.block_tokens;
    attend<T>(shared, packed(b, head), b, head, first, min(p.tokens, first + sizes.block_tokens),
              task_memory(TaskRows::floats(sizes) + sizes.rotation_floats()));
  });
}

// Each task packs the keys of a strip of queries, in memory that stays in the thread's cache. Keys near the border of two
// strips are packed twice.
template <class T>
void attend_in_strips(const Shared& shared, const Parallel& parallel) {
  const SoftmaxAttention& p = shared.p;
  const Sizes& sizes = shared.sizes;
  const int64_t heads = sizes.kv_heads, strips = ceil_div(p.tokens, kStripTokens);
  const int64_t most = min(sizes.keys, kStripTokens + p.window_left + p.window_right + kTileKeys);
  parallel_for(parallel, p.batch * heads * strips, [&](int64_t task) {
    // The heads of a strip follow each other: their rows share pages of memory.
    const int64_t b = task / heads / strips, first = task / heads % strips * kStripTokens, head = task % heads;
    const int64_t end = min(p.tokens, first + kStripTokens);
    const int64_t last = last_key(p, b, end), begin = min(first_key(p, first), last) / kTileKeys * kTileKeys;
    float* memory = task_memory(Packed::floats(sizes, most) + TaskRows::floats(sizes) + sizes.rotation_floats());
    float* rows = memory + Packed::floats(sizes, most);
    const Packed packed(sizes, memory, begin, last);
    for (int64_t u = begin; u < last; u += kTileKeys)
      pack_tile<T>(p, sizes, b, head, u, packed, rows + TaskRows::floats(sizes));
    attend<T>(shared, packed, b, head, first, end, rows);
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
  const bool is_narrow =
      p.window_left >= 0 && p.window_right >= 0 && p.window_left + p.window_right <= 2 * kStripTokens;
  const Scratch beside(sizes.heads + biases);
  with_element(p.element, [&](auto element) {
    using T = decltype(element);
    const Shared shared{p, sizes, widened<T>(p.sink, sizes.heads, beside.data()),
                        widened<T>(p.bias, biases, beside.data() + sizes.heads)};
    if (is_narrow)
      attend_in_strips<T>(shared, parallel);
    else
      attend_all<T>(shared, parallel);
  });
}

}  // namespace aft::AFT_ISA
