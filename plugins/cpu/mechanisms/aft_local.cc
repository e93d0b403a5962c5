// AFT-local (Zhai et al., arXiv 2105.14103, equation 4).
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,c] + w'[t,u]) V[u,c] / (sum_u exp(K[u,c] + w'[t,u]) + eps)
//           causal: u <= t
//           with w'[t,u] = w[t,u] where |t - u| < s and 0 elsewhere: keys outside the window count with weight exp(K).
// Cost:     bound by multiply-adds: 4 (2s-1) FLOPs per token and channel (4s in causal form) against 16 bytes of
//           memory; one exponential per entry of the band and one per key and channel.
// Method:   sums/windowed_sums.h. exp(w - row maximum) is the tile of weights, so a tile of rows is a small matrix
//           product.
// Numerics: entries are relative to the largest key, weights to the largest bias of their row. Cells whose denominator
//           is too small to be trusted are summed again by the definition (sums/exact_fallback.h).
// See:      sums/windowed_sums.h, sums/exact_fallback.h

#include <cmath>

#include "sums/exact_fallback.h"
#include "sums/windowed_sums.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

constexpr int kWeightRows = kRegisters == 32 ? 12 : 6;

// Keys of one product at most, and from one row of weights to the next: a constant, so that the rows are
// reached by fixed offsets, and no multiple of a page, so that they do not compete for the same cache lines.
constexpr int64_t kWeightKeys = 1024;
constexpr int64_t kWeightPitch = kWeightKeys + 16;

// results[row] += sum_k weights[row, k] entries[k], a result and an entry being two vectors. Numerators and denominators
// of a few rows stay in registers while the keys go by: a key takes one broadcast for every row, two loads for the
// entry, and two multiply-adds per row.
AFT_INLINE void multiply_weights(const float* weights, const float* entries, int64_t keys, float* results) {
  Vec sum[kWeightRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kWeightRows; ++r)
    for (int v = 0; v < 2; ++v) sum[r][v] = load(results + (2 * r + v) * kLanes);
  for (int64_t k = 0; k < keys; ++k) {
    const Vec numerator = load(entries + 2 * k * kLanes), denominator = load(entries + (2 * k + 1) * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kWeightRows; ++r) {
      const Vec weight = splat(weights[r * kWeightPitch + k]);
      sum[r][0] += weight * numerator;
      sum[r][1] += weight * denominator;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kWeightRows; ++r)
    for (int v = 0; v < 2; ++v) store(results + (2 * r + v) * kLanes, sum[r][v]);
}

// Channels taken together: more and the window's entries would leave the second-level cache.
constexpr int64_t kChannels = 256;

template <class T, Gate gate>
struct LocalWindow {
  static constexpr int kRows = kWeightRows;
  static constexpr int kVecs = 2;
  static constexpr int64_t kBufferBlocks = 3;
  static constexpr int64_t kGroupTiles = 8, kGroupRows = kGroupTiles * kRows;

  const AftLocal& p;
  const Output<T>& output;
  int64_t first_channel, channels;
  int64_t panels, left, right, band_width;
  const T *query, *key, *value, *band;
  float complete_from, log_eps;

  LocalWindow(const AftLocal& p, const Output<T>& output, int64_t first_channel)
      : p(p),
        output(output),
        first_channel(first_channel),
        channels(min(kChannels, p.channels - first_channel)),
        panels(ceil_div(channels, kLanes)),
        left(p.window - 1),
        right(p.causal ? 0 : p.window - 1),
        band_width(left + right + 1),
        query(static_cast<const T*>(p.query) + first_channel),
        key(static_cast<const T*>(p.key) + first_channel),
        value(static_cast<const T*>(p.value) + first_channel),
        band(static_cast<const T*>(p.band)),
        complete_from(complete_denominator(p.eps)),
        log_eps(std::log(p.eps)) {}

  int64_t memory_floats() const { return kGroupRows * (kWeightPitch + panels * kVecs * kLanes); }

  const T* band_row(int64_t t) const { return band + (p.band_rows == 1 ? 0 : t * band_width); }

  void update_maximum(int64_t b, int64_t first, int64_t last, float* maximum) const {
    for (int64_t u = first; u < last; ++u) {
      const T* row = key + (b * p.tokens + u) * p.channels;
      for (int64_t c = 0; c < channels; c += kLanes) {
        prefetch(row + c + kPrefetchRows * p.channels);
        store(maximum + c, raised_by(load(maximum + c), load(row + c, channels - c)));
      }
    }
  }

  template <class Use>
  AFT_INLINE void for_entries(int64_t b, int64_t first, int64_t last, const float* maximum, const Use& use) const {
    for (int64_t u = first; u < last; u += kKeyBlock)
      for (int64_t panel = 0, c = 0; panel < panels; ++panel, c += kLanes) {
        const int64_t from = (b * p.tokens + u) * p.channels + c;
        const T *keys = key + from, *values = value + from;
        const Vec m = load(maximum + c);
        use(panel, u, min(kKeyBlock, last - u), [&](int64_t k, Vec(&entry)[kVecs]) AFT_LAMBDA_INLINE {
          const int64_t at = k * p.channels, ahead = at + kPrefetchRows * p.channels;
          prefetch(keys + ahead);
          prefetch(values + ahead);
          entry[1] = exp(load(keys + at, channels - c) - m);
          entry[0] = entry[1] * load(values + at, channels - c);
        });
      }
  }

  // The largest bias of row t among keys that count, the 0 of keys outside the window included.
  float row_maximum(int64_t t, int64_t length) const {
    const T* row = band_row(t);
    const int64_t end = min(band_width, length - t + left);
    Vec m{};
    for (int64_t j = max(0, left - t); j < end; j += kLanes) m = raised_by(m, load(row + j, end - j));
    return max_lanes(m);
  }

  // Tiles are taken some at a time, panel by panel: a panel's entries stay in the first-level cache while the
  // weights of all tiles pass them.
  void compute_block(const RowBlock<kVecs>& block) const {
    const int64_t tiles = ceil_div(block.end - block.begin, kRows);
    for (int64_t tile = 0; tile < tiles; tile += kGroupTiles)
      compute_tiles(block, tile, min(kGroupTiles, tiles - tile));
  }

  // Writes the rows of some tiles: each the sums outside all windows plus the product of its weights with the
  // entries of its tile's keys.
  void compute_tiles(const RowBlock<kVecs>& block, int64_t first_tile, int64_t tiles) const {
    const int64_t b = block.document, length = length_of(p, b);
    const int64_t t = block.begin + first_tile * kRows, rows = tiles * kRows;
    float *weights = block.memory, *accumulators = weights + kGroupRows * kWeightPitch;
    float row_maxima[kGroupRows], outside_weights[kGroupRows];
    for (int64_t r = 0; r < rows; ++r) {
      row_maxima[r] = row_maximum(min(t + r, p.tokens - 1), length);
      outside_weights[r] = exp(splat(-row_maxima[r]))[0];
    }
    for (int64_t offset = 0; offset < kRows + left + right; offset += kWeightKeys) {
      const auto first = [&](int64_t r) { return max(0, t + r - left) + offset; };  // key of the tile from row r on
      const auto last = [&](int64_t r) {
        return max(first(r), min(first(r) + kWeightKeys, min(block.last_key, t + r + kRows + right)));
      };
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t tile_row = r - r % kRows;
        compute_weights(min(t + r, p.tokens - 1), first(tile_row), last(tile_row), row_maxima[r], outside_weights[r],
                        weights + r * kWeightPitch);
      }
      for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t r = 0; r < rows; r += kRows) {
          float* tile = accumulators + (r * panels + panel * kRows) * kVecs * kLanes;
          if (offset == 0)
            init_accumulators(block.outside_sums + (panel * block.tiles + first_tile + r / kRows) * kVecs * kLanes,
                              outside_weights + r, tile);
          prefetch_panel(b, t + r, panel, rows);
          multiply_weights(weights + r * kWeightPitch, block.entries.at(panel, first(r)), last(r) - first(r), tile);
        }
    }
    for (int64_t r = 0; r < rows; r += kRows)
      write_rows(b, t + r, min(kRows, block.end - t - r), accumulators + r * panels * kVecs * kLanes, row_maxima + r,
                 block.maximum);
  }

  // Prefetches the query of this tile, and a share of the band of a tile in the next group.
  void prefetch_panel(int64_t b, int64_t t, int64_t panel, int64_t group_rows) const {
    for (int r = 0; r < kRows; ++r) prefetch_later(query + (b * p.tokens + t + r) * p.channels + panel * kLanes);
    if (p.band_rows == 1) return;
    const int64_t share = ceil_div(kRows * band_width, panels);
    const T* from = band_row(t + group_rows) + panel * share;
    for (int64_t i = 0; i < share; i += kLineElements<T>) prefetch_later(from + i);
  }

  void init_accumulators(const float* outside_sums, const float* outside_weights, float* accumulators) const {
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVecs; ++v)
        store(accumulators + (r * kVecs + v) * kLanes, load(outside_sums + v * kLanes) * outside_weights[r]);
  }

  // The weights of row t for keys [begin, end).
  void compute_weights(int64_t t, int64_t begin, int64_t end, float maximum, float outside_weight,
                       float* weights) const {
    const int64_t window = min(end, max(begin, t - left)), window_end = min(end, max(begin, t + right + 1));
    const T* row = band_row(t);
    const int64_t shift = left - t;  // from key to entry of the band
    for (int64_t u = begin; u < window; ++u) weights[u - begin] = outside_weight;
    for (int64_t u = window; u < window_end; u += kLanes)
      store(weights + (u - begin), exp(load(row + u + shift, window_end - u) - maximum), window_end - u);
    for (int64_t u = window_end; u < end; ++u) weights[u - begin] = p.causal ? 0.0f : outside_weight;
  }

  // Writes gate times numerator / denominator. The sums are relative to the maxima.
  void write_rows(int64_t b, int64_t t, int64_t rows, const float* accumulators, const float* row_maxima,
                  const float* key_maxima) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t panel = 0, c = 0; panel < panels; ++panel, c += kLanes) {
        const int64_t at = (b * p.tokens + t + r) * p.channels + c, count = channels - c;
        const float* sums = accumulators + (panel * kRows + r) * kVecs * kLanes;
        Vec numerator = load(sums), denominator = load(sums + kLanes);
        if (__builtin_expect(any((IntVec)(denominator < complete_from)), 0))
          complete(b, t + r, c, load(key_maxima + c) + row_maxima[r], numerator, denominator);
        output.write(first_channel + at, gated_ratio<gate>(load(query + at, count), numerator, denominator), count);
      }
  }

  // Adds eps to the denominators. Sums too small to be trusted are computed again by the definition.
  void complete(int64_t b, int64_t t, int64_t c, Vec maximum, Vec& numerator, Vec& denominator) const {
    if (p.eps > 0.0f) denominator += eps_beside(log_eps, maximum);
    if (any((IntVec)(denominator < kTrustedDenominator))) sum_exactly(b, t, c, numerator, denominator);
  }

  void sum_exactly(int64_t b, int64_t t, int64_t c, Vec& numerator, Vec& denominator) const {
    const int64_t length = length_of(p, b), row = b * p.tokens * p.channels + c;
    const T* bias = band_row(t);
    exact_sums(
        p.causal ? min(t + 1, length) : length,
        [&](int64_t u) { return load(key + row + u * p.channels, channels - c); },
        [&](int64_t u) {
          const bool inside = u >= t - left && u <= t + right;
          return splat(inside ? to_float(bias[u - t + left]) : 0.0f);
        },
        [&](int64_t u) { return load(value + row + u * p.channels, channels - c); }, log_eps, numerator, denominator);
  }

  void clear_rows(int64_t b, int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t c = 0; c < channels; c += kLanes)
        output.write(first_channel + (b * p.tokens + t) * p.channels + c, Vec{}, channels - c);
    output.fence();
  }
};

}  // namespace

void aft_local(const AftLocal& p, const Parallel& parallel) {
  with_element(p.element, [&](auto element) {
    with_gate(p.gate, [&](auto gate) {
      using T = decltype(element);
      const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
      for (int64_t c = 0; c < p.channels; c += kChannels) {
        const LocalWindow<T, gate.value> window(p, output, c);
        WindowedSums<LocalWindow<T, gate.value>>(window, p).run(parallel);
      }
    });
  });
}

}  // namespace aft::AFT_ISA
