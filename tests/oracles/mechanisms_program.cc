// One document through a formula of mechanisms.h, for test_mechanisms_header.py.
//
//   mechanisms_program STEM CAUSAL TOKENS LENGTH CHANNELS HEADS WIDTH CHOICE NUMBER NORMALIZER GROUPS VALUE_WIDTH KEYS
//
// stdin has query, key, value and the further tensors as float64, stdout gets the output. WIDTH is that of the position
// bias, the window or the taps; CHOICE the number of the gate, normalization or feature map; NUMBER is scale or eps.
// GROUPS, VALUE_WIDTH and KEYS, the number of keys, all of which count, are 0 where they do not differ. GROUPS is also
// the number of channels of the key of AFT-simple.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "mechanisms.h"

namespace {

constexpr size_t kMostNumbers = 1 << 20;

struct Shared {
  oracle::Normalizer normalizer;
  int64_t groups, value_width, keys;
};

oracle::Values run(const std::string& stem, oracle::Document d, int64_t heads, int64_t width, int choice,
                   double number, const Shared& shared, const oracle::Values& numbers) {
  const int64_t all = d.tokens * d.channels, columns = stem == "aft_conv" ? heads : shared.groups;
  const oracle::Heads grouped(d, heads, shared.groups, shared.value_width, shared.keys ? shared.keys : d.length);
  int64_t keys = columns ? d.tokens * columns : all;
  if (stem == "efficient_attention" || stem == "linear_attention")
    keys = (shared.keys ? shared.keys : d.tokens) * grouped.key_channels();
  d.query = numbers.data();
  d.key = d.query + all;
  d.value = d.key + keys;
  const double* const further = d.value + all;
  const int64_t left = static_cast<int64_t>(numbers.data() + numbers.size() - further);
  const auto gate = static_cast<oracle::Gate>(choice);
  if (stem == "aft_full") return aft_full(d, gate, further, width);
  if (stem == "aft_local")
    return aft_local(d, gate, further, left / (d.causal ? width : 2 * width - 1), width);
  if (stem == "aft_simple") return aft_simple(d, gate, shared.groups, number);
  if (stem == "aft_conv") return aft_conv(d, gate, heads, further, width);
  if (stem == "efficient_attention")
    return efficient_attention(d, grouped, static_cast<oracle::Normalization>(choice), number);
  if (stem == "fastformer") return fastformer(d, heads, further, further + d.channels * heads);
  if (stem == "linear_attention")
    return linear_attention(d, grouped, static_cast<oracle::FeatureMap>(choice), number, shared.normalizer);
  std::fprintf(stderr, "expected a mechanism's stem, got %s\n", stem.c_str());
  std::exit(EXIT_FAILURE);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 14) return EXIT_FAILURE;
  const auto integer = [&](int i) { return std::strtoll(arguments[i], nullptr, 10); };
  oracle::Values numbers(kMostNumbers);
  numbers.resize(std::fread(numbers.data(), sizeof(double), numbers.size(), stdin));
  const oracle::Document document{integer(2) != 0, integer(3), integer(4), integer(5), nullptr, nullptr, nullptr};
  const Shared shared{static_cast<oracle::Normalizer>(integer(10)), integer(11), integer(12), integer(13)};
  const oracle::Values output = run(arguments[1], document, integer(6), integer(7), static_cast<int>(integer(8)),
                                    std::strtod(arguments[9], nullptr), shared, numbers);
  return std::fwrite(output.data(), sizeof(double), output.size(), stdout) == output.size() ? EXIT_SUCCESS
                                                                                             : EXIT_FAILURE;
}
