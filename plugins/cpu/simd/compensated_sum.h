// Sums of as many terms as a document has blocks of tokens.
//
// Where the terms are alike, as in a document that repeats itself, a running sum rounds to the same side every time,
// and its error grows with their number: by 3e-8 of the sum per term, up to 1e-3 over a million tokens in blocks
// of 32. Keeping the rounding errors of additions beside the sum, and adding them once they are large enough, leaves
// about one rounding (Kahan, "Further remarks on reducing truncation errors", 1965; with the addition of Knuth, The Art
// of Computer Programming 2, 4.2.2, theorem B, either operand may be the larger).
#pragma once

#include "simd/simd.h"

namespace aft::AFT_ISA {

// sum += term; sum + compensation is the sum as it would be without rounding. It needs the additions in the order in
// which they are written, so no -ffast-math.
AFT_INLINE void add_compensated(Vec& sum, Vec& compensation, Vec term) {
  const Vec raised = sum + term, added = raised - sum;
  const Vec rest = compensation + ((sum - (raised - added)) + (term - added));
  sum = raised + rest;
  compensation = rest - (sum - raised);
}

AFT_INLINE void add_compensated(float* sum, float* compensation, Vec term) {
  Vec total = load(sum), rest = load(compensation);
  add_compensated(total, rest, term);
  store(sum, total);
  store(compensation, rest);
}

}  // namespace aft::AFT_ISA
