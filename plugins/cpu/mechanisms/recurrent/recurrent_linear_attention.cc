// Linear attention by a recurrence with decays and with the delta rule, per state head: RetNet, gated linear attention,
// Mamba-2, DeltaNet and Gated DeltaNet (arXiv 2307.08621, 2312.06635, 2405.21060, 2406.06484, 2412.06464).
//
// Computes: S = diag(exp(decay_t)) S;  new_t = value_t, or beta_t (value_t - S^T key_t);  S = S + key_t new_t^T
//           Y_t = scale query_t^T S, or query_t^T S / (query_t^T z + eps), z being S for values of 1
//           In reverse from the last token to the first. In both directions at once S is the sum of both, that of the
//           reverse direction before it takes up token t.
// Cost:     2 d_k d_v + 16 d_k + 12 d_v multiply-adds per token and head, and for the delta rules d_k d_v + 16 d_k +
//           8 d_v more: bound by them, at d_k = d_v = 32 nearly by memory as well.
// Method:   the tokens go through in chunks of 16 (chunk.h), the states staying in the first or second-level cache. A
//           task has a few heads of a document, so that it reads whole stretches of memory, or some columns of the
//           values of one head: given keys, the columns of a state do not depend on each other.
// Numerics: see chunk.h. Without decays and beta the sums of a document are compensated. In both directions at once the
//           first one's results wait in the output; those of float16 wait as float32 in memory of their own. With a
//           normalizer its denominators wait as well, one float per token and query head.
// See:      chunk.h, products.h

#include "mechanisms/recurrent/chunk.h"
#include "simd/compensated_sum.h"

namespace aft::AFT_ISA {
namespace {

// States in the second-level cache, of all heads of a task.
constexpr int64_t kTaskStateFloats = 1 << 17;

// How the work is cut: heads of a task, and tasks for the columns of the values. No bit of the results depends on it.
struct Tasks {
  int64_t heads, groups, panels, blocks;

  Tasks(const RecurrentLinearAttention& p, int threads) {
    const int64_t all = p.batch * p.state_heads;
    const int64_t fitting = kTaskStateFloats / max(1, p.key_width * p.value_width);
    heads = max(1, min(min(p.state_heads, fitting), all / threads));
    groups = ceil_div(p.state_heads, heads);
    const int64_t all_panels = ceil_div(p.value_width, kPanel);
    panels = ceil_div(all_panels, max(1, min(all_panels, threads / max(1, p.batch * groups))));
    blocks = ceil_div(all_panels, panels);
  }
  int64_t count(int64_t batch) const { return batch * groups * blocks; }
};

// Sums of the first direction that wait for the second one.
struct Waiting {
  float* sums;          // at the places of the output; null in one direction
  float* denominators;  // [batch, tokens, query_heads] for each block of columns
};

// The state of a head: panels of columns, each [padded, kPanel], then z, then as much for what their sums round off.
struct State {
  float* data;
  int64_t padded, panels;

  static int64_t floats(int64_t padded, int64_t panels) { return 2 * padded * (panels * kPanel + 1); }
  float* panel(int64_t i) const { return data + i * padded * kPanel; }
  float* z() const { return data + padded * panels * kPanel; }
  int64_t compensation() const { return padded * (panels * kPanel + 1); }
};

template <class T>
class Task {
 public:
  Task(const RecurrentLinearAttention& p, const Tasks& tasks, const ChunkShape& shape, const Waiting& waiting,
       const Output<T>& output, int64_t task)
      : p_(p),
        shape_(shape),
        waiting_(waiting),
        output_(output),
        b_(task / (tasks.groups * tasks.blocks)),
        first_head_(task / tasks.blocks % tasks.groups * tasks.heads),
        heads_(min(tasks.heads, p.state_heads - first_head_)),
        first_column_(task % tasks.blocks * tasks.panels * kPanel),
        columns_(min(tasks.panels * kPanel, p.value_width - first_column_)),
        panels_(ceil_div(columns_, kPanel)),
        block_(task % tasks.blocks),
        length_(length_of(p, b_)) {}

  void run() {
    const int64_t state_floats = State::floats(shape_.padded, panels_);
    float* const memory =
        task_memory(heads_ * state_floats + kChunk * kPanel + shape_.group * kChunk + shape_.floats());
    values_ = memory + heads_ * state_floats;
    factors_ = values_ + kChunk * kPanel;
    Chunk chunk(shape_, factors_ + shape_.group * kChunk);
    for (int direction = 0; direction < 2; ++direction) {
      reverse_ = direction == 1;
      if (p_.direction == (reverse_ ? Direction::kForward : Direction::kReverse)) continue;
      second_ = reverse_ && p_.direction == Direction::kBidirectional;
      for (int64_t h = 0; h < heads_; ++h) load_state(h, {memory + h * state_floats, shape_.padded, panels_});
      for (done_ = 0; done_ < length_; done_ += kChunk)
        for (int64_t h = 0; h < heads_; ++h) {
          const State state{memory + h * state_floats, shape_.padded, panels_};
          advance(chunk, state, first_head_ + h);
        }
      for (int64_t h = 0; h < heads_; ++h) store_state(h, {memory + h * state_floats, shape_.padded, panels_});
    }
    clear_padding();
    output_.fence();
  }

 private:
  bool compensated() const { return !p_.decay && !p_.beta; }

  // The place of the chunk's token t in [batch, tokens].
  int64_t place(int64_t t) const { return b_ * p_.tokens + (reverse_ ? length_ - 1 - done_ - t : done_ + t); }
  // Returns the rows of `width` channels per token, from channel `channel` on.
  TokenRows<T> rows(const void* tensor, int64_t width, int64_t channel) const {
    if (!tensor) return {nullptr, 0};
    return {static_cast<const T*>(tensor) + place(0) * width + channel, reverse_ ? -width : width};
  }

  int64_t state_place(int64_t h) const {
    const int64_t head = first_head_ + h + (second_ ? p_.state_heads : 0);
    return (b_ * p_.states() + head) * p_.key_width * p_.state_columns();
  }

  // The past state, or zeros; the rows of padding are 0.
  void load_state(int64_t h, State state) const {
    const int64_t floats = state.compensation();
    if (compensated()) zero(state.data + floats, floats);
    if (!p_.past_state) return zero(state.data, floats);
    for (int64_t i = 0; i < state.panels; ++i)
      zero(state.panel(i) + p_.key_width * kPanel, (state.padded - p_.key_width) * kPanel);
    zero(state.z(), state.padded);
    const int64_t width = p_.state_columns();
    const T* from = static_cast<const T*>(p_.past_state) + state_place(h);
    for (int64_t c = 0; c < p_.key_width; ++c, from += width) {
      for (int64_t e = 0; e < columns_; e += kLanes)
        store(state.panel(e / kPanel) + c * kPanel + e % kPanel, load(from + first_column_ + e, columns_ - e));
      if (p_.normalized) state.z()[c] = to_float(from[p_.value_width]);
    }
  }

  void store_state(int64_t h, State state) const {
    if (!p_.present_state) return;
    const int64_t width = p_.state_columns();
    T* to = static_cast<T*>(p_.present_state) + state_place(h);
    for (int64_t c = 0; c < p_.key_width; ++c, to += width) {
      for (int64_t e = 0; e < columns_; e += kLanes)
        store(to + first_column_ + e, load(state.panel(e / kPanel) + c * kPanel + e % kPanel), columns_ - e);
      if (p_.normalized && block_ == 0) store(to + p_.value_width, splat(state.z()[c]), 1);
    }
  }

  // Takes the chunk of tokens from done_ on through the state of a head.
  void advance(Chunk& chunk, State state, int64_t head) {
    const int64_t key_channels = p_.state_heads * p_.key_width;
    const TokenRows<T> beta = rows(p_.beta, p_.head_beta ? p_.state_heads : 1, p_.head_beta ? head : 0);
    const int64_t decay_channels = shape_.channel_decay ? key_channels : p_.state_heads;
    const TokenRows<T> decay = rows(p_.decay, decay_channels, shape_.channel_decay ? head * p_.key_width : head);
    const TokenRows<T> key = rows(p_.key, key_channels, head * p_.key_width);
    const TokenRows<T> query = rows(p_.query, p_.query_heads * p_.key_width, head * shape_.group * p_.key_width);
    chunk.load_keys(key, p_.beta ? &beta : nullptr, min(kChunk, length_ - done_));
    for (int64_t j = 0; j < shape_.group; ++j) chunk.load_query(j, query.from(j * p_.key_width));
    chunk.weigh(p_.decay ? &decay : nullptr, second_, query, key);
    if (p_.normalized) advance_normalizer(chunk, state, head);
    for (int64_t panel = 0; panel < panels_; ++panel) {
      if (columns_ - panel * kPanel > kLanes)
        advance_panel<kPanelVecs>(chunk, state, head, panel);
      else
        advance_panel<1>(chunk, state, head, panel);
    }
  }

  template <int vecs>
  void advance_panel(const Chunk& chunk, State state, int64_t head, int64_t panel) {
    const int64_t column = first_column_ + panel * kPanel;
    const TokenRows<T> value = rows(p_.value, p_.state_heads * p_.value_width, head * p_.value_width + column);
    load_rows(value, columns_ - panel * kPanel, vecs * kLanes, chunk.tokens(), values_, kPanel);
    if (shape_.erases) erase<vecs>(chunk, state.panel(panel));
    for (int64_t j = 0; j < shape_.group; ++j)
      read<vecs>(chunk, state.panel(panel), head * shape_.group + j, j, panel, value);
    if (compensated())
      write<vecs, true>(chunk, state.panel(panel), state.compensation());
    else
      write<vecs, false>(chunk, state.panel(panel), 0);
  }

  // Subtracts from the values what the state already has at their keys; the rest is written.
  template <int vecs>
  void erase(const Chunk& chunk, const float* state) {
    for_each_tile(chunk.tokens(), [&](auto tile, int64_t t) AFT_LAMBDA_INLINE {
      constexpr int kRows = decltype(tile)::value;
      Vec sum[kRows][vecs] = {};
      add_product(sum, chunk.keys() + t * shape_.row, shape_.row, shape_.key_width, state, kPanel);
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < vecs; ++v) {
          float* at = values_ + (t + r) * kPanel + v * kLanes;
          store(at, chunk.beta(t + r) * (load(at) - chunk.read_decay(t + r) * sum[r][v]));
        }
    });
    substitute_forward<vecs>(chunk.erase(), chunk.tokens(), values_);
  }

  template <int vecs>
  void read(const Chunk& chunk, const float* state, int64_t query_head, int64_t j, int64_t panel, TokenRows<T> value) {
    const int64_t channels = p_.query_heads * p_.value_width;
    const int64_t channel = query_head * p_.value_width + first_column_ + panel * kPanel;
    const int64_t left = columns_ - panel * kPanel;
    for_each_tile(chunk.tokens(), [&](auto tile, int64_t t) AFT_LAMBDA_INLINE {
      constexpr int kRows = decltype(tile)::value;
      Vec sum[kRows][vecs] = {};
      add_product(sum, chunk.query(j) + t * shape_.row, shape_.row, shape_.key_width, state, kPanel,
                  [&](int64_t i) AFT_LAMBDA_INLINE { value.fetch_next(t, i, j == 0 ? vecs * kLanes : 0); });
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < vecs; ++v) sum[r][v] *= chunk.read_decay(t + r);
      add_product(sum, chunk.weights(j) + t * kChunk, kChunk, min(t + kRows, chunk.tokens()), values_, kPanel);
      for (int r = 0; r < kRows; ++r)
        if (t + r < chunk.tokens()) finish<vecs>(sum[r], place(t + r) * channels + channel, j, t + r, left);
    });
  }

  // Writes a row of results, or leaves it for the second direction.
  template <int vecs>
  AFT_INLINE void finish(Vec (&sum)[vecs], int64_t at, int64_t j, int64_t t, int64_t left) const {
    if (waiting_.sums && !second_) {
      for (int v = 0; v < vecs; ++v) store(waiting_.sums + at + v * kLanes, sum[v], left - v * kLanes);
      return;
    }
    const float factor = p_.normalized ? factors_[j * kChunk + t] : p_.scale;
    for (int v = 0; v < vecs; ++v) {
      if (second_) sum[v] += load(waiting_.sums + at + v * kLanes, left - v * kLanes);
      sum[v] *= factor;
    }
    output_.write(at, sum, left);
  }

  template <int vecs, bool compensated>
  void write(const Chunk& chunk, float* state, int64_t compensation) {
    for (int64_t c = 0; c < shape_.padded; c += kChunkTileRows) {
      float* const at = state + c * kPanel;
      Vec sum[kChunkTileRows][vecs] = {};
      if (!compensated)
        for (int r = 0; r < kChunkTileRows; ++r)
          for (int v = 0; v < vecs; ++v) sum[r][v] = load(at + r * kPanel + v * kLanes) * chunk.state_decay()[c + r];
      add_product(sum, chunk.keys_across() + c * kChunk, kChunk, chunk.tokens(), values_, kPanel);
      for (int r = 0; r < kChunkTileRows; ++r)
        for (int v = 0; v < vecs; ++v) {
          float* const to = at + r * kPanel + v * kLanes;
          if (compensated)
            add_compensated(to, to + compensation, sum[r][v]);
          else
            store(to, sum[r][v]);
        }
    }
  }

  // factors_ becomes the inverse of the denominators, or the first direction's denominators wait; z takes up the keys.
  void advance_normalizer(const Chunk& chunk, State state, int64_t head) {
    const float eps = floor_of_eps(p_.eps);
    for (int64_t j = 0; j < shape_.group; ++j) {
      float* const waiting =
          waiting_.denominators
              ? waiting_.denominators + block_ * p_.batch * p_.tokens * p_.query_heads + head * shape_.group + j
              : nullptr;
      float* const denominators = factors_ + j * kChunk;
      for (int64_t first = 0; first < chunk.tokens(); first += kLanes) {
        Vec terms[kLanes];
        for (int i = 0; i < kLanes; ++i)
          terms[i] = denominator(chunk, state.z(), j, min(first + i, chunk.tokens() - 1));
        store(denominators + first, sum_each(terms));
      }
      for (int64_t t = 0; t < chunk.tokens(); ++t) {
        if (waiting && !second_)
          waiting[place(t) * p_.query_heads] = denominators[t];
        else
          denominators[t] = 1.0f / (denominators[t] + (waiting ? waiting[place(t) * p_.query_heads] : 0.0f) + eps);
      }
    }
    advance_z(chunk, state);
  }

  // Returns lanes whose sum is the denominator query z of token t in query head j.
  AFT_INLINE Vec denominator(const Chunk& chunk, const float* z, int64_t j, int64_t t) const {
    Vec terms{};
    for (int64_t c = 0; c < shape_.padded; c += kLanes)
      terms += load(chunk.query(j) + t * shape_.row + c) * load(z + c);
    terms *= chunk.read_decay(t);
    for (int64_t u = 0; u < kChunk; u += kLanes) terms += load(chunk.weights(j) + t * kChunk + u);
    return terms;
  }

  void advance_z(const Chunk& chunk, State state) const {
    for (int64_t c = 0; c < shape_.padded; c += kLanes) {
      Vec terms[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        terms[i] = Vec{};
        for (int64_t u = 0; u < kChunk; u += kLanes) terms[i] += load(chunk.keys_across() + (c + i) * kChunk + u);
      }
      float* const z = state.z() + c;
      if (compensated())
        add_compensated(z, z + state.compensation(), sum_each(terms));
      else
        store(z, load(z) * load(chunk.state_decay() + c) + sum_each(terms));
    }
  }

  // Writes zeros to the rows of padding.
  void clear_padding() const {
    const int64_t width = shape_.group * p_.value_width, channels = p_.query_heads * p_.value_width;
    for (int64_t t = length_; t < p_.tokens; ++t)
      for (int64_t h = first_head_; h < first_head_ + heads_; ++h)
        for (int64_t j = 0; j < shape_.group; ++j)
          for (int64_t e = 0; e < columns_; e += kLanes)
            output_.write((b_ * p_.tokens + t) * channels + h * width + j * p_.value_width + first_column_ + e, Vec{},
                          columns_ - e);
  }

  const RecurrentLinearAttention& p_;
  const ChunkShape& shape_;
  const Waiting& waiting_;
  const Output<T>& output_;
  const int64_t b_, first_head_, heads_, first_column_, columns_, panels_, block_, length_;
  bool reverse_ = false, second_ = false;
  int64_t done_ = 0;  // tokens, in the order of the direction
  float *values_ = nullptr, *factors_ = nullptr;
};

template <class T>
void run(const RecurrentLinearAttention& p, const Parallel& parallel) {
  const Tasks tasks(p, parallel.threads);
  const ChunkShape shape(p);
  const int64_t rows = p.batch * p.tokens * p.query_heads, elements = rows * p.value_width;
  const bool both = p.direction == Direction::kBidirectional;
  const bool half = sizeof(T) != sizeof(float);
  const Scratch sums(both && half ? elements : 0), denominators(both && p.normalized ? rows * tasks.blocks : 0);
  const Waiting waiting{!both  ? nullptr
                        : half ? sums.data()
                               : static_cast<float*>(p.output),
                        both && p.normalized ? denominators.data() : nullptr};
  // The second of two directions reads the output again, so keep it in the cache.
  const Output<T> output(p.output, both ? 0 : elements, p.value_width);
  parallel_for(parallel, tasks.count(p.batch),
               [&](int64_t task) { Task<T>(p, tasks, shape, waiting, output, task).run(); });
}

}  // namespace

void recurrent_linear_attention(const RecurrentLinearAttention& p, const Parallel& parallel) {
  with_element(p.element, [&](auto element) { run<decltype(element)>(p, parallel); });
}

}  // namespace aft::AFT_ISA
