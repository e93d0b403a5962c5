// recurrent_linear_attention and causal_depthwise_conv against their formulas in double precision: a table of shapes
// around the edges of chunks, vectors and panels, then random cases. What lies past a document's length is NaN. Results
// must be the same for any number of threads, and a document in two parts must equal the whole.
//
//   recurrent_tests [first case [cases]]     a failure names its case, which alone decides everything about it
//
// AFT_RANDOM_CASES is the number of cases if no argument is given.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../oracles/mechanisms.h"
#include "support.h"

namespace {

using aft::Direction;
using aft::Element;
using oracle::UpdateRule;
using oracle::Values;

// A tensor as the kernel sees it and in double precision, and the same before the kernel ran.
struct Tensor {
  std::unique_ptr<Guarded> buffer;
  std::vector<char> before;
  oracle::Values values;

  const void* data() const { return buffer ? buffer->data() : nullptr; }
  const double* document(int64_t b, int64_t batch) const {
    return buffer ? values.data() + b * static_cast<int64_t>(values.size()) / batch : nullptr;
  }
};

// Tensors are aligned as a rule, but a kernel may not need it.
size_t shift(Random& random, Element element) {
  return random.one_in(2) ? 0 : element_size(element) * random.between(1, 31);
}

Tensor tensor(Random& random, Element element, int64_t count, const std::function<double()>& draw) {
  Numbers numbers(count);
  for (float& number : numbers) number = static_cast<float>(draw());
  Tensor made{nullptr, encode(numbers, element), {}};
  made.buffer = std::make_unique<Guarded>(made.before.size(), shift(random, element));
  std::copy(made.before.begin(), made.before.end(), made.buffer->data());
  made.values = decode(*made.buffer, element);
  return made;
}

// The rows of a [batch, tokens, width] tensor past the lengths become NaN.
void spoil_padding(Tensor& x, int64_t tokens, const std::vector<int64_t>& lengths) {
  const size_t row = x.before.size() / (lengths.size() * tokens);
  for (size_t b = 0; b < lengths.size(); ++b)
    for (int64_t t = lengths[b]; t < tokens; ++t) {
      std::memset(x.buffer->data() + (b * tokens + t) * row, '\xff', row);
      std::memset(x.before.data() + (b * tokens + t) * row, '\xff', row);
    }
}

void expect_unchanged(const Tensor& x, const std::string& what) {
  if (!x.buffer) return;
  expect(std::equal(x.before.begin(), x.before.end(), x.buffer->data()) && x.buffer->bands_untouched(),
         what + ": changed an input or what is around it");
}

// The largest difference of any number of a document's result, relative to the largest size in it and to `terms`.
double error_of(const double* actual, const oracle::Values& expected, double terms, Element element) {
  double largest = terms, worst = 0;
  for (double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double most = element == Element::kFloat16 ? 65504.0 : INFINITY;  // beyond it, both are infinite
    const double got = std::clamp(actual[i], -most, most), meant = std::clamp(expected[i], -most, most);
    if (!(std::abs(got - meant) <= worst)) worst = std::abs(got - meant);
    if (!std::isfinite(got)) return INFINITY;
  }
  return worst / std::max(largest, 1e-30);
}

struct Results {
  std::unique_ptr<Guarded> output, state;

  // Results of 8 MiB in float32 go past the cache, where they are aligned.
  static bool is_long(int64_t outputs) { return outputs >= 2 << 20; }

  Results(Random& random, Element element, int64_t outputs, int64_t states)
      : output(std::make_unique<Guarded>(outputs * element_size(element),
                                         is_long(outputs) ? 0 : shift(random, element))),
        state(std::make_unique<Guarded>(states * element_size(element), shift(random, element))) {
    std::memset(output->data(), '\xff', output->size());
    std::memset(state->data(), '\xff', state->size());
  }
  void expect_bands(const std::string& what) const {
    expect(output->bands_untouched() && state->bands_untouched(), what + ": wrote outside of a result");
  }
  bool same_output_as(const Results& other) const {
    return std::memcmp(output->data(), other.output->data(), output->size()) == 0;
  }
  bool same_as(const Results& other) const {
    return same_output_as(other) && std::memcmp(state->data(), other.state->data(), state->size()) == 0;
  }
};

// Another number of threads for a second run.
int other_threads(int threads) { return 1 + threads % 3; }

constexpr const char* kRules[] = {"linear", "gated", "delta", "gated_delta"};
constexpr const char* kDirections[] = {"forward", "reverse", "bidirectional"};

bool has_decay(UpdateRule rule) { return rule == UpdateRule::kGated || rule == UpdateRule::kGatedDelta; }
bool has_beta(UpdateRule rule) { return rule == UpdateRule::kDelta || rule == UpdateRule::kGatedDelta; }

// A problem of the recurrence: its settings, its tensors and the check of its results.
class Recurrent {
 public:
  Recurrent(const aft::RecurrentLinearAttention& settings, UpdateRule rule, std::vector<int64_t> lengths,
            bool with_past, double level, uint64_t seed)
      : p_(settings), rule_(rule), lengths_(std::move(lengths)), random_(seed) {
    p_.batch = static_cast<int64_t>(lengths_.size());
    p_.lengths = lengths_.data();
    const int64_t rows = p_.batch * p_.tokens;
    const double reach = 1 / std::sqrt(static_cast<double>(p_.key_width));
    // Features of a normalizer are not negative, or denominators would come near 0.
    const auto feature = [&] {
      return p_.normalized ? std::abs(random_.uniform(reach)) + 0.01 : random_.uniform(reach);
    };
    query_ = draw(rows * p_.query_heads * p_.key_width, feature);
    key_ = draw(rows * p_.state_heads * p_.key_width, feature);
    value_ = draw(rows * p_.state_heads * p_.value_width, [&] { return random_.uniform(2); });
    if (with_past)
      past_ = draw(p_.batch * p_.states() * p_.key_width * p_.state_columns(),
                   [&] { return p_.normalized ? std::abs(random_.uniform(1)) : random_.uniform(1); });
    if (has_decay(rule_))
      decay_ = draw(rows * p_.state_heads * (p_.channel_decay ? p_.key_width : 1),
                    [&] { return random_.one_in(9) ? -80.0 : -std::abs(random_.uniform(level)); });
    if (has_beta(rule_))
      beta_ = draw(rows * (p_.head_beta ? p_.state_heads : 1),
                   [&] { return random_.one_in(5) ? random_.choose({0.0, 1.0}) : std::abs(random_.uniform(1)); });
    for (Tensor* x : {&query_, &key_, &value_, &decay_, &beta_})
      if (x->buffer) spoil_padding(*x, p_.tokens, lengths_);
    p_.query = query_.data();
    p_.key = key_.data();
    p_.value = value_.data();
    p_.past_state = past_.data();
    p_.decay = decay_.data();
    p_.beta = beta_.data();
  }

  std::string text() const {
    return std::string("recurrent_linear_attention ") + kRules[static_cast<int>(rule_)] + " " +
           kDirections[static_cast<int>(p_.direction)] + (p_.normalized ? " normalized" : "") +
           (p_.channel_decay ? " by channel" : "") + (past_.buffer ? " with past" : "") +
           (p_.element == Element::kFloat16 ? " in float16" : "") + " on [" + std::to_string(p_.batch) + ", " +
           std::to_string(p_.tokens) + "], heads " + std::to_string(p_.query_heads) + "/" +
           std::to_string(p_.state_heads) + " of " + std::to_string(p_.key_width) + "x" +
           std::to_string(p_.value_width);
  }

  void check(const std::string& name, int threads) {
    const std::string what = name + text() + ", " + std::to_string(threads) + " threads";
    Results results = run(p_, threads);
    results.expect_bands(what);
    for (const Tensor* x : {&query_, &key_, &value_, &past_, &decay_, &beta_}) expect_unchanged(*x, what);
    const Values output = decode(*results.output, p_.element), state = decode(*results.state, p_.element);
    if (!is_sanitizer_part()) check_formula(what, output, state);
    expect(run(p_, other_threads(threads)).same_as(results), what + " depends on the number of threads");
    if (random_.one_in(4))
      expect(run(p_, threads, false).same_output_as(results), what + ": the output differs without a state");
    if (p_.direction != Direction::kBidirectional && p_.element == Element::kFloat32 && p_.batch == 1 &&
        lengths_[0] > 1)
      check_split(what, output, state);
  }

 private:
  void check_formula(const std::string& what, const Values& output, const Values& state) {
    const double bound = p_.element == Element::kFloat16 ? 1.2e-3 : 1e-5;
    for (int64_t b = 0; b < p_.batch; ++b) {
      const oracle::RecurrenceResult exact = oracle::recurrent_linear_attention(document(b));
      const double error = error_of(&output[b * exact.output.size()], exact.output, 0.01, p_.element);
      const double state_error =
          error_of(&state[b * exact.present_state.size()], exact.present_state, 0.01, p_.element);
      expect(error <= bound, what + ", document " + std::to_string(b) + ": error " + std::to_string(error));
      expect(state_error <= bound,
             what + ", document " + std::to_string(b) + ": error of the state " + std::to_string(state_error));
    }
  }

  Tensor draw(int64_t count, const std::function<double()>& number) {
    return tensor(random_, p_.element, count, number);
  }

  Results run(aft::RecurrentLinearAttention p, int threads, bool with_state = true) {
    Results results(random_, p.element, p.batch * p.tokens * p.query_heads * p.value_width,
                    p.batch * p.states() * p.key_width * p.state_columns());
    p.output = results.output->data();
    p.present_state = with_state ? results.state->data() : nullptr;
    aft::recurrent_linear_attention(p, {run_on_threads, &threads, threads});
    return results;
  }

  oracle::Recurrence document(int64_t b) const {
    return {rule_,
            static_cast<oracle::Direction>(p_.direction),
            p_.normalized,
            p_.channel_decay,
            p_.head_beta,
            p_.tokens,
            lengths_[b],
            p_.query_heads,
            p_.state_heads,
            p_.key_width,
            p_.value_width,
            p_.scale,
            p_.eps,
            query_.document(b, p_.batch),
            key_.document(b, p_.batch),
            value_.document(b, p_.batch),
            past_.document(b, p_.batch),
            decay_.document(b, p_.batch),
            beta_.document(b, p_.batch)};
  }

  // The document in two parts, the second of which takes the first one's state.
  void check_split(const std::string& what, const Values& output, const Values& state) {
    const int64_t length = lengths_[0], cut = random_.between(1, length - 1);
    const bool reverse = p_.direction == Direction::kReverse;
    const int64_t starts[] = {reverse ? cut : 0, reverse ? 0 : cut},
                  ends[] = {reverse ? length : cut, reverse ? cut : length};
    std::unique_ptr<Guarded> past;
    for (int part = 0; part < 2; ++part) {
      aft::RecurrentLinearAttention p = p_;
      const int64_t start = starts[part], tokens = ends[part] - start;
      const auto from = [&](const void* data, int64_t width) -> const void* {
        return data ? static_cast<const char*>(data) + start * width * element_size(p.element) : nullptr;
      };
      p.query = from(p.query, p.query_heads * p.key_width);
      p.key = from(p.key, p.state_heads * p.key_width);
      p.value = from(p.value, p.state_heads * p.value_width);
      p.decay = from(p.decay, p.state_heads * (p.channel_decay ? p.key_width : 1));
      p.beta = from(p.beta, p.head_beta ? p.state_heads : 1);
      p.tokens = tokens;
      p.lengths = &tokens;
      if (past) p.past_state = past->data();
      Results results = run(p, 1);
      const Values part_output = decode(*results.output, p.element);
      const int64_t row = p.query_heads * p.value_width;
      const Values whole(output.begin() + start * row, output.begin() + (start + tokens) * row);
      expect(error_of(part_output.data(), whole, largest(output), p.element) <= 1e-5,
             what + ": a part differs from the whole");
      past = std::move(results.state);
    }
    const Values last = decode(*past, p_.element);
    expect(error_of(last.data(), state, 0.01, p_.element) <= 1e-5, what + ": the state of two parts differs");
  }

  static double largest(const Values& values) {
    double size = 0.01;
    for (double value : values) size = std::max(size, std::abs(value));
    return size;
  }

  aft::RecurrentLinearAttention p_;
  UpdateRule rule_;
  std::vector<int64_t> lengths_;
  Random random_;
  Tensor query_, key_, value_, past_, decay_, beta_;
};

aft::RecurrentLinearAttention settings(Element element, Direction direction, int64_t tokens, int64_t query_heads,
                                       int64_t state_heads, int64_t key_width, int64_t value_width) {
  aft::RecurrentLinearAttention p{};
  p.element = element;
  p.direction = direction;
  p.tokens = tokens;
  p.query_heads = query_heads;
  p.state_heads = state_heads;
  p.key_width = key_width;
  p.value_width = value_width;
  p.head_beta = true;
  p.scale = 1 / std::sqrt(static_cast<float>(key_width));
  p.eps = 1e-6f;
  return p;
}

struct Shape {
  int64_t tokens, query_heads, state_heads, key_width, value_width;
  std::vector<int64_t> lengths;
};

void check_table() {
  const Shape shapes[] = {{1, 1, 1, 32, 32, {1}},        {1, 8, 8, 16, 16, {1, 0}},       {63, 1, 1, 48, 48, {63, 62}},
                          {64, 8, 8, 16, 16, {64}},      {65, 8, 4, 32, 32, {65, 0, 17}}, {65, 1, 1, 64, 64, {33}},
                          {200, 2, 1, 128, 64, {200}},   {40, 1, 1, 256, 256, {40}},      {1000, 1, 1, 32, 32, {1000}},
                          {1000, 8, 8, 8, 16, {0, 999}}, {31, 6, 2, 5, 3, {31, 16}}};
  uint64_t seed = 1;
  for (const Shape& s : shapes)
    for (Element element : {Element::kFloat32, Element::kFloat16})
      for (UpdateRule rule : {UpdateRule::kLinear, UpdateRule::kGated, UpdateRule::kDelta, UpdateRule::kGatedDelta})
        for (Direction direction : {Direction::kForward, Direction::kReverse, Direction::kBidirectional})
          for (int form = 0; form < 4; ++form) {
            auto p = settings(element, direction, s.tokens, s.query_heads, s.state_heads, s.key_width, s.value_width);
            p.normalized = form / 2 == 1;
            p.channel_decay = form % 2 == 1;
            if ((p.normalized && has_beta(rule)) || (p.channel_decay && !has_decay(rule))) continue;
            ++seed;
            Recurrent(p, rule, s.lengths, seed % 2 == 0, 0.3, seed).check("", 1 + static_cast<int>(seed % 3));
          }
}

// Results large enough to go past the cache.
void check_long_recurrence() {
  uint64_t seed = 1;
  for (UpdateRule rule : {UpdateRule::kLinear, UpdateRule::kGatedDelta})
    for (int64_t value_width : {16, 48}) {
      const int64_t heads = 2, tokens = (2 << 20) / (heads * value_width) + 3;
      const auto p = settings(Element::kFloat32, Direction::kForward, tokens, heads, 1, 4, value_width);
      Recurrent(p, rule, {tokens - 1}, false, 0.3, ++seed).check("long: ", 2);
    }
}

void check_random_recurrence(uint64_t number, Random& random) {
  const UpdateRule rule =
      random.choose({UpdateRule::kLinear, UpdateRule::kGated, UpdateRule::kDelta, UpdateRule::kGatedDelta});
  const int64_t state_heads = random.between(1, 4);
  auto p = settings(random.choose({Element::kFloat32, Element::kFloat16}),
                    random.choose({Direction::kForward, Direction::kReverse, Direction::kBidirectional}),
                    random.one_in(25) ? random.choose<int64_t>({97, 128, 300}) : random.between(1, 50),
                    state_heads * random.between(1, 3), state_heads, random.between(1, random.one_in(8) ? 40 : 9),
                    random.between(1, random.one_in(8) ? 70 : 9));
  p.normalized = !has_beta(rule) && random.one_in(2);
  p.channel_decay = has_decay(rule) && random.one_in(2);
  p.head_beta = random.one_in(2);
  p.scale = random.choose({1.0f, 0.25f, p.scale});
  p.eps = random.choose({0.0f, 1e-6f, 0.5f});
  std::vector<int64_t> lengths(random.between(1, 3));
  for (int64_t& length : lengths) length = random.one_in(3) ? random.between(0, p.tokens) : p.tokens;
  Recurrent(p, rule, lengths, random.one_in(2), random.choose({0.001, 0.1, 1.0, 10.0}), random.next())
      .check("case " + std::to_string(number) + ": ", static_cast<int>(random.between(1, 4)));
}

void check_convolution(const std::string& name, Random& random, Element element, int64_t tokens, int64_t channels,
                       int64_t taps, bool silu, const std::vector<int64_t>& lengths) {
  const int64_t batch = static_cast<int64_t>(lengths.size());
  const auto number = [&] { return random.uniform(3); };
  Tensor input = tensor(random, element, batch * tokens * channels, number);
  const Tensor weight = tensor(random, element, channels * taps, number);
  const Tensor bias = random.one_in(2) ? tensor(random, element, channels, number) : Tensor{};
  const Tensor past = random.one_in(2) ? tensor(random, element, batch * (taps - 1) * channels, number) : Tensor{};
  spoil_padding(input, tokens, lengths);
  const auto run = [&](int threads, bool with_state, bool constant_weight) {
    Results results(random, element, batch * tokens * channels, batch * (taps - 1) * channels);
    aft::CausalDepthwiseConv p{
        element, silu, batch, tokens, channels, taps, input.data(), weight.data(), bias.data(), past.data(),
        lengths.data(), results.output->data(), with_state ? results.state->data() : nullptr, nullptr};
    std::vector<float> widened;
    if (constant_weight) {
      widened.resize(p.taps * p.weight_row());
      aft::widen_conv_weight(p, widened.data());
      p.widened_weight = widened.data();
    }
    aft::causal_depthwise_conv(p, {run_on_threads, &threads, threads});
    return results;
  };
  const int threads = static_cast<int>(random.between(1, 3));
  const Results results = run(threads, true, false);
  const std::string what = name + "causal_depthwise_conv on [" + std::to_string(batch) + ", " + std::to_string(tokens) +
                           ", " + std::to_string(channels) + "], " + std::to_string(taps) + " taps";
  results.expect_bands(what);
  expect(run(other_threads(threads), true, false).same_as(results), what + " depends on the number of threads");
  expect(run(threads, false, false).same_output_as(results), what + ": the output differs without a state");
  expect(run(threads, true, true).same_as(results), what + " depends on whether the weight is constant");
  for (const Tensor* x : std::initializer_list<const Tensor*>{&input, &weight, &bias, &past})
    expect_unchanged(*x, what);
  if (is_sanitizer_part()) return;
  const Values output = decode(*results.output, element), state = decode(*results.state, element);
  for (int64_t b = 0; b < batch; ++b) {
    const oracle::RecurrenceResult exact = oracle::causal_depthwise_conv(
        {silu, tokens, lengths[b], channels, taps, input.document(b, batch), weight.values.data(),
         bias.buffer ? bias.values.data() : nullptr, past.document(b, batch)});
    const double bound = element == Element::kFloat16 ? 6e-4 : 1e-6;
    expect(error_of(&output[b * exact.output.size()], exact.output, 1, element) <= bound,
           what + ": the output is wrong");
    if (taps > 1)
      expect(error_of(&state[b * exact.present_state.size()], exact.present_state, 1, element) == 0,
             what + ": the state is wrong");
  }
}

// Results that go past the cache, in rows of an odd number of vectors.
void check_long_convolution() {
  Random random(1);
  for (int64_t channels : {16, 48}) {
    const int64_t tokens = (2 << 20) / channels + 3;
    check_convolution("long: ", random, Element::kFloat32, tokens, channels, 2, true, {tokens - 1});
  }
}

void check_random_convolution(uint64_t number, Random& random) {
  const int64_t tokens = random.one_in(25) ? random.between(250, 520) : random.between(1, 40);
  std::vector<int64_t> lengths(random.between(1, 3));
  for (int64_t& length : lengths) length = random.one_in(3) ? random.between(0, tokens) : tokens;
  check_convolution("case " + std::to_string(number) + ": ", random,
                    random.choose({Element::kFloat32, Element::kFloat16}), tokens,
                    random.one_in(20) ? random.between(250, 300) : random.between(1, 70), random.between(1, 6),
                    random.one_in(2), lengths);
}

}  // namespace

int main(int count, char** arguments) {
  if (instructions_missing()) return kSkipped;
  const uint64_t first = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 0;
  const uint64_t cases = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : count > 1 ? 1 : default_cases(3000);
  expect(cases > 0, "AFT_RANDOM_CASES must be at least 1");
  if (count == 1) {
    check_table();
    check_long_recurrence();
    check_long_convolution();
  }
  for (uint64_t number = first; number < first + cases; ++number) {
    Random random(number);
    random.one_in(4) ? check_random_convolution(number, random) : check_random_recurrence(number, random);
  }
  std::printf("%s, %d failures\n", aft::instruction_set(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
