// Times every usable method on operators as an encoder has them, with one thread.
//
// Methods take turns, and the shortest time of each counts: processor time of this thread, because the machine may be
// busy with other work.

#include "methods/rates.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "encoder.h"

namespace aft {
namespace {

constexpr int64_t kNarrowest = 16, kWidest = 1024;
constexpr int64_t kRows = 96, kWidestHidden = 1024;    // of the encoder's products
constexpr int64_t kTokens = 512, kChannels = 64;       // of AFT-full's
constexpr int64_t kSampleProducts = int64_t{1} << 25;  // half a millisecond
constexpr double kMinClockSteps = 10;                  // in a sample: an error below 10 %
constexpr int kMinRounds = 2, kMaxRounds = 9;
constexpr auto kBudget = std::chrono::milliseconds(35);

void run_here(void*, size_t tasks, void (*body)(void*, size_t), void* context) {
  for (size_t task = 0; task < tasks; ++task) body(context, task);
}
constexpr Parallel kOneThread{run_here, nullptr, 1};

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Returns the smallest of some steps of that clock. clock_getres() returns 1 ns even where the clock counts timer ticks.
double clock_step() {
  double smallest = INFINITY;
  for (int i = 0; i < 3; ++i) {
    const double start = thread_seconds();
    double end = start;
    while (end == start) end = thread_seconds();
    smallest = std::min(smallest, end - start);
  }
  return smallest;
}

// Between -scale and scale.
std::vector<float> numbers(int64_t count, float scale, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = scale * (static_cast<float>(seed >> 8) / 8388608.0f - 1.0f);
  }
  return values;
}

// One method's turn: `products` multiply-adds.
struct Workload {
  int64_t products;
  std::function<void()> run;
};

// The two products of a feed-forward layer, which are most of an encoder's.
class EncoderInputs {
 public:
  explicit EncoderInputs(int64_t width)
      : width_(width),
        hidden_(std::max(width, std::min(4 * width, kWidestHidden))),
        x_(numbers(kRows * width, 1, 1)),
        weight_(numbers(width * hidden_, 1 / std::sqrt(static_cast<float>(width)), 2)),
        ones_(static_cast<size_t>(hidden_), 1.0f),
        output_(static_cast<size_t>(kRows * width)) {}

  Workload workload(Method method) {
    std::shared_ptr<const PackedWeight> in = pack_weight(weight_.data(), width_, hidden_, method);
    std::shared_ptr<const PackedWeight> out = pack_weight(weight_.data(), hidden_, width_, method);
    return {2 * kRows * width_ * hidden_, [this, in, out] {
              layer_norm_feed_forward({Element::kFloat32,
                                       kRows,
                                       x_.data(),
                                       {ones_.data(), ones_.data(), 1e-5f},
                                       in.get(),
                                       ones_.data(),
                                       out.get(),
                                       ones_.data(),
                                       output_.data()},
                                      kOneThread);
            }};
  }

 private:
  int64_t width_, hidden_;
  std::vector<float> x_, weight_, ones_, output_;
};

// AFT-full with a constant position bias, whose range allows every method.
class AftFullInputs {
 public:
  AftFullInputs()
      : sequence_(numbers(kTokens * kChannels, 1, 1)),
        bias_(numbers(kTokens * kTokens, 0.4f, 2)),
        output_(sequence_.size()) {}

  Workload workload(Method method) {
    AftFull p{};
    p.batch = 1;
    p.tokens = kTokens;
    p.channels = kChannels;
    p.query = p.key = p.value = sequence_.data();
    p.lengths = &length_;
    p.output = output_.data();
    p.methods = {{method}, 1};
    p.position_bias = bias_.data();
    p.position_bias_width = kTokens;
    p.constant_bias = true;
    const std::shared_ptr<const PackedWeight> packed = pack_position_bias(p);
    p.packed_bias = packed.get();
    return {2 * kTokens * kTokens * kChannels, [p, packed] { aft_full(p, kOneThread); }};
  }

 private:
  std::vector<float> sequence_, bias_, output_;
  int64_t length_ = kTokens;
};

// Returns the seconds for kSampleProducts multiply-adds, from as many runs as take `min_seconds`.
double sample(const Workload& workload, double min_seconds) {
  for (int64_t runs = std::max<int64_t>(1, kSampleProducts / workload.products);; runs *= 2) {
    const double start = thread_seconds();
    for (int64_t i = 0; i < runs; ++i) workload.run();
    const double seconds = thread_seconds() - start;
    if (seconds >= min_seconds) return seconds * kSampleProducts / static_cast<double>(runs * workload.products);
  }
}

template <class Inputs>
MethodRates measure(Inputs inputs) {
  const auto start = std::chrono::steady_clock::now();
  const double min_seconds = kMinClockSteps * clock_step();
  const MethodOrder usable = usable_methods();
  std::vector<Workload> workloads;
  for (int i = 0; i < usable.count; ++i) workloads.push_back(inputs.workload(usable.methods[i]));
  std::vector<double> shortest(workloads.size(), INFINITY);
  for (int round = 0; round < kMaxRounds; ++round) {
    if (round >= kMinRounds && std::chrono::steady_clock::now() - start > kBudget) break;
    for (size_t i = 0; i < workloads.size(); ++i)
      shortest[i] = std::min(shortest[i], sample(workloads[i], min_seconds));
  }
  MethodRates rates{};
  for (int i = 0; i < usable.count; ++i)
    rates.of[static_cast<int>(usable.methods[i])] =
        std::max<int64_t>(1, std::llround(kSampleProducts / shortest[i] / 1e6));
  return rates;
}

}  // namespace

static_assert(kWidest == kNarrowest << (kProductsCount - 2), "Products::index() has a place for every width");

Products encoder_products(int64_t width) {
  int64_t power = kNarrowest;
  while (power < kWidest && width * width > 2 * power * power) power *= 2;
  return {power};
}

MethodRates measure_rates(const Products& products) {
  return products.of_aft_full() ? measure(AftFullInputs()) : measure(EncoderInputs(products.width));
}

}  // namespace aft
