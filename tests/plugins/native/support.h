// What the native tests share: threads, numbers, and counting failures.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

using Numbers = std::vector<float>;

// For aft::Parallel: `pool` points to the number of threads.
inline void run_on_threads(void* pool, size_t tasks, void (*body)(void*, size_t), void* context) {
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

inline int failures = 0;

inline void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}
