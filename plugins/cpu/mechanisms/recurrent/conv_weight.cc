// Compiled once: half_to_float, which depends on the instruction set, has a copy for each.

#include <algorithm>

#include "kernels.h"

namespace aft {

void widen_conv_weight(const CausalDepthwiseConv& p, float* rows) {
  const int64_t count = p.channels * p.taps, row = p.weight_row();
  std::vector<float> converted;
  const float* weight = static_cast<const float*>(p.weight);
  if (p.element == Element::kFloat16) {
    converted.resize(count);
    half_to_float(p.weight, count, converted.data());
    weight = converted.data();
  }
  std::fill_n(rows, p.taps * row, 0.0f);
  for (int64_t c = 0; c < p.channels; ++c)
    for (int64_t j = 0; j < p.taps; ++j) rows[j * row + c] = weight[c * p.taps + j];
}

}  // namespace aft
