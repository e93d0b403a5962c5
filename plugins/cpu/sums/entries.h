// The entries of keys and the buffer that holds those of a window.
//
// An entry is the term of one key, relative to a maximum m per channel: exp(K - m) V, and exp(K - m) for the
// denominator. It is kVecs vectors long. Channels are cut into panels, each with an entry of its own for every key.
#pragma once

#include "simd/simd.h"

namespace aft::AFT_ISA {

// The number of keys whose entries are computed panel by panel. It is small, so that memory is read in its order.
constexpr int64_t kKeyBlock = 8;

template <int kVecs>
constexpr int64_t kEntryFloats = kVecs * kLanes;

template <int kVecs>
AFT_INLINE void multiply_entry(float* entry, Vec factor) {
  for (int v = 0; v < kVecs; ++v) store(entry + v * kLanes, load(entry + v * kLanes) * factor);
}

// Entries of the keys from `first` on, panel by panel: a buffer that moves along with the rows. The keys of a panel lie
// next to each other, so old entries are dropped by moving the others to the front, once there is no room behind them.
template <int kVecs>
struct EntryBuffer {
  float* data;
  int64_t capacity;  // keys of a panel
  int64_t origin;    // the key at `data`
  int64_t first;     // the first key that is still needed

  AFT_INLINE float* at(int64_t panel, int64_t key) const {
    return data + (panel * capacity + key - origin) * kEntryFloats<kVecs>;
  }

  // Drops the keys before `to`, where entries end before key `end`, and makes room for `room` keys more.
  void advance(int64_t to, int64_t end, int64_t room, int64_t panels) {
    first = to;
    if (end + room <= origin + capacity) return;
    for (int64_t panel = 0; panel < panels; ++panel)
      __builtin_memmove(at(panel, origin), at(panel, to), (end - to) * kEntryFloats<kVecs> * sizeof(float));
    origin = to;
  }
};

}  // namespace aft::AFT_ISA
