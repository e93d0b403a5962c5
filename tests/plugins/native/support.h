// What the native tests share: threads, numbers, tensors, and counting failures.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "encoder.h"
#include "kernels.h"

using Numbers = std::vector<float>;

// For aft::Parallel: `pool` points to the number of threads. One thread takes the tasks from the last to the first, so
// that a task which writes results of another one is found.
inline void run_on_threads(void* pool, size_t tasks, void (*body)(void*, size_t), void* context) {
  if (*static_cast<int*>(pool) == 1) {
    while (tasks > 0) body(context, --tasks);
    return;
  }
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < *static_cast<int*>(pool); ++i)
    threads.emplace_back([&] {
      for (size_t task; (task = next.fetch_add(1)) < tasks;) body(context, task);
    });
  for (std::thread& thread : threads) thread.join();
}

// Between -scale and scale, in a buffer of exactly that size.
inline Numbers numbers(int64_t count, float scale, unsigned seed) {
  Numbers values(count);
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = scale * (static_cast<float>(seed >> 8) / 8388608.0f - 1.0f);
  }
  return values;
}

inline size_t element_size(aft::Element element) { return element == aft::Element::kFloat16 ? 2 : 4; }

// Float32 values as tensor data of the element type, in a buffer of exactly that size. float16 by truncation.
inline std::vector<char> encode(const Numbers& values, aft::Element element) {
  std::vector<char> data(values.size() * element_size(element));
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], 4);
    if (element == aft::Element::kFloat16) {
      const int exponent = static_cast<int>((bits >> 23) & 255) - 112;
      const uint32_t size = exponent <= 0 ? 0 : exponent > 30 ? 0x7bff : exponent << 10 | ((bits >> 13) & 1023);
      const uint16_t half = static_cast<uint16_t>(((bits >> 16) & 0x8000) | size);
      std::memcpy(&data[i * 2], &half, 2);
    } else {
      std::memcpy(&data[i * 4], &bits, 4);
    }
  }
  return data;
}

inline double decode_one(const char* data, aft::Element element) {
  if (element == aft::Element::kFloat32) {
    float value;
    std::memcpy(&value, data, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, data, 2);
  const int exponent = (half >> 10) & 31, fraction = half & 1023;
  const double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(fraction + 1024, exponent - 25);
  return half & 0x8000 ? -size : size;
}

// In float16, results of large inputs are infinite, but not NaN.
inline bool finite(const std::vector<char>& data, aft::Element element) {
  for (size_t i = 0; i < data.size(); i += element_size(element)) {
    const double x = decode_one(&data[i], element);
    if (element == aft::Element::kFloat16 ? std::isnan(x) : !std::isfinite(x)) return false;
  }
  return true;
}

inline int failures = 0;

// The exit status of a test program, as CMakeLists.txt has it, where the processor lacks the instructions that
// AFTEXPORT_ISA asks for, and lesser ones would run in their place.
constexpr int kSkipped = 77;

inline bool instructions_missing() {
  const char* asked = std::getenv("AFTEXPORT_ISA");
  if (!asked || std::string(asked) == aft::product_instruction_set()) return false;
  if (std::getenv("AFT_NO_SKIPS")) {  // on a processor chosen for its instructions
    std::printf("FAILED: expected the instruction set %s, got %s\n", asked, aft::product_instruction_set());
    std::exit(EXIT_FAILURE);
  }
  std::printf("skipped: this processor lacks the instructions of %s\n", asked);
  return true;
}

// Whether to run a part of the cases, as `make test-native PART=1` does.
inline bool is_part() {
  const char* part = std::getenv("AFT_TEST_PART");
  return part && *part;
}

// Whether to leave out what a sanitizer cannot see, under one. Numbers that are wrong show in the plain build.
inline bool is_sanitizer_part() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return is_part();
#else
  return false;
#endif
}

// The numbers of threads that a test compares. One thread has no races, so the thread sanitizer's part has three only.
inline std::vector<int> thread_counts() {
#if defined(__SANITIZE_THREAD__)
  if (is_sanitizer_part()) return {3};
#endif
  return {1, 3};
}

inline std::vector<aft::Method> usable_methods() {
  const aft::MethodOrder usable = aft::usable_methods();
  return {usable.methods, usable.methods + usable.count};
}

inline std::string name_of(aft::Method method) { return aft::kMethods[static_cast<int>(method)].name; }

inline void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}

// splitmix64 (Steele et al., OOPSLA 2014)
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(next() % (high - low + 1)); }
  bool one_in(int64_t n) { return between(1, n) == 1; }
  template <class T>
  T choose(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  double uniform(double range) { return range * (static_cast<double>(next() >> 11) / (int64_t{1} << 52) - 1); }

 private:
  uint64_t state_;
};

// The number of cases if no argument says it: AFT_RANDOM_CASES, or `otherwise`.
inline uint64_t default_cases(uint64_t otherwise) {
  const char* cases = std::getenv("AFT_RANDOM_CASES");
  return cases ? std::strtoull(cases, nullptr, 10) : otherwise;
}

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

// `size` bytes somewhere in memory that is all ones around them.
class Guarded {
 public:
  // `shift` bytes off an address that any vector may be at.
  explicit Guarded(size_t size, size_t shift = 0)
      : size_(size), memory_(kBand + kAlignment + shift + size + kBand, '\xff') {
    const auto band_end = reinterpret_cast<uintptr_t>(memory_.data()) + kBand;
    begin_ = kBand + (kAlignment - band_end % kAlignment) % kAlignment + shift;
    seal();
  }
  ~Guarded() { ASAN_UNPOISON_MEMORY_REGION(memory_.data(), memory_.size()); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  char* data() { return memory_.data() + begin_; }
  size_t size() const { return size_; }

  bool bands_untouched() {
    ASAN_UNPOISON_MEMORY_REGION(memory_.data(), memory_.size());
    bool untouched = true;
    for (size_t i = 0; i < memory_.size(); ++i)
      untouched = untouched && ((i >= begin_ && i < begin_ + size_) || memory_[i] == '\xff');
    seal();
    return untouched;
  }

 private:
  static constexpr size_t kBand = 256, kAlignment = 64;

  void seal() {
    ASAN_POISON_MEMORY_REGION(memory_.data(), begin_);
    ASAN_POISON_MEMORY_REGION(data() + size_, memory_.size() - begin_ - size_);
  }

  size_t size_, begin_ = 0;
  std::vector<char> memory_;
};

inline std::vector<double> decode(Guarded& buffer, aft::Element element) {
  std::vector<double> values(buffer.size() / element_size(element));
  for (size_t i = 0; i < values.size(); ++i) values[i] = decode_one(buffer.data() + i * element_size(element), element);
  return values;
}
