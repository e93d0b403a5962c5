// The encoder's operators on threads of our own and buffers of exact size, for the sanitizers. Values are checked
// against definitions by test_encoder_ops.py; here results must be finite and the same for any number of threads, and
// every method has its error.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "encoder.h"
#include "support.h"

namespace {

struct Shape {
  int64_t rows, width, other;
};

// Which parameters there are, and how a hidden layer is activated.
struct Form {
  bool has_norm = true, rms = false, norm_bias = true, biases = true, gated = false;
  aft::Activation activation = aft::Activation::kGelu;
};

// Every choice of a form by bits of a number.
Form form_of(unsigned bits) {
  return {(bits & 1) == 0,  (bits & 2) != 0, (bits & 4) == 0, (bits & 8) == 0, (bits & 16) != 0,
          static_cast<aft::Activation>(bits >> 5 & 3)};
}

using Outputs = std::vector<std::vector<char>>;
using Call = std::function<void(Outputs& outputs, const aft::Parallel&)>;

// `sizes` are the values in each output.
void check(const std::string& what, const std::vector<int64_t>& sizes, aft::Element element, const Call& call) {
  std::vector<Outputs> results;
  for (int threads : thread_counts()) {
    Outputs& outputs = results.emplace_back();
    for (int64_t size : sizes) outputs.push_back(encode(Numbers(size, NAN), element));
    call(outputs, {run_on_threads, &threads, 3});
    for (const std::vector<char>& output : outputs) expect(finite(output, element), what + " is not finite");
  }
  expect(results.front() == results.back(), what + " depends on the number of threads");
}

void check_all(const Shape& s, unsigned form_bits, aft::Method method, float scale, aft::Element element) {
  const Form form = form_of(form_bits);
  const std::string what = " in form " + std::to_string(form_bits) + " on [" + std::to_string(s.rows) + ", " + std::to_string(s.width) + "] x " +
                           std::to_string(s.other) + " by method " + name_of(method) + ", element " +
                           std::to_string(static_cast<int>(element));
  const std::vector<char> x = encode(numbers(s.rows * s.width, scale, 1), element);
  const std::vector<char> residual = encode(numbers(s.rows * s.other, scale, 2), element);
  const Numbers norm_weight = numbers(s.width, 1, 3), norm_bias = numbers(s.width, 1, 4);
  const Numbers bias_in = numbers(s.other, 1, 5), bias_out = numbers(s.width, 1, 6);
  const aft::Norm norm{form.has_norm ? norm_weight.data() : nullptr,
                       form.has_norm && form.norm_bias ? norm_bias.data() : nullptr, 1e-5f, form.rms};
  const auto bias_of = [&](const Numbers& bias) { return form.biases ? bias.data() : nullptr; };
  const auto weight_up = aft::pack_weight(numbers(s.width * s.other, scale, 15).data(), s.width, s.other, method);
  const Numbers bias_up = numbers(s.other, 1, 16);
  const auto weight_in = aft::pack_weight(numbers(s.width * s.other, scale, 7).data(), s.width, s.other, method);
  const auto weight_out = aft::pack_weight(numbers(s.width * s.other, scale, 8).data(), s.other, s.width, method);

  // One, and three of different widths, as query, key and value may be.
  const int64_t columns[] = {s.other, s.width, 1 + s.other / 9};
  std::unique_ptr<const aft::PackedWeight> weights[3];
  Numbers biases[3];
  for (int i = 0; i < 3; ++i) {
    weights[i] = aft::pack_weight(numbers(s.width * columns[i], scale, 9 + i).data(), s.width, columns[i], method);
    biases[i] = numbers(columns[i], 1, 12 + i);
  }
  for (int64_t count : {1, 3}) {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < count; ++i) sizes.push_back(s.rows * columns[i]);
    check("layer_norm_linear, " + std::to_string(count) + what, sizes, element,
          [&](Outputs& outputs, const aft::Parallel& parallel) {
            std::vector<aft::Linear> linears;
            for (size_t i = 0; i < outputs.size(); ++i)
              linears.push_back({weights[i].get(), bias_of(biases[i]), outputs[i].data()});
            aft::layer_norm_linear({element, s.rows, x.data(), norm, linears.data(), count}, parallel);
          });
  }
  check("layer_norm_feed_forward" + what, {s.rows * s.width}, element,
        [&](Outputs& outputs, const aft::Parallel& parallel) {
          aft::layer_norm_feed_forward(
              {element, s.rows, x.data(), norm, weight_in.get(), bias_of(bias_in), weight_out.get(),
               bias_of(bias_out), outputs[0].data(), form.activation, form.gated ? weight_up.get() : nullptr,
               form.gated ? bias_of(bias_up) : nullptr},
              parallel);
        });
  check("linear_residual" + what, {s.rows * s.other}, element, [&](Outputs& outputs, const aft::Parallel& parallel) {
    aft::linear_residual(
        {element, s.rows, x.data(), weight_in.get(), bias_of(bias_in), residual.data(), outputs[0].data()}, parallel);
  });
}

struct Layer {
  int64_t batch, tokens, width, heads;
};

void check_fastformer(const Layer& s, aft::Method method, float scale, aft::Element element) {
  const std::string what = "layer_norm_fastformer on [" + std::to_string(s.batch) + ", " + std::to_string(s.tokens) +
                           ", " + std::to_string(s.width) + "] by method " + name_of(method) + ", element " +
                           std::to_string(static_cast<int>(element));
  const std::vector<char> x = encode(numbers(s.batch * s.tokens * s.width, scale, 1), element);
  const auto vector = [&](unsigned seed) { return numbers(s.width, 1, seed); };
  const auto matrix = [&](unsigned seed) { return numbers(s.width * s.width, 0.2f, seed); };
  const Numbers norm_weight = vector(2), norm_bias = vector(3), query_bias = vector(4), key_bias = vector(5);
  const Numbers bias = vector(6), query_weight = matrix(7), key_weight = matrix(8);
  const Numbers alpha = numbers(s.width * s.heads, scale, 9), beta = numbers(s.width * s.heads, scale, 10);
  const auto packed_query = aft::pack_weight(query_weight.data(), s.width, s.width, method);
  const auto weight = aft::pack_weight(matrix(11).data(), s.width, s.width, method);
  std::vector<int64_t> lengths(s.batch, s.tokens);
  lengths.back() = s.batch > 1 ? 0 : s.tokens - 1;
  check(what, {s.batch * s.tokens * s.width}, element, [&](Outputs& outputs, const aft::Parallel& parallel) {
    aft::layer_norm_fastformer({element, s.batch, s.tokens, s.heads, x.data(),
                                {norm_weight.data(), norm_bias.data(), 1e-5f},
                                query_weight.data(), packed_query.get(), query_bias.data(), key_weight.data(),
                                key_bias.data(), alpha.data(), beta.data(), weight.get(), bias.data(),
                                lengths.data(), outputs[0].data()},
                               parallel);
  });
}

// output = x weight by a method, x and weight being drawn.
Numbers multiply(const Shape& s, aft::Method method) {
  const Numbers x = numbers(s.rows * s.width, 1, 1), bias(s.other), residual(s.rows * s.other);
  const auto packed = aft::pack_weight(numbers(s.width * s.other, 1, 2).data(), s.width, s.other, method);
  expect(packed->method == method, name_of(method) + " is packed for " + name_of(packed->method));
  Numbers output(s.rows * s.other);
  int threads = 1;
  aft::linear_residual({aft::Element::kFloat32, s.rows, x.data(), packed.get(), bias.data(), residual.data(),
                        output.data()},
                       {run_on_threads, &threads, 1});
  return output;
}

// Tiles add up integers exactly, as vectors do. In bfloat16 the order of additions differs, and nothing else.
void check_tiles(const Shape& s) {
  const auto largest_difference = [&](aft::Method tiles, aft::Method vectors) {
    const Numbers one = multiply(s, tiles), other = multiply(s, vectors);
    double difference = 0;
    for (size_t i = 0; i < one.size(); ++i) difference = std::fmax(difference, std::fabs(double{one[i]} - other[i]));
    return difference;
  };
  const std::string what = " by tiles on " + std::to_string(s.rows) + " x " + std::to_string(s.width) + " x " +
                           std::to_string(s.other) + " differs by ";
  const double in_int8 = largest_difference(aft::Method::kAmxInt8, aft::Method::kInt8);
  expect(in_int8 == 0, "int8" + what + std::to_string(in_int8));
  const double in_bf16 = largest_difference(aft::Method::kAmxBfloat16, aft::Method::kBfloat16);
  expect(in_bf16 <= 1e-6 * static_cast<double>(s.width), "bf16" + what + std::to_string(in_bf16));
}

// The error of a method is that of kMethods, and not by much less: it is the method, and not another in its place.
void check_error(aft::Method method) {
  const Shape s{40, 700, 50};
  const Numbers x = numbers(s.rows * s.width, 1, 1), weight = numbers(s.width * s.other, 1, 2);
  const Numbers output = multiply(s, method);
  double largest = 0, error = 0;
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.other; ++c) {
      double exact = 0;
      for (int64_t k = 0; k < s.width; ++k) exact += double{x[r * s.width + k]} * weight[k * s.other + c];
      largest = std::fmax(largest, std::fabs(exact));
      error = std::fmax(error, std::fabs(output[r * s.other + c] - exact));
    }
  error /= largest;
  const std::string what = name_of(method) + " of " + aft::product_instruction_set();
  const aft::Precision finest = aft::kMethods[static_cast<int>(method)].finest;
  const double bound = method == aft::Method::kInt16         ? 1e-3
                       : finest == aft::Precision::kFloat32  ? 1e-6
                       : finest == aft::Precision::kBfloat16 ? 4e-3
                                                             : 1.2e-2;
  expect(error <= bound, what + ": error " + std::to_string(error));
  expect(method == aft::Method::kFloat32 || error >= bound / 20, what + ": error " + std::to_string(error));
}

constexpr unsigned kDrawnShapes = 128;  // as many as there are forms

}  // namespace

int main() {
  if (instructions_missing()) return kSkipped;
  for (aft::Method method : usable_methods()) check_error(method);
  if (std::string(aft::product_instruction_set()) == "avx512_amx")
    // Heights of one tile and of two, several blocks and a rest; whole and broken steps, chunks and panels.
    for (int64_t rows : {1, 15, 16, 17, 31, 32, 33, 96, 117})
      for (int64_t width : {1, 32, 33, 64, 66, 256, 257, 300, 1100})
        for (int64_t other : {1, 32, 50}) check_tiles({rows, width, other});
  const Shape shapes[] = {{1, 1, 1},     {5, 16, 16},    {13, 17, 33},    {12, 31, 65},
                          {300, 48, 24}, {50, 300, 530}, {25, 1100, 1090}};
  unsigned drawn = 0;  // forms take turns, and the form of old files is in every shape
  for (const Shape& shape : shapes)
    for (aft::Method method : usable_methods())
      for (float scale : {1.0f, 200.0f})
        for (aft::Element element : {aft::Element::kFloat32, aft::Element::kFloat16})
          check_all(shape, scale == 1 ? 0 : drawn += 37, method, scale, element);
  for (unsigned seed = 1; seed <= kDrawnShapes; ++seed)
    for (aft::Method method : usable_methods()) {
      const Numbers sizes = numbers(4, 1, seed);
      const auto size = [&](int i, int64_t most) {
        return 1 + static_cast<int64_t>(std::fabs(sizes[i]) * static_cast<float>(most));
      };
      check_all({size(1, 60), size(2, 400), size(3, 400)}, seed, method, 1, aft::Element::kFloat32);
    }
  const Layer layers[] = {{1, 1, 1, 1},    {2, 3, 1, 1},   {3, 31, 12, 4},
                          {2, 290, 17, 1}, {1, 600, 72, 9}, {2, 20, 530, 2}};
  for (const Layer& layer : layers)
    for (aft::Method method : usable_methods())
      for (float scale : {1.0f, 200.0f})
        for (aft::Element element : {aft::Element::kFloat32, aft::Element::kFloat16})
          check_fastformer(layer, method, scale, element);
  std::printf("%s, %d failures\n", aft::product_instruction_set(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
