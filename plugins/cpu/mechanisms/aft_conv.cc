// AFT-conv (Zhai et al., arXiv 2105.14103, equation 6), heads of width d with one key channel and one filter of s taps
// each.
//
// Computes: Y[t,c] = gate(Q[t,c]) * sum_u exp(K[u,h] + w'[t,u]) V[u,c] / (sum_u exp(K[u,h] + w'[t,u]) + eps)
//           causal: u <= t
//           where h is the head of c, w'[t,u] = filter[h, u - t + left] inside the filter and 0 outside of it; left is
//           (s-1)/2 ("same" padding) or s-1 in causal form.
// Cost:     bound by memory at small s: 12 bytes per token and channel in float32 against 2 s FLOPs and the gate's
//           exponential; from about s = 30 the multiply-adds take as long.
// Method:   sums/windowed_sums.h. The entries of a key are exp(K - m) V for all channels, followed by exp(K - m) for
//           all heads, so that denominators are summed as further channels. The weight of a row and a key depends only
//           on their distance: the tile is a table of the filter, widened by the weight of bias 0 at both ends.
// Numerics: entries are relative to the largest key, weights to the largest tap of their head. Cells whose denominator
//           is too small to be trusted are summed again by the definition (sums/exact_fallback.h).
// See:      sums/windowed_sums.h, sums/channel_to_head.h, sums/exact_fallback.h

#include <cmath>

#include "sums/channel_to_head.h"
#include "sums/exact_fallback.h"
#include "sums/windowed_sums.h"
#include "simd/parallel.h"

namespace aft::AFT_ISA {
namespace {

template <class T, Gate gate>
struct ConvWindow {
  static constexpr int kRows = 4;
  static constexpr int kVecs = 1;
  static constexpr int64_t kBufferBlocks = 2;
  static constexpr int64_t kGroupTiles = 6;   // whose sums wait for the output
  static constexpr int kPanels = 2;           // taken together where they have the same weights
  static constexpr int64_t kKeysAhead = 128;  // over a segment: update_maximum() reads its keys first

  const AftConv& p;
  const Output<T>& output;
  Heads channel_heads;
  bool whole_vectors;  // every vector is full and of one head
  int64_t width, value_panels, head_panels, panels, left, right;
  int64_t table_rows;  // taps, and kRows - 1 at either end
  const T *query, *key, *value, *filter;
  float complete_from, log_eps;
  Scratch table, outside_weights;  // [panels, table_rows, kLanes] and [panels, kLanes]
  Scratch filter_maxima;           // [panels, kLanes]

  ConvWindow(const AftConv& p, const Output<T>& output)
      : p(p),
        output(output),
        channel_heads(p.channels / p.heads),
        whole_vectors(p.channels / p.heads % kLanes == 0),
        width(p.channels / p.heads),
        value_panels(ceil_div(p.channels, kLanes)),
        head_panels(ceil_div(p.heads, kLanes)),
        panels(value_panels + head_panels),
        left(p.causal ? p.taps - 1 : (p.taps - 1) / 2),
        right(p.taps - 1 - left),
        table_rows(p.taps + 2 * (kRows - 1)),
        query(static_cast<const T*>(p.query)),
        key(static_cast<const T*>(p.key)),
        value(static_cast<const T*>(p.value)),
        filter(static_cast<const T*>(p.filter)),
        complete_from(complete_denominator(p.eps)),
        log_eps(std::log(p.eps)),
        table(panels * table_rows * kLanes),
        outside_weights(panels * kLanes),
        filter_maxima(panels * kLanes) {
    for (int64_t panel = 0; panel < panels; ++panel) fill_table(panel);
  }

  // Returns the head of a lane, which counts over all panels. Lanes past the last channel or head get the last head.
  int64_t head_of(int64_t lane) const {
    const int64_t c = lane - value_panels * kLanes;
    return min(p.heads - 1, c >= 0 ? c : channel_heads.of(lane));
  }

  Vec taps_of(int64_t panel, int64_t j) const {
    if (whole_vectors && panel < value_panels) return splat(to_float(filter[head_of(panel * kLanes) * p.taps + j]));
    Vec taps{};
    for (int lane = 0; lane < kLanes; ++lane)
      taps[lane] = to_float(filter[head_of(panel * kLanes + lane) * p.taps + j]);
    return taps;
  }

  void fill_table(int64_t panel) {
    Vec largest{};
    for (int64_t j = 0; j < p.taps; ++j) largest = raised_by(largest, taps_of(panel, j));
    const Vec outside_weight = exp(-largest);
    store(outside_weights.data() + panel * kLanes, outside_weight);
    store(filter_maxima.data() + panel * kLanes, largest);
    for (int64_t i = 0; i < table_rows; ++i) {
      const int64_t j = i - (kRows - 1);
      const Vec beyond = p.causal && j >= p.taps ? Vec{} : outside_weight;
      store(table.data() + (panel * table_rows + i) * kLanes,
            j >= 0 && j < p.taps ? exp(taps_of(panel, j) - largest) : beyond);
    }
  }

  int64_t memory_floats() const { return kGroupTiles * kRows * panels * kLanes; }

  // Key channels belong to heads; panels [i * width, (i + 1) * width) of the values are those of the heads of
  // panel i. Calls f(first panel, end, c) with c the first channel of the first panel.
  template <class F>
  AFT_INLINE void value_panels_of(int64_t head_panel, const F& f) const {
    const int64_t end = min((head_panel + 1) * width, value_panels);
    for (int64_t panel = head_panel * width; panel < end; ++panel) f(panel, (panel - head_panel * width) * kLanes);
  }

  void update_maximum(int64_t b, int64_t first, int64_t last, float* maximum) const {
    for (int64_t i = 0; i < head_panels; ++i) {
      float* own = maximum + (value_panels + i) * kLanes;
      for (int64_t u = first; u < last; ++u) store(own, raised_by(load(own), head_keys(b, u, i)));
      value_panels_of(i,
                      [&](int64_t panel, int64_t c) { store(maximum + panel * kLanes, channel_heads.spread(own, c)); });
    }
  }

  AFT_INLINE Vec head_keys(int64_t b, int64_t u, int64_t head_panel) const {
    return load_few(key + (b * p.tokens + u) * p.heads + head_panel * kLanes, p.heads - head_panel * kLanes);
  }

  template <class Use>
  AFT_INLINE void for_entries(int64_t b, int64_t first, int64_t last, const float* maximum, const Use& use) const {
    float weights[kKeyBlock * kLanes];
    for (int64_t u = first; u < last; u += kKeyBlock) {
      const int64_t count = min(kKeyBlock, last - u);
      for (int64_t i = 0; i < kKeyBlock * p.heads; i += kLineElements<T>)
        prefetch(key + (b * p.tokens + u + kKeysAhead) * p.heads + i);
      for (int64_t i = 0; i < head_panels; ++i) {
        const int64_t head_panel = value_panels + i;
        const Vec m = load(maximum + head_panel * kLanes);
        for (int64_t k = 0; k < count; ++k) store(weights + k * kLanes, exp(head_keys(b, u + k, i) - m));
        use(head_panel, u, count,
            [&](int64_t k, Vec(&entry)[1]) AFT_LAMBDA_INLINE { entry[0] = load(weights + k * kLanes); });
        value_panels_of(i, [&](int64_t panel, int64_t c) AFT_LAMBDA_INLINE {
          const T* from = value + (b * p.tokens + u) * p.channels + panel * kLanes;
          if (whole_vectors)
            weight_values<true>(panel, u, count, c, from, weights, use);
          else
            weight_values<false>(panel, u, count, c, from, weights, use);
        });
      }
    }
  }

  template <bool kWhole, class Use>
  AFT_INLINE void weight_values(int64_t panel, int64_t u, int64_t count, int64_t c, const T* from, const float* weights,
                                const Use& use) const {
    const int64_t lanes = kWhole ? kLanes : p.channels - panel * kLanes;
    // Prefetches this panel's share of a later block: each cache line once, in the order of memory.
    const T* ahead = from + kPrefetchRows * p.channels + panel * (kKeyBlock - 1) * kLanes;
    use(panel, u, count, [&](int64_t k, Vec(&entry)[1]) AFT_LAMBDA_INLINE {
      if (k % kLineVecs<T> == 0) prefetch(ahead + k * kLanes);
      entry[0] = channel_heads.spread<kWhole>(weights + k * kLanes, c) * load(from + k * p.channels, lanes);
    });
  }

  // A group of tiles at a time: their sums panel by panel, so that all a panel's rows need stays in the first-level
  // cache, then the output row by row, in the order of memory.
  void compute_block(const RowBlock<kVecs>& block) const {
    const int64_t pitch = panels * kLanes;
    for (int64_t tile = 0; tile < block.tiles; tile += kGroupTiles) {
      const int64_t tiles = min(kGroupTiles, block.tiles - tile), t = block.begin + tile * kRows;
      int64_t panel = 0;
      if (width % (kPanels * kLanes) == 0)
        for (; panel < value_panels; panel += kPanels) sum_rows<kPanels>(block, tile, tiles, panel);
      for (; panel < panels; ++panel) sum_rows<1>(block, tile, tiles, panel);
      for (int64_t r = 0; r < min(tiles * kRows, block.end - t); ++r)
        if (whole_vectors)
          write_row<true>(block.document, t + r, block.maximum, block.memory + r * pitch);
        else
          write_row<false>(block.document, t + r, block.maximum, block.memory + r * pitch);
    }
  }

  // block.memory[row, panel] = the weighted sums over all keys, for the rows of some tiles and `count` panels with the
  // same weights.
  template <int count>
  void sum_rows(const RowBlock<kVecs>& block, int64_t first_tile, int64_t tiles, int64_t panel) const {
    float* sums = block.memory + panel * kLanes;
    const Vec outside_weight = load(outside_weights.data() + panel * kLanes);
    const int64_t pitch = block.entries.capacity * kLanes;
    for (int64_t tile = first_tile; tile < first_tile + tiles; ++tile) {
      const int64_t t = block.begin + tile * kRows, first = max(0, t - left);
      const int64_t last = min(block.last_key, t + kRows + right);
      const float* weight = table.data() + (panel * table_rows + first - t + left + kRows - 1) * kLanes;
      const float* entries = block.entries.at(panel, first);
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < count; ++v)
          prefetch(query + (block.document * p.tokens + t + r) * p.channels + (panel + v) * kLanes);
      Vec sum[kRows][count];
      for (int v = 0; v < count; ++v) {
        const Vec rest = load(block.outside_sums + ((panel + v) * block.tiles + tile) * kLanes) * outside_weight;
        for (int r = 0; r < kRows; ++r) sum[r][v] = rest;
      }
      for (int64_t k = 0; k < (last - first) * kLanes; k += kLanes) {
        Vec entry[count];
        for (int v = 0; v < count; ++v) entry[v] = load(entries + v * pitch + k);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec w = load(weight + k - r * kLanes);
          for (int v = 0; v < count; ++v) sum[r][v] += w * entry[v];
        }
      }
      for (int r = 0; r < kRows; ++r, sums += panels * kLanes)
        for (int v = 0; v < count; ++v) store(sums + v * kLanes, sum[r][v]);
    }
  }

  // sums: [panel, kLanes] of the row, relative to the maxima of the keys and to those of the filter.
  template <bool kWhole>
  void write_row(int64_t b, int64_t t, const float* key_maxima, float* sums) const {
    const int64_t row = (b * p.tokens + t) * p.channels;
    for (int64_t i = 0; i < head_panels; ++i) {
      const float* denominators = sums + (value_panels + i) * kLanes;
      if (__builtin_expect(any((IntVec)(load(denominators) < complete_from)), 0)) complete(b, t, i, key_maxima, sums);
      const int64_t first = i * width, end = min(first + width, value_panels);
      int64_t panel = first;
      if (kWhole)
        for (; panel + kPanels <= end; panel += kPanels)
          write_panels<kWhole, kPanels>(row, panel, (panel - first) * kLanes, sums, denominators);
      for (; panel < end; ++panel) write_panels<kWhole, 1>(row, panel, (panel - first) * kLanes, sums, denominators);
    }
  }

  // Two panels at once take 5 % less than one after the other: a gate is a long chain of instructions.
  template <bool kWhole, int count>
  AFT_INLINE void write_panels(int64_t row, int64_t panel, int64_t c, const float* sums,
                               const float* denominators) const {
    Vec gated[count];
    const int64_t at = row + panel * kLanes, lanes = kWhole ? kLanes : p.channels - panel * kLanes;
    for (int v = 0; v < count; ++v)
      gated[v] = gated_ratio<gate>(load(query + at + v * kLanes, lanes), load(sums + (panel + v) * kLanes),
                                   channel_heads.spread<kWhole>(denominators, c + v * kLanes));
    for (int v = 0; v < count; ++v) output.write(at + v * kLanes, gated[v], lanes);
  }

  // Adds eps to the denominators of a panel's heads. Sums too small to be trusted are computed again by the definition.
  void complete(int64_t b, int64_t t, int64_t head_panel, const float* key_maxima, float* sums) const {
    const int64_t at = (value_panels + head_panel) * kLanes;
    const Vec maximum = load(key_maxima + at) + load(filter_maxima.data() + at);
    if (p.eps > 0.0f) store(sums + at, load(sums + at) + eps_beside(log_eps, maximum));
    if (any((IntVec)(load(sums + at) < kTrustedDenominator))) sum_exactly(b, t, head_panel, sums);
  }

  // Computes by the definition those sums of a panel's heads and channels that are too small to be trusted.
  void sum_exactly(int64_t b, int64_t t, int64_t head_panel, float* sums) const {
    const int64_t length = length_of(p, b), keys = p.causal ? min(t + 1, length) : length;
    const int64_t denominators = value_panels + head_panel;
    const auto keys_of = [&](int64_t u) { return head_keys(b, u, head_panel); };
    const auto biases_of = [&](int64_t u) {
      const int64_t j = u - t + left;
      return j >= 0 && j < p.taps ? taps_of(denominators, j) : Vec{};
    };
    value_panels_of(head_panel, [&](int64_t panel, int64_t c) {
      const auto spread = [&](const auto& of_heads) {
        return [&](int64_t u) {
          float values[kLanes];
          store(values, of_heads(u));
          return channel_heads.spread(values, c);
        };
      };
      const auto value_of = [&](int64_t u) {
        return load(value + (b * p.tokens + u) * p.channels + panel * kLanes, p.channels - panel * kLanes);
      };
      Vec numerator = load(sums + panel * kLanes), denominator = channel_heads.spread(sums + denominators * kLanes, c);
      exact_sums(keys, spread(keys_of), spread(biases_of), value_of, log_eps, numerator, denominator);
      store(sums + panel * kLanes, numerator);
    });
    Vec none{}, denominator = load(sums + denominators * kLanes);
    exact_sums(keys, keys_of, biases_of, [](int64_t) { return Vec{}; }, log_eps, none, denominator);
    store(sums + denominators * kLanes, denominator);
  }

  void clear_rows(int64_t b, int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t c = 0; c < p.channels; c += kLanes)
        output.write((b * p.tokens + t) * p.channels + c, Vec{}, p.channels - c);
    output.fence();
  }
};

}  // namespace

void aft_conv(const AftConv& p, const Parallel& parallel) {
  with_element(p.element, [&](auto element) {
    with_gate(p.gate, [&](auto gate) {
      using T = decltype(element);
      const Output<T> output(p.output, p.batch * p.tokens * p.channels, p.channels);
      const ConvWindow<T, gate.value> window(p, output);
      WindowedSums<ConvWindow<T, gate.value>>(window, p).run(parallel);
    });
  });
}

}  // namespace aft::AFT_ISA
