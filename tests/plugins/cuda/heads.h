// Heads of widths that the common table lacks.
#pragma once

#include "problem.h"

// Runs try_case on c, and where c is of a few tokens and channels also with one wide head or heads of one channel.
inline int with_more_widths(const Case& c, const Bounds& bounds,
                            const std::function<int(const Case&, const Bounds&)>& try_case) {
  int failures = try_case(c, bounds);
  if (c.tokens != 33 || (c.channels != 8 && c.channels != 36)) return failures;
  Case other = c;
  other.channels = c.channels == 8 ? 7 : c.causal ? 256 : 160;
  other.heads = c.channels == 8 ? 7 : 1;
  other.batch = 1;
  return failures + try_case(other, bounds);
}
