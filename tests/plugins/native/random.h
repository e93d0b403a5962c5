// Random numbers that are the same everywhere, and how many cases to draw.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <initializer_list>

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
