// A chunk of tokens of one state head: its rows in scratch memory, and the weights between its tokens.
//
// With a_t = exp(decay_t), by head or by key channel, and S the state before the chunk, the recurrence over it is
//   erase_tu  = beta_t sum_c key_tc key_uc prod_{u < i <= t} a_ic               u < t
//   weight_tu =        sum_c query_tc key_uc prod_{u < i <= t} a_ic             u <= t, or u < t
//   new_t     = beta_t (value_t - (key_t prod_{i <= t} a_i) S) - sum_u erase_tu new_u     new_t = value_t without beta
//   read_t    = (query_t prod_{i <= t} a_i) S + sum_u weight_tu new_u
//   S         becomes diag(prod a_i) S + sum_u (key_u prod_{u < i} a_i)^T new_u
// Products of a between two tokens are built step by step. Those from the chunk's first token, and those to its last
// one, are the exponentials of sums, so that a decay that stays the same does not round to one side at every token.
#pragma once

#include "mechanisms/recurrent/products.h"
#include "simd/load_store.h"
#include "simd/math.h"
#include "simd/transpose.h"

namespace aft::AFT_ISA {

// Rows of a chunk, `tokens` of them; token t lies `step` elements after token t - 1, which is negative in reverse.
template <class T>
struct TokenRows {
  const T* first = nullptr;
  int64_t step = 0;

  AFT_INLINE const T* operator[](int64_t t) const { return first + t * step; }
  TokenRows from(int64_t channel) const { return {first + channel, step}; }

  // Fetches a part of the next chunk's rows: that of step i of a product whose tile of rows starts at t. The steps of
  // as many channels as a row has fetch all of its lines, spread over the arithmetic: a burst of them would wait for
  // memory.
  AFT_INLINE void fetch_next(int64_t t, int64_t i, int64_t width) const {
    const int64_t channel = i / kChunkTileRows * kLineElements<T>;
    if (channel < width) prefetch_later((*this)[kChunk + t + i % kChunkTileRows] + channel);
  }
};

// rows[t] = row t, 0 past its width and past the last token.
template <class T>
inline void load_rows(TokenRows<T> from, int64_t width, int64_t padded, int64_t tokens, float* rows, int64_t row) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < padded; c += kLanes) store(rows + t * row + c, load(from[t] + c, width - c));
  for (int64_t t = tokens; t < kChunk; ++t)
    for (int64_t c = 0; c < padded; c += kLanes) store(rows + t * row + c, Vec{});
}

AFT_INLINE Vec exp_of_decay(Vec x) { return exp(at_most(splat(kExpHigh), x)); }

// The masks of row t: all bits of lane u are set where u == t.
struct Diagonal {
  alignas(64) int32_t masks[kChunk][kChunk] = {};
  constexpr Diagonal() {
    for (int64_t t = 0; t < kChunk; ++t) masks[t][t] = -1;
  }
  AFT_INLINE Vec keep(int64_t t, int64_t u, Vec v) const {
    typedef int32_t IntVecInMemory __attribute__((vector_size(kVectorBytes), aligned(4)));
    return (Vec)((IntVec)v & (IntVec) * reinterpret_cast<const IntVecInMemory*>(&masks[t][u]));
  }
};
constexpr Diagonal kDiagonal;

struct ChunkShape {
  int64_t key_width, row;  // row: floats from one row of keys or queries to the next
  int64_t padded;          // key_width rounded up to whole vectors and tiles
  int64_t group;           // query heads of a state
  bool channel_decay, erases;

  ChunkShape(const RecurrentLinearAttention& p)
      : key_width(p.key_width),
        row(round_up(p.key_width, max(kLanes, kChunkTileRows)) + kLanes),
        padded(row - kLanes),
        group(p.query_heads / p.state_heads),
        channel_decay(p.channel_decay && p.decay),
        erases(p.beta) {}

  int64_t floats() const {
    return (group + 2) * kChunk * row + 2 * padded * kChunk + (group + 3) * kChunk * kChunk + padded + 5 * kChunk;
  }
};

class Chunk {
 public:
  Chunk(const ChunkShape& shape, float* memory) : shape_(shape) {
    const auto take = [&](int64_t floats) {
      float* taken = memory;
      memory += floats;
      return taken;
    };
    queries_ = take(shape.group * kChunk * shape.row);
    keys_ = take(kChunk * shape.row);
    decays_ = take(kChunk * shape.row);
    keys_across_ = take(shape.padded * kChunk);
    running_ = take(shape.padded * kChunk);
    weights_ = take(shape.group * kChunk * kChunk);
    erase_ = take(kChunk * kChunk);
    before_ = take(kChunk * kChunk);
    until_ = take(kChunk * kChunk);
    state_decay_ = take(shape.padded);
    read_decay_ = take(kChunk);
    beta_ = take(kChunk);
    write_decay_ = take(kChunk);
    step_decay_ = take(kChunk);
    without_decay();
  }

  int64_t tokens() const { return tokens_; }
  const float* query(int64_t j) const { return queries_ + j * kChunk * shape_.row; }
  const float* keys() const { return keys_; }
  const float* keys_across() const { return keys_across_; }  // [padded, kChunk], decayed up to the last token
  const float* weights(int64_t j) const { return weights_ + j * kChunk * kChunk; }
  const float* erase() const { return erase_; }
  const float* state_decay() const { return state_decay_; }
  float read_decay(int64_t t) const { return read_decay_[t]; }
  float beta(int64_t t) const { return beta_[t]; }

  // Loads the rows of keys and beta.
  template <class T>
  void load_keys(TokenRows<T> keys, const TokenRows<T>* beta, int64_t tokens) {
    tokens_ = tokens;
    load_rows(keys, shape_.key_width, shape_.padded, tokens, keys_, shape_.row);
    for (int64_t t = 0; t < kChunk; t += kLanes)
      for (int64_t c = 0; c < shape_.padded; c += kLanes) {
        Vec square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load(keys_ + (t + i) * shape_.row + c);
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(keys_across_ + (c + i) * kChunk + t, square[i]);
      }
    if (beta)
      for (int64_t t = 0; t < kChunk; ++t) beta_[t] = t < tokens ? to_float(*(*beta)[t]) : 0.0f;
  }

  template <class T>
  void load_query(int64_t j, TokenRows<T> query) {
    load_rows(query, shape_.key_width, shape_.padded, tokens_, queries_ + j * kChunk * shape_.row, shape_.row);
  }

  // Computes weights and erase, and decays queries and keys. `decay` is null where the rule has none; `strictly`: no
  // token reads its own key. `query` and `key` are those of this chunk; the next ones are prefetched.
  template <class T>
  void weigh(const TokenRows<T>* decay, bool strictly, TokenRows<T> query, TokenRows<T> key) {
    if (decay && shape_.channel_decay) return weigh_by_channel(*decay, strictly, query, key);
    if (decay) step_head_decay(*decay);
    if (shape_.erases) {
      products(keys_, before_, erase_, key);
      scale_erase();
    }
    for (int64_t j = 0; j < shape_.group; ++j)
      products(this->query(j), strictly ? before_ : until_, weights_ + j * kChunk * kChunk,
               query.from(j * shape_.key_width), j == 0 && !shape_.erases ? key : TokenRows<T>{});
    if (decay)
      for (int64_t c = 0; c < shape_.padded; ++c)
        for (int64_t u = 0; u < kChunk; u += kLanes) {
          float* at = keys_across_ + c * kChunk + u;
          store(at, load(at) * load(write_decay_ + u));
        }
  }

 private:
  // Sets all factors between tokens to 1. A rule with decays overwrites them.
  void without_decay() {
    for (int64_t t = 0; t < kChunk; ++t) {
      read_decay_[t] = 1.0f;
      for (int64_t u = 0; u < kChunk; ++u) {
        before_[t * kChunk + u] = u < t ? 1.0f : 0.0f;
        until_[t * kChunk + u] = u <= t ? 1.0f : 0.0f;
      }
    }
    for (int64_t c = 0; c < shape_.padded; ++c) state_decay_[c] = 1.0f;
  }

  // before[t, u] = prod_{u < i <= t} exp(decay_i) for u < t, and until the same for u <= t.
  template <class T>
  void step_head_decay(TokenRows<T> decay) {
    float sum = 0.0f;
    for (int64_t t = 0; t < kChunk; ++t) {
      step_decay_[t] = t < tokens_ ? to_float(*decay[t]) : 0.0f;
      read_decay_[t] = sum += step_decay_[t];
    }
    float rest = 0.0f;
    for (int64_t t = kChunk - 1; t >= 0; --t) {
      write_decay_[t] = rest;
      rest += step_decay_[t];
    }
    for (int64_t t = 0; t < kChunk; t += kLanes) {
      store(step_decay_ + t, exp_of_decay(load(step_decay_ + t)));
      store(read_decay_ + t, exp_of_decay(load(read_decay_ + t)));
      store(write_decay_ + t, exp_of_decay(load(write_decay_ + t)));
    }
    for (int64_t u = 0; u < kChunk; u += kLanes) {
      Vec product{};
      for (int64_t t = 0; t < kChunk; ++t) {
        product *= step_decay_[t];
        store(before_ + t * kChunk + u, product);
        product += kDiagonal.keep(t, u, splat(1.0f));
        store(until_ + t * kChunk + u, product);
      }
    }
    for (int64_t c = 0; c < shape_.padded; c += kLanes) store(state_decay_ + c, splat(read_decay_[kChunk - 1]));
  }

  // result[t, u] = factors[t, u] sum_c rows[t, c] keys[u, c], 0 where the factor is.
  template <class T>
  void products(const float* rows, const float* factors, float* result, TokenRows<T> next,
                TokenRows<T> also = {}) const {
    constexpr int kVecs = kChunk / kLanes < 2 ? 1 : 2;
    for_each_tile(tokens_, [&](auto tile, int64_t t) AFT_LAMBDA_INLINE {
      constexpr int kRows = decltype(tile)::value;
      for (int64_t u = 0; u < kChunk; u += kVecs * kLanes) {
        Vec sum[kRows][kVecs] = {};
        const int64_t width = u == 0 ? shape_.key_width : 0, also_width = also.first ? width : 0;
        add_product(sum, rows + t * shape_.row, shape_.row, shape_.key_width, keys_across_ + u, kChunk,
                    [&](int64_t i) AFT_LAMBDA_INLINE {
                      next.fetch_next(t, i, width);
                      also.fetch_next(t, i, also_width);
                    });
        for (int r = 0; r < kRows; ++r)
          for (int v = 0; v < kVecs; ++v) {
            const int64_t at = (t + r) * kChunk + u + v * kLanes;
            const Vec factor = load(factors + at);
            store(result + at, factor == 0.0f ? Vec{} : sum[r][v] * factor);
          }
      }
    });
  }

  void scale_erase() {
    for (int64_t t = 0; t < tokens_; ++t)
      for (int64_t u = 0; u < kChunk; u += kLanes)
        store(erase_ + t * kChunk + u, load(erase_ + t * kChunk + u) * beta_[t]);
  }

  template <class T>
  void weigh_by_channel(TokenRows<T> decay, bool strictly, TokenRows<T> query, TokenRows<T> key) {
    load_rows(decay, shape_.key_width, shape_.padded, tokens_, decays_, shape_.row);
    for (int64_t t = 0; t < kChunk * shape_.row; t += kLanes) {
      // The rows end in one vector that is never read.
      if (t % shape_.row < shape_.padded) store(decays_ + t, exp_of_decay(load(decays_ + t)));
    }
    for (int64_t j = 0; j < shape_.group; ++j) {
      if (j == 0 && shape_.erases)
        strictly ? run_channels<true, true>(j, query, key, decay) : run_channels<true, false>(j, query, key, decay);
      else
        strictly ? run_channels<false, true>(j, query, key, decay) : run_channels<false, false>(j, query, key, decay);
    }
    if (shape_.erases) scale_erase();
    float* const undecayed = keys_across_;
    keys_across_ = running_;
    running_ = undecayed;
    decay_rows(decay);
  }

  // Rows of queries and keys times prod_{i <= t} exp(decay_i), channel by channel.
  template <class T>
  void decay_rows(TokenRows<T> decay) {
    for (int64_t t = 0; t < kChunk; ++t) read_decay_[t] = 1.0f;
    for (int64_t c = 0; c < shape_.padded; c += kLanes) {
      Vec sum{}, product = splat(1.0f);
      for (int64_t t = 0; t < tokens_; ++t) {
        sum += load(decay[t] + c, shape_.key_width - c);
        product = exp_of_decay(sum);
        for (int64_t j = 0; j < shape_.group; ++j) {
          float* at = queries_ + (j * kChunk + t) * shape_.row + c;
          store(at, load(at) * product);
        }
        if (shape_.erases) store(keys_ + t * shape_.row + c, load(keys_ + t * shape_.row + c) * product);
      }
      store(state_decay_ + c, product);
    }
  }

  // The weights of query j, and with `erases` those of the keys. running[c, u] becomes key u decayed to the last token.
  template <bool erases, bool strictly, class T>
  void run_channels(int64_t j, TokenRows<T> query, TokenRows<T> key, TokenRows<T> decay) {
    zero(weights_ + j * kChunk * kChunk, kChunk * kChunk);
    if (erases) zero(erase_, kChunk * kChunk);
    if (tokens_ < kChunk) zero(running_, shape_.padded * kChunk);
    for (int64_t u = 0; u < tokens_; u += kLanes) {
      const int64_t start = u / kChunkTileRows * kChunkTileRows;
      for (int64_t t = start; t < tokens_; t += kChunkTileRows) {
        if (u == 0)
          for (int64_t i = 0; i < shape_.key_width; ++i) {
            query.from(j * shape_.key_width).fetch_next(t, i, shape_.key_width);
            if (j == 0) key.fetch_next(t, i, shape_.key_width);
            if (j == 0) decay.fetch_next(t, i, shape_.key_width);
          }
        if (t == start)
          channel_tile<erases, strictly, true, true>(j, t, u);
        else if (t < u + kLanes)
          channel_tile<erases, strictly, true, false>(j, t, u);
        else
          channel_tile<erases, strictly, false, false>(j, t, u);
      }
    }
  }

  template <bool erases, bool strictly, bool diagonal, bool starts>
  void channel_tile(int64_t j, int64_t t, int64_t u) {
    Vec weights[kChunkTileRows] = {}, erase[kChunkTileRows] = {};
    const float *query_row = query(j) + t * shape_.row, *key_row = keys_ + t * shape_.row;
    const float* decay_row = decays_ + t * shape_.row;
    for (int64_t c = 0; c < shape_.padded; ++c) {
      float* const at = running_ + c * kChunk + u;
      Vec run = starts ? Vec{} : load(at);
      const Vec keys = load(keys_across_ + c * kChunk + u);
#pragma GCC unroll 8
      for (int r = 0; r < kChunkTileRows; ++r) {
        const Vec decayed = run * decay_row[r * shape_.row + c];
        run = diagonal ? decayed + kDiagonal.keep(t + r, u, keys) : decayed;
        weights[r] += query_row[r * shape_.row + c] * (strictly ? decayed : run);
        if (erases) erase[r] += key_row[r * shape_.row + c] * decayed;
      }
      store(at, run);
    }
    for (int r = 0; r < kChunkTileRows; ++r) {
      store(weights_ + (j * kChunk + t + r) * kChunk + u, weights[r]);
      if (erases) store(erase_ + (t + r) * kChunk + u, erase[r]);
    }
  }

  const ChunkShape& shape_;
  int64_t tokens_ = 0;
  float *queries_, *keys_, *decays_, *keys_across_, *running_, *weights_, *erase_, *before_, *until_, *state_decay_,
      *read_decay_, *beta_, *write_decay_, *step_decay_;
};

}  // namespace aft::AFT_ISA
