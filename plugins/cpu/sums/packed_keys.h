// Keys and values of a head, packed as the right sides of two products: queries with keys, and weights with values.
//
// Method:   keys lie in panels of kPanel, of which each has the words of all channels; values in tiles of kTileKeys keys,
//           of which each has panels of kPanel channels with the words of all keys. Products of smaller numbers take
//           several channels or keys in a word; those beyond the last are 0. Rows are rotated by their positions in the
//           first-level cache, before they are packed.
// See:      matmul/weight_layout.h
#pragma once

#include "matmul/matrix_product.h"
#include "simd/load_store.h"
#include "simd/transpose.h"
#include "sums/head_rows.h"

namespace aft::AFT_ISA {

// Keys of a tile: as many as one chunk of the product of weights and values has.
template <class Product>
constexpr int64_t kTileKeys = LeftRows<Product>::kChunk;

// The words of a row of `width` channels: each chunk but the last is whole.
template <class Product>
int64_t words_of(int64_t width) {
  const int64_t whole = width / LeftRows<Product>::kChunk;
  return whole * Product::kChunkWords + steps_of<Product>(width - whole * LeftRows<Product>::kChunk);
}

// The heads whose keys and values are packed.
struct KeyHeads {
  HeadShape key, value;
  int64_t value_columns;  // channels of a value rounded up to whole panels
};

// Keys [first, end) of a head and their values; first is a multiple of kTileKeys.
template <class Product>
struct PackedKeys {
  int64_t key_words, value_columns, first, end;
  float *keys, *values;

  static int64_t key_floats(const KeyHeads& heads, int64_t count) {
    return round_up(count, kPanel) * words_of<Product>(heads.key.width);
  }
  static int64_t floats(const KeyHeads& heads, int64_t count) {
    return key_floats(heads, count) + words_of<Product>(count) * heads.value_columns;
  }
  PackedKeys(const KeyHeads& heads, float* memory, int64_t first, int64_t end)
      : key_words(words_of<Product>(heads.key.width)),
        value_columns(heads.value_columns),
        first(first),
        end(end),
        keys(memory),
        values(memory + key_floats(heads, end - first)) {}

  // The panel that begins with a key, from a chunk of the channels on.
  float* panel_at(int64_t key, int64_t chunk) const {
    return keys + (key - first) * key_words + chunk * Product::kChunkWords * kPanel;
  }
  // The start of the tile that holds a key, and the number of keys in it.
  float* tile_at(int64_t key) const {
    return values + (key - first) / kTileKeys<Product> * Product::kChunkWords * value_columns;
  }
  int64_t tile_keys(int64_t key) const {
    return min(kTileKeys<Product>, end - key / kTileKeys<Product> * kTileKeys<Product>);
  }
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

// Packs keys [first, first + count) of a head, at most kPanel.
template <class Product, class T>
void pack_keys(const T* key, int64_t stride, int64_t width, int64_t count, float* panel) {
  const int64_t steps = words_of<Product>(width);
  for (int64_t c = 0; c < steps * Product::kPerWord; c += kLanes)
    for (int v = 0; v < kTileVectors; ++v) {
      Vec rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t u = v * kLanes + i;
        rows[i] = u < count ? load(key + u * stride + c, width - c) : Vec{};
        prefetch(key + (u + kPrefetchRows) * stride + c);
      }
      transpose(rows);
      for (int64_t i = 0; i < kLanes && (c + i) / Product::kPerWord < steps; i += Product::kPerWord) {
        Vec word[Product::kPerWord];
        for (int j = 0; j < Product::kPerWord; ++j) word[j] = rows[i + j];
        store_words<Product>(panel, (c + i) / Product::kPerWord, v, Product::pack_weights(word));
      }
    }
}

// Packs a tile of `count` values.
template <class Product, class T>
void pack_values(const T* value, const KeyHeads& heads, int64_t count, float* tile) {
  const int64_t stride = heads.value.stride, steps = steps_of<Product>(count);
  for (int64_t c = 0; c < heads.value_columns; c += kPanel, tile += steps * kPanel)
    for (int64_t step = 0; step < steps; ++step)
      for (int v = 0; v < kTileVectors; ++v) {
        const int64_t channel = c + v * kLanes, channels = max(0, heads.value.width - channel);
        Vec word[Product::kPerWord];
        for (int j = 0; j < Product::kPerWord; ++j) {
          const int64_t u = step * Product::kPerWord + j;
          prefetch(value + (u + kPrefetchRows) * stride + channel);
          word[j] = u < count ? load(value + u * stride + channel, channels) : Vec{};
        }
        store_words<Product>(tile, step, v, Product::pack_weights(word));
      }
}

// Packs the tile that begins with key `first` of a document. `rotated` has room for kPanel rows of whole vectors.
template <class Product, class T>
void pack_tile(const SoftmaxAttention& p, const KeyHeads& heads, int64_t document, int64_t head, int64_t first,
               const PackedKeys<Product>& packed, float* rotated) {
  const int64_t stride = heads.key.stride, width = heads.key.width, row = heads.key.padded;
  const int64_t count = packed.tile_keys(first), at = document * key_tokens_of(p) + first;
  const T* key = static_cast<const T*>(p.key) + at * stride + head * width;
  const T* value = static_cast<const T*>(p.value) + at * heads.value.stride + head * heads.value.width;
  for (int64_t u = 0; u < count; u += kPanel) {
    const int64_t in_panel = min(kPanel, count - u);
    float* panel = packed.panel_at(first + u, 0);
    if (p.cos_cache) {
      for (int64_t i = 0; i < in_panel; ++i) {
        prefetch(key + (u + i + kPrefetchRows) * stride);
        rotate(p, key + (u + i) * stride, width, first + u + i, rotated + i * row);
      }
      pack_keys<Product>(rotated, row, width, in_panel, panel);
    } else {
      pack_keys<Product>(key + u * stride, stride, width, in_panel, panel);
    }
  }
  pack_values<Product>(value, heads, count, packed.tile_at(first));
}

}  // namespace aft::AFT_ISA
