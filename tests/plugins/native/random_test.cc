// Random cases of every kernel against its formula in double precision: shapes around the edges of blocks, windows,
// heads, gates, lengths, numbers of threads, values up to +-100 (softmax attention: 1e4) and keys that dominate all
// others. The output must be finite everywhere, equal where it counts, and the same whichever threads run its tasks. A
// NaN that counts must show in its row. No byte around or in a buffer that is not the output's may change.
//
//   random_tests [first case [cases [mechanism]]]
//
// A failure names its case, whose number alone decides everything about it. With a mechanism, as in
// `random_tests 0 10000 softmax_attention`, only its cases run. AFT_RANDOM_CASES is the number of cases if no argument
// is given.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <numeric>
#include <string>

#include "../../oracles/mechanisms.h"
#include "../../oracles/softmax_attention.h"
#include "encoder.h"
#include "support.h"

namespace {

using aft::Element;
using oracle::Document;
using oracle::Values;

oracle::Gate formula_gate(aft::Gate gate) {
  if (gate == aft::Gate::kSigmoid) return oracle::Gate::kSigmoid;
  if (gate == aft::Gate::kRelu) return oracle::Gate::kRelu;
  return gate == aft::Gate::kTanh ? oracle::Gate::kTanh : oracle::Gate::kNone;
}

// One case: its shape, its inputs and what is wrong with it.
class Case {
 public:
  Case(uint64_t number, const std::string& mechanism)
      : random(number),
        element(random.choose({Element::kFloat32, Element::kFloat16})),
        causal(random.one_in(2)),
        batch(random.between(1, 3)),
        tokens(random.one_in(25) ? random.choose<int64_t>({97, 128, 191, 257, 300, 530, 1100})
               : random.one_in(2) ? random.between(1, 70)
                                  : random.choose<int64_t>({1, 2, 3, 7, 11, 12, 13, 16, 17, 24, 31, 32, 33, 64, 65})),
        heads(random.between(1, tokens > 70 ? 2 : 4)),
        channels(heads * (tokens > 70 || !random.one_in(20) ? random.between(1, 6)
                          : random.one_in(8)                ? 144
                                                            : random.between(7, 36))),
        window(random.one_in(4) ? random.between(1, 90) : random.between(1, 9)),
        range(random.choose({0.1, 1.0, 10.0, 100.0})),
        threads(static_cast<int>(random.one_in(2) ? 1 : random.between(2, 4))),
        gate(random.choose({aft::Gate::kSigmoid, aft::Gate::kTanh, aft::Gate::kNone, aft::Gate::kRelu})),
        bound(element == Element::kFloat16 ? 6e-4 : 1e-5),
        output_channels(channels),
        key_tokens(tokens),
        rows(tokens) {
    for (int64_t b = 0; b < batch; ++b) lengths.push_back(random.one_in(3) ? random.between(0, tokens) : tokens);
    std::iota(rows.begin(), rows.end(), 0);
    what = "case " + std::to_string(number) + ": " + (causal ? "causal " : "") + mechanism;
  }

  // Draws another shape: wide heads, long documents, documents of nothing but padding, and large values.
  void draw_large_shape() {
    if (random.one_in(4)) range = random.choose({1e3, 1e4});
    int64_t width = channels / heads;
    if (random.one_in(4)) width = random.between(1, 264);
    // Time grows with the square of the tokens, so the longest documents are rare.
    if (random.one_in(150)) {
      tokens = random.one_in(2) ? random.between(1100, 4097) : random.choose<int64_t>({1537, 2048, 2049, 4096, 4097});
      batch = random.between(1, 2);
      heads = random.between(1, 2);
      if (!random.one_in(4)) width = random.between(1, 40);
    }
    channels = heads * width;
    key_tokens = tokens;
    lengths.assign(batch, tokens);
    for (int64_t& length : lengths)
      if (random.one_in(3)) length = random.one_in(4) ? 0 : random.between(0, tokens);
  }

  // Leaves some random rows to be compared, and the last of each document, of those that see many keys.
  void choose_rows() {
    rows.resize(tokens);
    std::iota(rows.begin(), rows.end(), 0);
    if (tokens * key_tokens < 1 << 16) return;
    rows.resize(12);
    for (int64_t& row : rows) row = random.between(0, tokens - 1);
    for (int64_t length : lengths)
      if (length > 0) rows.push_back(length - 1);
  }

  // Sets the parameters of heads that may share keys and values, of values as wide as keys or not, and of keys of their
  // own number, with the query, the key and the value.
  template <class Params>
  oracle::Heads draw_heads(Params& p, double key_range, int64_t widest_value = 36, int64_t most_keys = 70) {
    p.heads = heads;
    p.kv_heads = random.one_in(2) ? 0 : heads % 2 == 0 && random.one_in(2) ? 2 : random.one_in(2) ? 1 : heads;
    p.value_width = random.one_in(2) ? 0 : random.one_in(4) ? random.between(7, widest_value) : random.between(1, 6);
    if (!causal && random.one_in(3)) key_tokens = random.one_in(8) ? 0 : random.between(1, most_keys);
    if ((key_tokens != tokens || random.one_in(4)) && !causal)
      for (int64_t b = 0; b < batch; ++b) key_lengths.push_back(random.between(0, key_tokens));
    p.key_tokens = key_tokens;
    p.key_lengths = key_lengths.empty() ? nullptr : key_lengths.data();
    const oracle::Heads shape(document_shape(), heads, p.kv_heads, p.value_width);
    output_channels = shape.output_channels();
    p.query = sequence().buffer->data();
    p.key = input(batch * p.key_tokens * shape.key_channels(), key_range).buffer->data();
    p.value = input(batch * p.key_tokens * shape.value_channels(), range).buffer->data();
    return shape;
  }

  // The heads of document b.
  oracle::Heads heads_of(const oracle::Heads& shape, int64_t b) const {
    oracle::Heads own = shape;
    own.keys = key_lengths.empty() ? lengths[b] : key_lengths[b];
    return own;
  }
  const Values& values_of(size_t i) const { return inputs_[i].values; }

  // A tensor of values in +-range, as the kernel sees it and in double precision.
  struct Input {
    std::unique_ptr<Guarded> buffer;
    std::vector<char> before;
    Values values;
  };
  const Input& sequence() { return input(batch * tokens * channels, range); }
  const Input& input(int64_t count, double reach) {
    Values drawn(count);
    for (double& value : drawn) value = random.uniform(reach);
    return keep(drawn);
  }
  // Keys in +-range around a level. One may dominate its channel, or all channels.
  const Input& keys(int64_t key_channels) {
    Values drawn(batch * tokens * key_channels);
    const double level = random.one_in(3) ? random.choose({-100.0, -20.0, -5.0, 5.0, 20.0, 100.0}) : 0;
    for (double& value : drawn) value = level + random.uniform(range);
    if (random.one_in(3)) {
      const int64_t row = random.between(0, batch * tokens - 1), step = random.between(1, 3);
      for (int64_t c = 0; c < key_channels; c += step)
        drawn[row * key_channels + c] = random.choose({60.0, 100.0, 120.0});
    }
    return keep(drawn);
  }

  template <class Params>
  Params params(const Input& query, const Input& key, const Input& value) const {
    Params p = shape_params<Params>();
    p.query = query.buffer->data();
    p.key = key.buffer->data();
    p.value = value.buffer->data();
    return p;
  }
  template <class Params>
  Params shape_params() const {
    Params p{};
    p.element = element;
    p.causal = causal;
    p.batch = batch;
    p.tokens = tokens;
    p.channels = channels;
    p.lengths = lengths.data();
    return p;
  }

  // Runs the kernel and compares each document with expected(document, its number), the error relative to `largest`.
  template <class Params, class Expected>
  void check(void (*kernel)(const Params&, const aft::Parallel&), Params p, double largest, const Expected& expected) {
    what += std::string(element == Element::kFloat16 ? " in float16" : "") + " on [" + std::to_string(batch) + ", " +
            std::to_string(tokens) + ", " + std::to_string(channels) + "], " + std::to_string(heads) +
            " heads, window " + std::to_string(window) + ", values in +-" + std::to_string(range) + ", " +
            std::to_string(threads) + " threads";
    Guarded output(batch * tokens * output_channels * element_size(element), shift());
    std::memset(output.data(), '\xff', output.size());
    p.output = output.data();
    kernel(p, {run_on_threads, &threads, threads});

    expect(output.bands_untouched(), what + ": wrote outside of the output");
    for (const Input& one : inputs_) {
      const bool same =
          one.before.empty() || std::memcmp(one.buffer->data(), one.before.data(), one.before.size()) == 0;
      expect(same && one.buffer->bands_untouched(), what + ": changed an input or what is around it");
    }
    const Values actual = decode(output, element);
    double worst = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const Values exact = expected(document(b), b);
      const double most = element == Element::kFloat16 ? 65504.0 : INFINITY;  // beyond it, both are infinite
      // Below 2^-14 numbers in float16 have a fixed step of 2^-24, which may be large beside the largest output.
      const double half_step = element == Element::kFloat16 ? 0x1p-25 : 0;
      const auto found = [&](int64_t i) { return std::clamp(actual[b * tokens * output_channels + i], -most, most); };
      for (int64_t i = 0; i < tokens * output_channels; ++i)
        if (!std::isfinite(found(i))) worst = INFINITY;
      for (int64_t i : rows)
        for (int64_t at = i * output_channels; i < lengths[b] && at < (i + 1) * output_channels; ++at) {
          const double off = (std::abs(found(at) - std::clamp(exact[at], -most, most)) - half_step) / largest;
          const double excess = excused.empty() ? off : off - excused[at];
          if (!(excess <= worst)) worst = excess;
        }
    }
    error = worst;
    if (random.one_in(3)) check_threads(kernel, p, output);
    if (sees_own_key && !is_sanitizer_part()) check_nan(kernel, p, output);  // a NaN leads to no other address
  }

  Document document(int64_t b) const {
    const auto values = [&](size_t i) {
      const Values& all = inputs_[i].values;
      return all.data() + b * (all.size() / batch);
    };
    return {causal, tokens, lengths[b], channels, values(0), values(1), values(2)};
  }

  Document document_shape() const { return {causal, tokens, tokens, channels, nullptr, nullptr, nullptr}; }

  Random random;
  Element element;
  bool causal;
  int64_t batch, tokens, heads, channels, window;
  double range;
  int threads;
  aft::Gate gate;
  std::vector<int64_t> lengths;
  double bound;  // of the error, which is relative to the largest size of an output's terms
  int64_t output_channels, key_tokens;
  std::vector<int64_t> rows;  // whose outputs are compared
  std::vector<int64_t> key_lengths;
  Values excused;  // of the last expected document, the error of each output beyond `bound` that is allowed; empty: 0
  bool sees_own_key = true;  // whether every row sees the key of its number
  double error = 0;
  std::string what;

 private:
  // Tensors of a runtime are aligned as a rule, but a kernel may not need it.
  size_t shift() { return random.one_in(2) ? 0 : element_size(element) * random.between(1, 31); }

  template <class Params>
  void check_threads(void (*kernel)(const Params&, const aft::Parallel&), Params p, Guarded& first) {
    Guarded output(first.size(), shift());
    p.output = output.data();
    int others = 1 + threads % 3;
    kernel(p, {run_on_threads, &others, threads});
    expect(std::memcmp(output.data(), first.data(), first.size()) == 0, what + ": depends on the threads that run it");
  }

  // The first channel of query, key or value becomes NaN in a row that counts for itself.
  template <class Params>
  void check_nan(void (*kernel)(const Params&, const aft::Parallel&), Params p, Guarded& output) {
    const int64_t b = random.between(0, batch - 1);
    const int64_t most = key_lengths.empty() ? lengths[b] : std::min(lengths[b], key_lengths[b]);
    if (most == 0) return;
    const int64_t t = random.between(0, most - 1);
    const int64_t which = random.between(gate == aft::Gate::kNone ? 1 : 0, 2);  // that gate leaves a query unread
    const Input& input = inputs_[which];
    const int64_t rows = which == 0 ? tokens : key_tokens;
    char number[4], *const at = input.buffer->data() + (b * rows + t) * (input.buffer->size() / (batch * rows));
    std::memcpy(number, at, element_size(element));
    std::memset(at, '\xff', element_size(element));
    p.output = output.data();
    kernel(p, {run_on_threads, &threads, threads});
    std::memcpy(at, number, element_size(element));
    const char* const row = output.data() + (b * tokens + t) * output_channels * element_size(element);
    expect(std::isnan(decode_one(row, element)), what + ": hides a NaN of input " + std::to_string(which));
  }

  const Input& keep(const Values& drawn) {
    Numbers numbers(drawn.begin(), drawn.end());
    std::vector<char> encoded = encode(numbers, element);
    auto buffer = std::make_unique<Guarded>(encoded.size(), shift());
    if (!encoded.empty()) std::memcpy(buffer->data(), encoded.data(), encoded.size());
    Values values = decode(*buffer, element);
    inputs_.push_back({std::move(buffer), std::move(encoded), std::move(values)});
    return inputs_.back();
  }

  std::deque<Input> inputs_;  // query, key and value first
};

double largest(const Values& values) {
  double size = 1e-30;
  for (double value : values) size = std::max(size, std::abs(value));
  return size;
}

// The largest size of the terms of a gated output: relu does not limit the query.
double gated_size(const Case& one, const Case::Input& query, const Case::Input& value) {
  return largest(value.values) * (one.gate == aft::Gate::kRelu ? std::max(1.0, largest(query.values)) : 1.0);
}

// No eps in half of the cases: its kernels have a path of their own.
float draw_eps(Case& one) { return one.random.choose({0.0f, 0.0f, 0.0f, 0.0f, 1e-6f, 0.5f, 1.0f, 1e6f}); }

void aft_simple(Case& one) {
  const bool by_head = one.random.one_in(3);
  const auto &query = one.sequence(), &key = one.keys(by_head ? one.heads : one.channels), &value = one.sequence();
  auto p = one.params<aft::AftSimple>(query, key, value);
  p.gate = one.gate;
  p.key_channels = by_head ? one.heads : 0;
  p.eps = draw_eps(one);
  one.check(aft::aft_simple, p, gated_size(one, query, value), [&](const Document& d, int64_t) {
    return oracle::aft_simple(d, formula_gate(one.gate), p.key_channels, p.eps);
  });
}

void aft_full(Case& one) {
  const auto &query = one.sequence(), &key = one.keys(one.channels), &value = one.sequence();
  const int64_t width = one.tokens + one.random.choose<int64_t>({0, 0, 1, 13});
  auto p = one.params<aft::AftFull>(query, key, value);
  p.gate = one.gate;
  p.eps = draw_eps(one);
  // A method, and those with smaller errors for biases too far apart.
  const std::vector<aft::Method> usable = usable_methods();
  int64_t last = one.random.between(0, static_cast<int64_t>(usable.size()) - 1);
  const aft::Precision finest = aft::kMethods[static_cast<int>(usable[last])].finest;
  for (; last >= 0; --last) p.methods.methods[p.methods.count++] = usable[last];
  if (finest == aft::Precision::kBfloat16) one.bound = 1e-2;
  if (finest == aft::Precision::kInt8) one.bound = 5e-2;
  // In 8 bits only where no two biases of a row are more than 1 apart, in integers of 16 bits more than 2.
  const auto range = finest == aft::Precision::kInt8 && one.random.one_in(2)       ? 0.5
                     : finest == aft::Precision::kBfloat16 && one.random.one_in(2) ? 0.9
                                                                                   : one.range;
  const auto& bias = one.input(one.tokens * width, range);
  p.position_bias = bias.buffer->data();
  p.position_bias_width = width;
  p.constant_bias = one.random.one_in(2);
  const auto packed = p.constant_bias ? aft::pack_position_bias(p) : nullptr;
  p.packed_bias = packed.get();
  one.check(aft::aft_full, p, gated_size(one, query, value), [&](const Document& d, int64_t) {
    return oracle::aft_full(d, formula_gate(one.gate), bias.values.data(), width, p.eps);
  });
}

void aft_local(Case& one) {
  const auto &query = one.sequence(), &key = one.keys(one.channels), &value = one.sequence();
  const int64_t width = one.causal ? one.window : 2 * one.window - 1;
  const int64_t rows = one.random.one_in(3) ? 1 : one.tokens + one.random.between(0, 1);
  const auto& band = one.input(rows * width, one.range);
  auto p = one.params<aft::AftLocal>(query, key, value);
  p.gate = one.gate;
  p.eps = draw_eps(one);
  p.band = band.buffer->data();
  p.band_rows = rows;
  p.window = one.window;
  one.check(aft::aft_local, p, gated_size(one, query, value), [&](const Document& d, int64_t) {
    return oracle::aft_local(d, formula_gate(one.gate), band.values.data(), rows, one.window, p.eps);
  });
}

void aft_conv(Case& one) {
  const auto &query = one.sequence(), &key = one.keys(one.heads), &value = one.sequence();
  const auto& filter = one.input(one.heads * one.window, one.range);
  auto p = one.params<aft::AftConv>(query, key, value);
  p.gate = one.gate;
  p.eps = draw_eps(one);
  p.filter = filter.buffer->data();
  p.heads = one.heads;
  p.taps = one.window;
  one.check(aft::aft_conv, p, gated_size(one, query, value), [&](const Document& d, int64_t) {
    return oracle::aft_conv(d, formula_gate(one.gate), one.heads, filter.values.data(), one.window, p.eps);
  });
}

void efficient_attention(Case& one) {
  auto p = one.shape_params<aft::EfficientAttention>();
  const oracle::Heads heads = one.draw_heads(p, one.range);
  p.normalization = one.random.choose({aft::Normalization::kSoftmax, aft::Normalization::kScaling});
  p.scale = one.random.choose({1.0f, 0.25f, 3.0f});
  double terms = p.scale * largest(one.values_of(2));
  if (p.normalization == aft::Normalization::kScaling)
    terms *= largest(one.values_of(0)) * largest(one.values_of(1)) * static_cast<double>(one.channels / one.heads);
  const auto normalization = p.normalization == aft::Normalization::kSoftmax ? oracle::Normalization::kSoftmax
                                                                             : oracle::Normalization::kScaling;
  one.check(aft::efficient_attention, p, terms, [&](const Document& d, int64_t b) {
    return oracle::efficient_attention(d, one.heads_of(heads, b), normalization, p.scale);
  });
}

void linear_attention(Case& one) {
  auto p = one.shape_params<aft::LinearAttention>();
  const oracle::Heads heads = one.draw_heads(p, one.range);
  p.feature_map = one.random.choose({aft::FeatureMap::kElu, aft::FeatureMap::kRelu, aft::FeatureMap::kIdentity});
  p.normalizer = one.random.choose({aft::Normalizer::kAdd, aft::Normalizer::kClamp, aft::Normalizer::kNone});
  p.eps = one.random.choose({1e-6f, 1e-3f, 0.5f});
  const bool is_identity = p.feature_map == aft::FeatureMap::kIdentity;
  // Features of both signs may cancel in a divisor.
  if (is_identity) p.normalizer = aft::Normalizer::kNone;
  double terms = largest(one.values_of(2));
  if (p.normalizer == aft::Normalizer::kNone)
    terms *= (1 + largest(one.values_of(0))) * (1 + largest(one.values_of(1))) *
             static_cast<double>(one.channels / one.heads * std::max<int64_t>(p.key_tokens, 1));
  one.check(aft::linear_attention, p, terms, [&](const Document& d, int64_t b) {
    return oracle::linear_attention(d, one.heads_of(heads, b), static_cast<oracle::FeatureMap>(p.feature_map), p.eps,
                                    static_cast<oracle::Normalizer>(p.normalizer));
  });
}

// Errors of softmax attention beside those of rounded logits, relative to the largest value. In float32 weights, their
// sums and those of values are good for some roundings of 6e-8, of which 6,000 cases of up to 4,097 keys showed 6.
// A result in float16 has one rounding of 4.9e-4. bfloat16 rounds weights and values, by 3.9e-3 each.
double softmax_bound(Element element, bool is_bfloat16) {
  return (is_bfloat16 ? 8e-3 : 2e-6) + (element == Element::kFloat16 ? 4.9e-4 : 0);
}

// The error of a logit relative to the sum of the sizes of its terms. float32 rounds the scale, the query, each product
// and the sums, by 6e-8 each. Roundings of a long sum have both signs, so they do not grow with the width of a head.
// bfloat16 rounds both factors of each term by 3.9e-3.
double logit_unit(bool is_bfloat16) { return is_bfloat16 ? 8e-3 : 3e-7; }

void softmax_attention(Case& one) {
  one.draw_large_shape();
  auto p = one.shape_params<aft::SoftmaxAttention>();
  const oracle::Heads heads = one.draw_heads(p, one.range, 264, one.random.one_in(20) ? 4097 : 70);
  one.choose_rows();
  const int64_t beyond = std::max(one.tokens, p.key_tokens) + 5;
  const auto draw_window = [&] {
    return one.random.one_in(3) ? -1 : one.random.between(0, one.random.choose<int64_t>({3, 90, 600, beyond}));
  };
  p.window_left = draw_window();
  p.window_right = one.causal ? 0 : draw_window();
  p.scale = one.random.choose({0.0f, 0.25f, 1.0f});
  p.softcap = one.random.choose({0.0f, 0.0f, 5.0f, 50.0f});
  oracle::SoftmaxAttention settings{};
  settings.scale = p.scale;
  settings.softcap = p.softcap;
  settings.window_left = p.window_left;
  settings.window_right = p.window_right;
  if (one.random.one_in(3)) {
    const auto& sink = one.input(one.heads, one.range);
    p.sink = sink.buffer->data();
    settings.sink = sink.values.data();
  }
  if (one.random.one_in(3)) {
    p.bias_reach = settings.bias_reach = one.random.between(0, one.random.choose<int64_t>({2, 40, beyond}));
    const auto& bias = one.input(one.heads * (2 * p.bias_reach + 1), one.range);
    p.bias = bias.buffer->data();
    settings.bias = bias.values.data();
  }
  if (one.random.one_in(3) && heads.width > 1) {
    p.rotary_pairs = settings.pairs = one.random.between(1, heads.width / 2);
    p.positions = settings.positions = std::max(one.tokens, p.key_tokens) + one.random.between(0, 9);
    p.interleaved = settings.interleaved = one.random.one_in(2);
    const auto &cos = one.input(p.positions * p.rotary_pairs, 1), &sin = one.input(p.positions * p.rotary_pairs, 1);
    p.cos_cache = cos.buffer->data();
    p.sin_cache = sin.buffer->data();
    settings.cos = cos.values.data();
    settings.sin = sin.values.data();
  }
  if (p.key_lengths && one.random.one_in(2)) {
    p.query_start = settings.query_start = one.random.between(-one.tokens - 9, p.key_tokens + 40);
    one.sees_own_key = false;
  }
  Guarded log_sums(one.batch * one.tokens * one.heads * sizeof(float));
  if (one.random.one_in(2)) p.log_sum = reinterpret_cast<float*>(log_sums.data());
  const std::vector<aft::Method> usable = usable_methods();
  const aft::Method method = usable[one.random.between(0, static_cast<int64_t>(usable.size()) - 1)];
  p.methods = {{method}, 1};
  const bool rounds = method == aft::Method::kBfloat16 || method == aft::Method::kAmxBfloat16;  // integers are not used
  one.bound = softmax_bound(one.element, rounds);
  settings.unit = logit_unit(rounds);
  double log_error = 0;
  const auto expected = [&](const Document& d, int64_t b) {
    oracle::SoftmaxAttentionResult exact = oracle::softmax_attention(d, one.heads_of(heads, b), settings, one.rows);
    one.excused.clear();
    for (double error : exact.weight_error) one.excused.insert(one.excused.end(), heads.value_width, error);
    const float* found = p.log_sum ? p.log_sum + b * d.tokens * one.heads : nullptr;
    for (int64_t row : one.rows)
      for (int64_t i = row * one.heads; found && i < (row + 1) * one.heads; ++i) {
        if (found[i] == exact.log_sum[i]) continue;  // -inf for a row without keys
        const double excess = std::abs(found[i] - exact.log_sum[i]) - exact.log_sum_error[i];
        if (!(excess <= log_error)) log_error = excess;
      }
    return exact.output;
  };
  one.check(aft::softmax_attention, p, largest(one.values_of(2)), expected);
  expect(log_error <= 2e-6, one.what + ": error of log_sum " + std::to_string(log_error));
  expect(log_sums.bands_untouched(), one.what + ": wrote outside of log_sum");
}

// The weights are such that logits stay in +-range, as the other mechanisms' do.
void fastformer(Case& one) {
  const auto &query = one.sequence(), &key = one.sequence(), &value = one.sequence();
  const double width = static_cast<double>(one.channels / one.heads);
  const double alpha = std::min(1.0, std::sqrt(width) / static_cast<double>(one.channels));
  const double beta = std::min(1.0, alpha / largest(key.values));
  const auto &alpha_weight = one.input(one.channels * one.heads, alpha),
             &beta_weight = one.input(one.channels * one.heads, beta);
  auto p = one.params<aft::Fastformer>(query, key, value);
  p.alpha_weight = alpha_weight.buffer->data();
  p.beta_weight = beta_weight.buffer->data();
  p.heads = one.heads;
  one.check(aft::fastformer, p, largest(query.values) * largest(key.values) * largest(value.values),
            [&](const Document& d, int64_t) {
              return oracle::fastformer(d, one.heads, alpha_weight.values.data(), beta_weight.values.data());
            });
}

struct Mechanism {
  const char* name;
  void (*check)(Case&);
};
constexpr Mechanism kMechanisms[] = {
    {"aft_simple", aft_simple},
    {"aft_full", aft_full},
    {"aft_local", aft_local},
    {"aft_conv", aft_conv},
    {"efficient_attention", efficient_attention},
    {"linear_attention", linear_attention},
    {"fastformer", fastformer},
    {"softmax_attention", softmax_attention},
};

}  // namespace

int main(int count, char** arguments) {
  if (instructions_missing()) return kSkipped;
  const uint64_t first = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 0;
  const uint64_t cases = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : count > 1 ? 1 : default_cases(14000);
  expect(cases > 0, "AFT_RANDOM_CASES must be at least 1");
  const std::string only = count > 3 ? arguments[3] : "";
  const auto is_chosen = [&](const Mechanism& mechanism) { return only.empty() || only == mechanism.name; };
  if (std::none_of(std::begin(kMechanisms), std::end(kMechanisms), is_chosen)) {
    std::printf("expected the name of a mechanism, got %s\n", only.c_str());
    return EXIT_FAILURE;
  }
  uint64_t run = 0;
  for (uint64_t number = first; run < cases; ++number) {
    const Mechanism& mechanism = kMechanisms[number % std::size(kMechanisms)];
    if (!is_chosen(mechanism)) continue;
    ++run;
    Case one(number, mechanism.name);
    mechanism.check(one);
    expect(one.error <= one.bound, one.what + ": error " + std::to_string(one.error));
  }
  std::printf("%s, %s, %d failures\n", aft::instruction_set(), aft::product_instruction_set(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
