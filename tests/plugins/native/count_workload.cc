// One call of one kernel between two functions whose names mark it in an emulator's trace, for
// tests/benchmarks/aarch64.py, which counts the instructions in between.
//
//   count_workload KERNEL float32|float16 METHOD CAUSAL TOKENS CHANNELS
//
// Where the instruction set lacks the method, it is float32.

#include <cstdio>
#include <functional>
#include <map>

#include "support.h"

extern "C" {
__attribute__((noinline)) void aft_count_begin() { asm volatile(""); }
__attribute__((noinline)) void aft_count_end() { asm volatile(""); }
}

namespace {

using aft::Element;
using aft::Method;

constexpr int64_t kHeads = 8, kWindow = 33, kTaps = 7;

void run_here(void*, size_t tasks, void (*body)(void*, size_t), void* context) {
  for (size_t task = 0; task < tasks; ++task) body(context, task);
}
const aft::Parallel kParallel{run_here, nullptr, 1};

struct Workload {
  Element element;
  Method method;
  bool causal;
  int64_t tokens, channels;
  std::vector<std::vector<char>> kept;
  std::vector<Numbers> floats;
  std::vector<std::unique_ptr<const aft::PackedWeight>> weights;
  std::vector<char> output;
  int64_t lengths[1];

  const void* input(int64_t count, float scale = 1.0f) {
    kept.push_back(encode(numbers(count, scale, static_cast<unsigned>(kept.size()) + 1), element));
    return kept.back().data();
  }
  const float* parameter(int64_t count) {
    floats.push_back(numbers(count, 0.1f, static_cast<unsigned>(floats.size()) + 1));
    return floats.back().data();
  }
  const aft::PackedWeight* weight(int64_t rows, int64_t columns) {
    weights.push_back(aft::pack_weight(parameter(rows * columns), rows, columns, method));
    return weights.back().get();
  }
  aft::Norm norm() { return {parameter(channels), parameter(channels), 1e-5f}; }

  template <class Params>
  Params sequence(int64_t key_channels) {
    Params p{};
    p.element = element;
    p.causal = causal;
    p.batch = 1;
    p.tokens = tokens;
    p.channels = channels;
    p.query = input(tokens * channels);
    p.key = input(tokens * key_channels);
    p.value = input(tokens * channels);
    p.lengths = lengths;
    p.output = output.data();
    return p;
  }
};

template <class Params>
void count(void (*kernel)(const Params&, const aft::Parallel&), const Params& p) {
  kernel(p, kParallel);  // the first call finds the instruction set and its memory
  aft_count_begin();
  kernel(p, kParallel);
  aft_count_end();
}

void aft_full(Workload& w) {
  auto p = w.sequence<aft::AftFull>(w.channels);
  p.methods = {{w.method, Method::kFloat32}, 2};
  p.position_bias = w.input(w.tokens * w.tokens, 0.4f);
  p.position_bias_width = w.tokens;
  p.constant_bias = true;
  const auto packed = aft::pack_position_bias(p);
  p.packed_bias = packed.get();
  count(aft::aft_full, p);
}

void aft_local(Workload& w) {
  auto p = w.sequence<aft::AftLocal>(w.channels);
  p.band = w.input(w.tokens * (w.causal ? kWindow : 2 * kWindow - 1));
  p.band_rows = w.tokens;
  p.window = kWindow;
  count(aft::aft_local, p);
}

void aft_conv(Workload& w) {
  auto p = w.sequence<aft::AftConv>(kHeads);
  p.filter = w.input(kHeads * kTaps);
  p.heads = kHeads;
  p.taps = kTaps;
  count(aft::aft_conv, p);
}

void efficient_attention(Workload& w) {
  auto p = w.sequence<aft::EfficientAttention>(w.channels);
  p.heads = kHeads;
  p.scale = 1.0f;
  count(aft::efficient_attention, p);
}

void linear_attention(Workload& w) {
  auto p = w.sequence<aft::LinearAttention>(w.channels);
  p.heads = kHeads;
  p.eps = 1e-6f;
  count(aft::linear_attention, p);
}

void fastformer(Workload& w) {
  auto p = w.sequence<aft::Fastformer>(w.channels);
  p.alpha_weight = w.input(w.channels * kHeads);
  p.beta_weight = w.input(w.channels * kHeads);
  p.heads = kHeads;
  count(aft::fastformer, p);
}

void layer_norm_linear(Workload& w) {
  const aft::Linear linear{w.weight(w.channels, w.channels), w.parameter(w.channels), w.output.data()};
  count(aft::layer_norm_linear,
        aft::LayerNormLinear{w.element, w.tokens, w.input(w.tokens * w.channels), w.norm(), &linear, 1});
}

void layer_norm_feed_forward(Workload& w) {
  const int64_t hidden = 4 * w.channels;
  count(aft::layer_norm_feed_forward,
        aft::LayerNormFeedForward{w.element, w.tokens, w.input(w.tokens * w.channels), w.norm(),
                                  w.weight(w.channels, hidden), w.parameter(hidden), w.weight(hidden, w.channels),
                                  w.parameter(w.channels), w.output.data()});
}

void linear_residual(Workload& w) {
  count(aft::linear_residual,
        aft::LinearResidual{w.element, w.tokens, w.input(w.tokens * w.channels), w.weight(w.channels, w.channels),
                            w.parameter(w.channels), w.input(w.tokens * w.channels), w.output.data()});
}

void layer_norm_fastformer(Workload& w) {
  const int64_t square = w.channels * w.channels;
  aft::LayerNormFastformer p{};
  p.element = w.element;
  p.batch = 1;
  p.tokens = w.tokens;
  p.heads = kHeads;
  p.input = w.input(w.tokens * w.channels);
  p.norm = w.norm();
  p.query_weight = w.parameter(square);
  p.packed_query_weight = w.weight(w.channels, w.channels);
  p.query_bias = w.parameter(w.channels);
  p.key_weight = w.parameter(square);
  p.key_bias = w.parameter(w.channels);
  p.alpha_weight = w.parameter(w.channels * kHeads);
  p.beta_weight = w.parameter(w.channels * kHeads);
  p.weight = w.weight(w.channels, w.channels);
  p.bias = w.parameter(w.channels);
  p.lengths = w.lengths;
  p.output = w.output.data();
  count(aft::layer_norm_fastformer, p);
}

const std::map<std::string, void (*)(Workload&)> kKernels = {
    {"aft_simple",
     [](Workload& w) { count(aft::aft_simple, w.sequence<aft::AftSimple>(w.channels)); }},
    {"aft_full", aft_full},
    {"aft_local", aft_local},
    {"aft_conv", aft_conv},
    {"efficient_attention", efficient_attention},
    {"linear_attention", linear_attention},
    {"fastformer", fastformer},
    {"layer_norm_linear", layer_norm_linear},
    {"layer_norm_feed_forward", layer_norm_feed_forward},
    {"linear_residual", linear_residual},
    {"layer_norm_fastformer", layer_norm_fastformer},
};

const std::map<std::string, Element> kElements = {{"float32", Element::kFloat32}, {"float16", Element::kFloat16}};

Method usable_method(const std::string& name) {
  for (const Method method : usable_methods())
    if (name == name_of(method)) return method;
  return Method::kFloat32;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 7) {
    std::printf("expected KERNEL ELEMENT METHOD CAUSAL TOKENS CHANNELS, got %d arguments\n", count - 1);
    return EXIT_FAILURE;
  }
  Workload w{};
  w.element = kElements.at(arguments[2]);
  w.method = usable_method(arguments[3]);
  w.causal = std::string(arguments[4]) == "1";
  w.tokens = w.lengths[0] = std::atoll(arguments[5]);
  w.channels = std::atoll(arguments[6]);
  w.output.resize(w.tokens * w.channels * element_size(w.element));
  kKernels.at(arguments[1])(w);
  std::printf("%s\n", aft::product_instruction_set());
}
