// The kernels on threads of our own and buffers of exact size, for the sanitizers: whatever is read or written
// out of bounds, undefined or raced for shows here. Values are checked against definitions by test_kernels.py;
// here results must be finite, the same for any number of threads, free of what lies in padded rows, and no numbers
// where one that went in was none.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "guarded.h"
#include "kernels.h"
#include "support.h"

namespace {

using aft::Element;

struct Shape {
  int64_t batch, tokens, channels, heads, window;
};

// Runs one kernel on one shape; `fill` completes the parameters with encoded inputs of its own.
template <class Params>
void check(const char* name, void (*kernel)(const Params&, const aft::Parallel&), const Shape& shape, Element element,
           bool causal, float scale, int64_t key_channels,
           const std::function<void(Params&, std::function<const void*(int64_t)>)>& fill) {
  std::vector<std::vector<char>> kept;
  const auto input = [&](int64_t count) -> const void* {
    kept.push_back(encode(numbers(count, scale, static_cast<unsigned>(kept.size()) + 1), element));
    return kept.back().data();
  };
  std::vector<int64_t> lengths(shape.batch);
  for (int64_t b = 0; b < shape.batch; ++b) lengths[b] = b % 3 == 0 ? shape.tokens : b % 3 == 1 ? shape.tokens / 2 : 0;

  Params params{};
  params.element = element;
  params.causal = causal;
  params.batch = shape.batch;
  params.tokens = shape.tokens;
  params.channels = shape.channels;
  const int64_t rows = shape.batch * shape.tokens;
  params.query = input(rows * shape.channels);
  params.key = input(rows * key_channels);
  params.value = input(rows * shape.channels);
  params.lengths = lengths.data();
  fill(params, input);

  const std::string what = std::string(causal ? "causal " : "") + name + " on [" + std::to_string(shape.batch) + ", " +
                           std::to_string(shape.tokens) + ", " + std::to_string(shape.channels) + "]" +
                           (element == Element::kFloat16 ? " in float16" : "");
  std::vector<char> first;
  for (int threads : thread_counts()) {
    std::vector<char> output(rows * shape.channels * element_size(element), '\xff');
    params.output = output.data();
    kernel(params, {run_on_threads, &threads, 3});
    expect(finite(output, element), what + " is not finite");
    if (first.empty()) first = output;
    expect(output == first, what + " depends on the number of threads");
  }

  // A NaN leads to no other address, and in a long document three more runs of the exact path take most of the time.
  if (is_sanitizer_part() || (is_part() && shape.tokens > 300)) return;
  int threads = 1;
  const int64_t token = shape.tokens / 2;
  const size_t size = element_size(element);
  for (int tensor = 0; tensor < 3; ++tensor) {  // query, key, value
    char number[4], *at = &kept[tensor][token * (tensor == 1 ? key_channels : shape.channels) * size];
    std::memcpy(number, at, size);
    std::memset(at, '\xff', size);  // NaN
    std::vector<char> output(first.size());
    params.output = output.data();
    kernel(params, {run_on_threads, &threads, 1});
    expect(std::isnan(decode_one(&output[token * shape.channels * size], element)), what + " hides what is no number");
    std::memcpy(at, number, size);
  }
}

void check_all(const Shape& s, Element element, bool causal, float scale) {
  const auto run = [&](auto params, const char* name, auto kernel, int64_t key_channels, auto fill) {
    check<decltype(params)>(name, kernel, s, element, causal, scale, key_channels, fill);
  };
  const auto nothing = [](auto&, auto) {};
  run(aft::AftSimple{}, "aft_simple", aft::aft_simple, s.channels, nothing);
  for (const float eps : {0.0f, 0.5f}) {
    run(aft::AftFull{}, "aft_full", aft::aft_full, s.channels, [&](aft::AftFull& p, auto input) {
      p.eps = eps;
      p.position_bias = input(s.tokens * s.tokens);
      p.position_bias_width = s.tokens;
    });
    run(aft::AftLocal{}, "aft_local", aft::aft_local, s.channels, [&](aft::AftLocal& p, auto input) {
      p.eps = eps;
      p.band = input(s.tokens * (causal ? s.window : 2 * s.window - 1));
      p.band_rows = s.tokens;
      p.window = s.window;
    });
    run(aft::AftConv{}, "aft_conv", aft::aft_conv, s.heads, [&](aft::AftConv& p, auto input) {
      p.eps = eps;
      p.filter = input(s.heads * s.window);
      p.heads = s.heads;
      p.taps = s.window;
    });
  }
  run(aft::EfficientAttention{}, "efficient_attention", aft::efficient_attention, s.channels,
      [&](aft::EfficientAttention& p, auto) {
        p.heads = s.heads;
        p.scale = 1.0f;
      });
  run(aft::LinearAttention{}, "linear_attention", aft::linear_attention, s.channels,
      [&](aft::LinearAttention& p, auto) {
        p.heads = s.heads;
        p.eps = 1e-6f;
      });
  run(aft::AftSimple{}, "aft_simple by head", aft::aft_simple, s.heads, [&](aft::AftSimple& p, auto) {
    p.gate = aft::Gate::kRelu;
    p.key_channels = s.heads;
    p.eps = 0.5f;
  });
  for (const auto normalizer : {aft::Normalizer::kClamp, aft::Normalizer::kNone})
    run(aft::LinearAttention{}, "linear_attention of features", aft::linear_attention, s.channels,
        [&](aft::LinearAttention& p, auto) {
          p.heads = s.heads;
          p.feature_map = aft::FeatureMap::kIdentity;
          p.normalizer = normalizer;
          p.eps = 0.5f;
        });
  run(aft::Fastformer{}, "fastformer", aft::fastformer, s.channels, [&](aft::Fastformer& p, auto input) {
    p.alpha_weight = input(s.channels * s.heads);
    p.beta_weight = input(s.channels * s.heads);
    p.heads = s.heads;
  });
}

}  // namespace

int main() {
  if (instructions_missing()) return kSkipped;
  const Shape shapes[] = {{1, 1, 1, 1, 1},    {2, 17, 5, 5, 3},    {3, 33, 48, 3, 40},
                          {1, 300, 64, 4, 9}, {1, 600, 288, 2, 33}, {2, 1100, 24, 1, 128}};
  for (const Shape& shape : shapes)
    for (Element element : {Element::kFloat32, Element::kFloat16})
      for (bool causal : {false, true})
        for (float scale : {1.0f, 200.0f}) check_all(shape, element, causal, scale);
  std::printf("%s, %d failures\n", aft::instruction_set(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
