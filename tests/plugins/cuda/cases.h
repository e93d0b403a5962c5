// The inputs every CUDA kernel is tried on: one table of shapes for all mechanisms.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device.h"
#include "kernels.h"

enum class Data {
  kSmall,          // everything within +-1
  kLarge,          // everything within +-100
  kLateKey,        // small, but the last key that counts is 90: sums before it must not vanish
  kDominatingKey,  // small, but one key in the middle is 90: the others must not matter
};

enum class Layout {
  kPacked,
  kUnaligned  // packed, but every tensor starts one element after a multiple of 16 bytes
};

using aft::Element;
using aft::Gate;

struct Case {
  int index;
  int64_t batch, tokens, channels, heads;  // heads divides channels
  Element element;
  bool causal;
  Gate gate;
  Data data;
  Layout layout;
  std::vector<int64_t, device::HostAllocator<int64_t>> lengths;
  bool counts_accesses = false;  // instead of comparing the output

  // For parameters that only one mechanism has: the same number below `below` every time.
  int64_t draw(int64_t below, unsigned salt = 0) const {
    uint32_t bits = static_cast<uint32_t>(index) * 2654435761u + salt * 40503u + 12345u;
    bits ^= bits >> 16;
    bits *= 0x7feb352du;
    bits ^= bits >> 15;
    return bits % static_cast<uint32_t>(below);
  }
  float range() const { return data == Data::kLarge ? 100.0f : 1.0f; }
  std::string name() const;
};

// Every combination of tokens, channels, element and causal, and some of more tokens where those are few; the
// rest is drawn for each.
inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (int64_t tokens : {1, 2, 31, 32, 33, 63, 65, 127, 257, 700})
    for (int64_t channels : {8, 36, 64, 72})
      for (Element element : {Element::kFloat32, Element::kFloat16, Element::kBfloat16})
        for (bool causal : {false, true}) {
          if (tokens == 700 && channels != 8) continue;
          Case c{static_cast<int>(cases.size()), 1, tokens, channels, 1, element, causal, {}, {}, {}, {}};
          c.batch = 1 + c.draw(3, 1);
          const int64_t heads = channels == 36 || channels == 72 ? 3 : 2;
          c.heads = c.draw(2, 2) ? heads : 1;
          c.gate = static_cast<Gate>(c.draw(3, 3));
          c.data = static_cast<Data>(c.draw(4, 4));
          c.layout = static_cast<Layout>(c.draw(2, 5));
          for (int64_t b = 0; b < c.batch; ++b) {
            const int64_t some[] = {tokens, (tokens + 1) / 2, 0, c.draw(tokens + 1, 6), tokens - 1};
            c.lengths.push_back(some[c.draw(5, 7 + static_cast<unsigned>(b))]);
          }
          cases.push_back(c);
        }
  return cases;
}

inline std::string Case::name() const {
  static const char* const elements[] = {"float32", "float16", "bfloat16"};
  static const char* const contents[] = {"small", "large", "late key", "dominating key"};
  static const char* const layouts[] = {"packed", "unaligned"};
  std::string text = "case " + std::to_string(index) + ", " + (causal ? "causal " : "") + elements[static_cast<int>(element)] + " [" +
                     std::to_string(batch) + ", " + std::to_string(tokens) + ", " + std::to_string(channels) + "], " +
                     std::to_string(heads) + " heads, " + contents[static_cast<int>(data)] + ", " +
                     layouts[static_cast<int>(layout)] + ", lengths";
  for (int64_t length : lengths) text += " " + std::to_string(length);
  return text;
}
