// One case brought before one kernel: tensors in device memory, the call, and the comparison with a formula in float64.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <set>

#include "../../oracles/mechanisms.h"
#include "cases.h"
#include "device.h"
#include "float16.h"

// Device memory that starts `offset` bytes after a multiple of 256, filled with NaN, with a guard behind it where the
// memory has none of its own; and its copy on the host.
class Buffer {
 public:
  explicit Buffer(size_t bytes, size_t offset = 0)
      : bytes(bytes),
        memory(static_cast<unsigned char*>(device::allocate(offset + bytes + kGuard))),
        offset(offset),
        copy(bytes + kGuard, 0xff) {
    device::write(data(), copy.data(), copy.size());
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { device::release(memory); }

  unsigned char* data() { return memory + offset; }
  unsigned char* host() { return copy.data(); }

  // From the host to the device, and back: false if the guard was overwritten.
  void write() { device::write(data(), copy.data(), bytes); }
  bool read() {
    device::read(copy.data(), data(), copy.size());
    return device::is_intact(memory) && std::all_of(copy.begin() + static_cast<std::ptrdiff_t>(bytes), copy.end(),
                       [](unsigned char byte) { return byte == 0xff; });
  }

  const size_t bytes;

 private:
  static constexpr size_t kGuard = device::kEmulated ? 0 : 64;
  unsigned char* memory;
  size_t offset;
  std::vector<unsigned char, device::HostAllocator<unsigned char>> copy;
};

// The gate as the formulas name it.
inline oracle::Gate formula_gate(Gate gate) { return static_cast<oracle::Gate>(gate); }

inline size_t element_size(Element element) { return element == Element::kFloat32 ? 4 : 2; }

inline void encode(float x, Element element, unsigned char* to) {
  const uint16_t bits = element == Element::kFloat16 ? emulator::float_to_half(x) : emulator::float_to_bfloat(x);
  element == Element::kFloat32 ? std::memcpy(to, &x, 4) : std::memcpy(to, &bits, 2);
}
inline float decode(const unsigned char* from, Element element) {
  if (element == Element::kFloat32) {
    float x;
    std::memcpy(&x, from, 4);
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return element == Element::kFloat16 ? emulator::half_to_float(bits) : emulator::bfloat_to_float(bits);
}

// What the formulas read: the numbers that the device memory holds, rounded as they are there.
using Numbers = oracle::Values;

// How far from the formula an output may be, as aftexport.parity has it, by element.
struct Bounds {
  double of[3];
};

class Problem {
 public:
  Problem(const Case& c, const Bounds& bounds, int64_t key_channels) : c(c), bounds(bounds) {
    const int64_t channels[] = {c.channels, key_channels, c.channels}, rows = c.batch * c.tokens;
    Numbers* const numbers[] = {&query, &key, &value};
    const void** const tensors[] = {&sequence.query, &sequence.key, &sequence.value};
    for (int i = 0; i < 3; ++i) {
      Buffer& buffer = allocate(rows * channels[i]);
      *tensors[i] = buffer.data();
      numbers[i]->resize(rows * channels[i]);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t k = 0; k < channels[i]; ++k) {
          const int64_t b = row / c.tokens, t = row % c.tokens, at = row * channels[i] + k;
          unsigned char* const to = buffer.host() + at * element_size(c.element);
          float x = c.range() * next_number();
          if (i == 1 && t == special_key(b)) x = 90.0f;
          if (i > 0 && t >= c.lengths[b])  // does not count, so must not be used, nor be hidden by a NaN
            x = c.draw(2, 42 + i) ? 90.0f : NAN;
          encode(x, c.element, to);
          (*numbers[i])[at] = decode(to, c.element);
        }
      buffer.write();
    }
    sequence.element = c.element;
    sequence.causal = c.causal;
    sequence.batch = c.batch;
    sequence.tokens = c.tokens;
    sequence.channels = c.channels;
    Buffer& lengths = buffers.emplace_back(c.batch * sizeof(int64_t));
    std::memcpy(lengths.host(), c.lengths.data(), lengths.bytes);
    lengths.write();
    sequence.lengths = reinterpret_cast<const int64_t*>(lengths.data());
  }

  // A further tensor of the case's element type, its numbers within +-range; `numbers` becomes what it holds.
  const void* input(int64_t count, float range, Numbers& numbers) {
    Buffer& buffer = allocate(count);
    numbers.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      unsigned char* at = buffer.host() + i * element_size(c.element);
      encode(range * next_number(), c.element, at);
      numbers[i] = decode(at, c.element);
    }
    buffer.write();
    return buffer.data();
  }

  // As the formulas take it.
  oracle::Document document(int64_t b) const {
    const auto part = [&](const Numbers& all) { return all.data() + b * (all.size() / c.batch); };
    return {c.causal, c.tokens, c.lengths[b], c.channels, part(query), part(key), part(value)};
  }

  // Runs the kernel in two orders of threads, which must give the same bits, near formula(document) in rows that count
  // and finite in the others. Returns the number of failures.
  template <class Call, class Kernel>
  int check(Call call, size_t (*workspace_size)(const Call*), const Kernel& kernel,
            const std::function<oracle::Values(const oracle::Document&)>& formula) {
    if (c.counts_accesses) return print_accesses(call, workspace_size, kernel);
    const size_t outputs = c.batch * c.tokens * c.channels, size = element_size(c.element);
    std::vector<unsigned char> first;
    device::use_finer_tensor_cores(c.draw(3, 43) == 0);
    for (unsigned order : {c.index + 2u, static_cast<unsigned>(c.draw(2, 21))}) {
      Buffer output(outputs * size, offset()), workspace(workspace_size(&call));
      call.output = output.data();
      device::order_threads(order);
      expect(kernel(&call, workspace.data(), nullptr) == 0, "the call is refused");
      expect(output.read(), "writes behind the output");
      expect(workspace.read(), "writes behind the workspace");
      if (first.empty())
        first.assign(output.host(), output.host() + output.bytes);
      else
        expect(std::memcmp(first.data(), output.host(), output.bytes) == 0, "depends on the order of threads");
    }
    for (Buffer& buffer : buffers) expect(buffer.read(), "writes behind an input");

    double error = 0.0, largest = 1.0;
    bool finite = true;
    const double most = c.element == Element::kFloat16 ? 65504.0 : INFINITY;  // which a product of inputs may exceed
    for (int64_t b = 0, i = 0; b < c.batch; ++b) {
      const oracle::Values exact = formula(document(b));
      for (int64_t row = 0; row < c.tokens * c.channels; ++row, ++i) {
        if (row >= compared_rows * c.channels) continue;
        const double y = decode(&first[i * size], c.element);
        finite = finite && (c.element == Element::kFloat16 ? !std::isnan(y) : std::isfinite(y));
        if (row >= c.lengths[b] * c.channels) continue;
        const double expected = std::clamp(exact[row], -most, most);
        largest = std::max(largest, std::fabs(expected));
        error = std::max(error, std::fabs(std::clamp(y, -most, most) - expected));
      }
    }
    expect(finite, "is not finite");
    expect(error <= bounds.of[static_cast<int>(c.element)] * largest, "is off by " + std::to_string(error / largest));

    show_what_is_no_number(call, workspace_size, kernel);
    if (device::kEmulated) launch_for_many_tokens(call, kernel);

    const size_t least = workspace_size(&call);
    for (int64_t aft::Sequence::*extent : {&aft::Sequence::batch, &aft::Sequence::tokens})
      for (int64_t more : {1, 1000}) {
        Call larger = call;
        larger.*extent += more;
        expect(workspace_size(&larger) >= least, "needs less workspace for more");
      }
    return failures;
  }

  const Case& c;
  int64_t compared_rows = c.tokens;  // of each document
  aft::Sequence sequence{};
  Numbers query, key, value;

 private:
  void expect(bool condition, const std::string& what) {
    if (condition) return;
    std::printf("FAILED: %s %s\n", c.name().c_str(), what.c_str());
    ++failures;
  }

  // Of a token that counts, the first channel of query, key or value becomes NaN, and so must that of the output.
  template <class Call, class Kernel>
  void show_what_is_no_number(Call call, size_t (*workspace_size)(const Call*), const Kernel& kernel) {
    const auto longest = std::max_element(c.lengths.begin(), c.lengths.begin() + c.batch);
    if (c.batch == 0 || *longest == 0) return;
    const int64_t b = longest - c.lengths.begin(), t = *longest / 2;
    const size_t size = element_size(c.element);
    const int first = c.gate == Gate::kNone ? 1 : 0;  // which leaves a query unread
    const int which = first + static_cast<int>(c.draw(3 - first, 41));
    const void* const tensor = std::array{sequence.query, sequence.key, sequence.value}[which];
    if (!tensor) return;  // not read
    const size_t row = std::array{&query, &key, &value}[which]->size() / (c.batch * c.tokens) * size;
    unsigned char* at = static_cast<unsigned char*>(const_cast<void*>(tensor)) + (b * c.tokens + t) * row;
    unsigned char none[4], number[4];
    encode_nan(none);
    device::read(number, at, size);
    device::write(at, none, size);
    Buffer output(c.batch * c.tokens * c.channels * size, offset()), workspace(workspace_size(&call));
    call.output = output.data();
    expect(kernel(&call, workspace.data(), nullptr) == 0 && output.read(), "fails where a number is none");
    expect(std::isnan(decode(output.host() + (b * c.tokens + t) * c.channels * size, c.element)),
           "hides that a number of " + std::string(std::array{"query", "key", "value"}[which]) + " is none");
    device::write(at, number, size);
  }

  // The NaN nearest to infinity, which it becomes where lower bits are cut off, or the farthest.
  void encode_nan(unsigned char* to) const {
    const uint32_t nearest[] = {0x7f800001u, 0x7c01u, 0x7f81u};
    const uint32_t bits = c.draw(2, 44) ? nearest[static_cast<int>(c.element)] : ~0u;
    std::memcpy(to, &bits, element_size(c.element));
  }

  template <class Call, class Kernel>
  int print_accesses(Call call, size_t (*workspace_size)(const Call*), const Kernel& kernel) {
    Buffer output(c.batch * c.tokens * c.channels * element_size(c.element)), workspace(workspace_size(&call));
    call.output = output.data();
    device::print_accesses(true);
    expect(kernel(&call, workspace.data(), nullptr) == 0, "the call is refused");
    device::print_accesses(false);
    return failures;
  }

  // No launch may be beyond a limit, however many tokens there are; its kernels do not run.
  template <class Call, class Kernel>
  void launch_for_many_tokens(Call call, const Kernel& kernel) {
    Buffer workspace(0);
    call.batch = 1 << 4;
    call.tokens = 1 << 20;
    device::only_check_launches(true);
    expect(kernel(&call, workspace.data(), nullptr) == 0, "cannot be launched for a million tokens");
    device::only_check_launches(false);
  }

  size_t offset() const { return c.layout == Layout::kUnaligned ? element_size(c.element) : 0; }
  Buffer& allocate(int64_t count) { return buffers.emplace_back(count * element_size(c.element), offset()); }

  // The key that is 90, -1 for none.
  int64_t special_key(int64_t b) const {
    if (c.data == Data::kLateKey) return c.lengths[b] - 1;
    return c.data == Data::kDominatingKey ? c.lengths[b] / 2 : -1;
  }

  float next_number() {
    random = random * 1664525u + 1013904223u;
    return static_cast<float>(random >> 8) / 8388608.0f - 1.0f;
  }

  const Bounds bounds;
  std::list<Buffer> buffers;
  unsigned random = 1 + c.index;
  int failures = 0;
};

// The main function of a kernel's test: `try_case(case, bounds)` on every case, returning its failures.
// Arguments: the bounds for float32, float16 and bfloat16, and optionally n, to take about one case of n only. They
// are drawn, as the table repeats its types and forms every few cases; each extent, type and form keeps a case.
constexpr int kEnoughFailures = 5;
constexpr unsigned kSampled = 99;    // apart from what mechanisms draw
constexpr size_t kStride = 101;  // through the table in an order that has something of everything soon

// Chooses the cases that run, of cases that are shown one after the other.
class Sample {
 public:
  explicit Sample(int every) : every_(every) {}

  bool takes(const Case& c) {
    if (c.draw(every_, kSampled) != 0 && !is_new(c)) return false;
    visit(c, [this](int field, int64_t value) { seen_.insert({field, value}); });
    return true;
  }

 private:
  bool is_new(const Case& c) const {
    bool found = false;
    visit(c, [&](int field, int64_t value) { found = found || seen_.count({field, value}) == 0; });
    return found;
  }

  template <class Visitor>
  static void visit(const Case& c, const Visitor& visitor) {
    int field = 0;
    for (int64_t extent : {c.batch, c.tokens, c.channels, c.heads}) visitor(field++, extent);
    for (int form : {static_cast<int>(c.element), int{c.causal}, static_cast<int>(c.gate), static_cast<int>(c.data),
                     static_cast<int>(c.layout)})
      visitor(field++, form);
  }

  const int every_;
  std::set<std::pair<int, int64_t>> seen_;
};

// Runs aligned cases of a usual shape, and prints the accesses to memory of every launch.
inline int count_accesses(const std::function<int(const Case&, const Bounds&)>& try_case) {
  int failures = 0;
  for (bool causal : {false, true})
    for (Element element : {Element::kFloat32, Element::kBfloat16}) {
      Case c{0, 1, 256, 128, 2, element, causal, Gate::kSigmoid, Data::kSmall, Layout::kPacked, {256}};
      c.counts_accesses = true;
      failures += try_case(c, {});
    }
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

using TryCase = std::function<int(const Case&, const Bounds&)>;

// Where all cases pass, `try_more` follows with those that the table lacks.
inline int run_cases(int argc, char** argv, const TryCase& try_case,
                     const std::function<int(const Bounds&)>& try_more = [](const Bounds&) { return 0; }) {
  if (argc == 2 && std::string(argv[1]) == "accesses") return count_accesses(try_case);
  if (argc < 4) {
    std::printf("usage: %s FLOAT32_BOUND FLOAT16_BOUND BFLOAT16_BOUND [EVERY]\n", argv[0]);
    return EXIT_FAILURE;
  }
  const Bounds bounds{{std::atof(argv[1]), std::atof(argv[2]), std::atof(argv[3])}};
  Sample sample(argc > 4 ? std::atoi(argv[4]) : 1);
  int cases = 0, failures = 0;
  const std::vector<Case> table = all_cases();
  for (size_t i = 0; i < table.size(); ++i) {
    const Case& c = table[i * kStride % table.size()];
    if (failures > kEnoughFailures || !sample.takes(c)) continue;
    device::doing = c.name();
    failures += try_case(c, bounds);
    ++cases;
  }
  std::printf("%d of %zu cases, %d failures\n", cases, table.size(), failures);
  return failures || try_more(bounds) ? EXIT_FAILURE : EXIT_SUCCESS;
}

// Where a case has few tokens and channels, try_case follows with one wide head or heads of one channel, which the
// table of cases lacks.
inline TryCase with_more_widths(const TryCase& try_case) {
  return [try_case](const Case& c, const Bounds& bounds) {
    int failures = try_case(c, bounds);
    if (c.tokens != 33 || (c.channels != 8 && c.channels != 36)) return failures;
    Case other = c;
    other.channels = c.channels == 8 ? 7 : c.causal ? 256 : 160;
    other.heads = c.channels == 8 ? 7 : 1;
    other.batch = 1;
    return failures + try_case(other, bounds);
  };
}

// A small document of 8 channels that is one token shorter than its row.
inline Case short_document(int64_t tokens, Element element, bool causal, Gate gate, int index = 0) {
  return {index, 1, tokens, 8, 1, element, causal, gate, Data::kSmall, Layout::kPacked, {tokens - 1}};
}

// The first `count` numbers of a packed input become change(i, number), rounded to their type.
template <class Change>
void change_numbers(const void* data, Numbers& numbers, int64_t count, Element element, const Change& change) {
  const size_t size = element_size(element);
  auto* const to = static_cast<unsigned char*>(const_cast<void*>(data));
  for (int64_t i = 0; i < count; ++i) {
    unsigned char bytes[4];
    encode(change(i, static_cast<float>(numbers[i])), element, bytes);
    device::write(to + i * size, bytes, size);
    numbers[i] = decode(bytes, element);
  }
}

// In causal form, the value of a token is NaN or infinite, which earlier rows must not see. `check` checks a problem.
inline int check_later_values(int64_t channels, int64_t heads, const Bounds& bounds,
                              const std::function<int(Problem&)>& check) {
  int failures = 0;
  for (Element element : {Element::kFloat32, Element::kFloat16, Element::kBfloat16})
    for (int64_t token : {1, 7, 8, 31, 127, 128}) {
      const Case c{0, 1, 140, channels, heads, element, true, Gate::kSigmoid, Data::kSmall, Layout::kPacked, {140}};
      device::doing = "later value, " + c.name();
      for (float late : {NAN, INFINITY}) {
        Problem problem(c, bounds, heads > 1 ? heads : channels);
        problem.compared_rows = token;
        change_numbers(problem.sequence.value, problem.value, c.tokens * channels, element,
                       [&](int64_t i, float value) { return i / channels == token ? late : value; });
        failures += check(problem);
      }
    }
  return failures;
}

// Those of keys that count.
template <class Change>
void change_keys(Problem& problem, const Change& change) {
  const Case& c = problem.c;
  change_numbers(problem.sequence.key, problem.key, c.lengths[0] * c.channels, c.element, change);
}
