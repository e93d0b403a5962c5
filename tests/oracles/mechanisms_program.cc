// One document through a formula of mechanisms.h, for test_mechanisms_header.py.
//
//   mechanisms_program STEM CAUSAL TOKENS LENGTH CHANNELS HEADS WIDTH CHOICE NUMBER
//
// stdin has query, key, value and the further tensors as float64, stdout gets the output. WIDTH is that of the position
// bias, the window or the taps; CHOICE the number of the gate, normalization or feature map; NUMBER is scale or eps.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "mechanisms.h"

namespace {

constexpr size_t kMostNumbers = 1 << 20;

oracle::Values run(const std::string& stem, oracle::Document d, int64_t heads, int64_t width, int choice,
                   double number, const oracle::Values& numbers) {
  const int64_t all = d.tokens * d.channels, keys = stem == "aft_conv" ? d.tokens * heads : all;
  d.query = numbers.data();
  d.key = d.query + all;
  d.value = d.key + keys;
  const double* const further = d.value + all;
  const int64_t left = static_cast<int64_t>(numbers.data() + numbers.size() - further);
  const auto gate = static_cast<oracle::Gate>(choice);
  if (stem == "aft_full") return aft_full(d, gate, further, width);
  if (stem == "aft_local")
    return aft_local(d, gate, further, left / (d.causal ? width : 2 * width - 1), width);
  if (stem == "aft_simple") return aft_simple(d, gate);
  if (stem == "aft_conv") return aft_conv(d, gate, heads, further, width);
  if (stem == "efficient_attention")
    return efficient_attention(d, {d, heads}, static_cast<oracle::Normalization>(choice), number);
  if (stem == "fastformer") return fastformer(d, heads, further, further + d.channels * heads);
  if (stem == "linear_attention")
    return linear_attention(d, {d, heads}, static_cast<oracle::FeatureMap>(choice), number);
  std::fprintf(stderr, "expected a mechanism's stem, got %s\n", stem.c_str());
  std::exit(EXIT_FAILURE);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 10) return EXIT_FAILURE;
  const auto integer = [&](int i) { return std::strtoll(arguments[i], nullptr, 10); };
  oracle::Values numbers(kMostNumbers);
  numbers.resize(std::fread(numbers.data(), sizeof(double), numbers.size(), stdin));
  const oracle::Document document{integer(2) != 0, integer(3), integer(4), integer(5), nullptr, nullptr, nullptr};
  const oracle::Values output = run(arguments[1], document, integer(6), integer(7), static_cast<int>(integer(8)),
                                    std::strtod(arguments[9], nullptr), numbers);
  return std::fwrite(output.data(), sizeof(double), output.size(), stdout) == output.size() ? EXIT_SUCCESS
                                                                                             : EXIT_FAILURE;
}
