// Spreads a number of each head over the head's channels.
#pragma once

#include "simd/simd.h"

namespace aft::AFT_ISA {

// Channel to head where heads are `width` channels wide, by a multiplication: a division per vector would cost
// as much as the vector's arithmetic. Right below 2^31 channels.
struct Heads {
  int64_t width;
  int shift;
  uint64_t reciprocal;

  explicit Heads(int64_t width) : width(width), shift(31) {
    while (width >> (shift - 31) > 0) ++shift;  // 2^31 width < 2^shift <= 2^32 width
    reciprocal = ((uint64_t{1} << shift) + width - 1) / width;
  }

  AFT_INLINE int64_t of(int64_t channel) const {
    return static_cast<int64_t>((static_cast<uint64_t>(channel) * reciprocal) >> shift);
  }

  // values[head] for each of the channels c to c + kLanes. values is padded to whole vectors. kOneHead says that no
  // vector spans heads; found out for every vector, that costs a tenth of a kernel's time.
  template <bool kOneHead = false>
  AFT_INLINE Vec spread(const float* values, int64_t c) const {
    const int64_t head = of(c);
    if (kOneHead || __builtin_expect(of(c + kLanes - 1) == head, 1)) return splat(values[head]);
    Vec v{};
    for (int64_t lane = 0; lane < kLanes; ++lane) v[lane] = values[of(c + lane)];
    return v;
  }
};

}  // namespace aft::AFT_ISA
