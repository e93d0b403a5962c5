// What the native tests share: threads, numbers, tensors, and counting failures.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

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

// Float32 values as tensor data of the element type, in a buffer of exactly that size. float16 by truncation.
inline std::vector<char> encode(const Numbers& values, aft::Element element) {
  const size_t size = element == aft::Element::kFloat16 ? 2 : 4;
  std::vector<char> data(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], 4);
    if (element == aft::Element::kFloat16) {
      const int exponent = static_cast<int>((bits >> 23) & 255) - 112;
      const uint16_t half = static_cast<uint16_t>(
          ((bits >> 16) & 0x8000) |
          (exponent <= 0 ? 0 : (exponent > 30 ? 0x7bff : exponent << 10 | ((bits >> 13) & 1023))));
      std::memcpy(&data[i * 2], &half, 2);
    } else {
      std::memcpy(&data[i * 4], &bits, 4);
    }
  }
  return data;
}

inline bool finite(const std::vector<char>& data, aft::Element element) {
  const size_t size = element == aft::Element::kFloat16 ? 2 : 4;
  for (size_t i = 0; i < data.size(); i += size) {
    if (element == aft::Element::kFloat16) {
      uint16_t half;
      std::memcpy(&half, &data[i], 2);
      if ((half & 0x7c00) == 0x7c00) return false;
    } else {
      float value;
      std::memcpy(&value, &data[i], 4);
      if (!std::isfinite(value)) return false;
    }
  }
  return true;
}

inline int failures = 0;

inline void expect(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}
