// For tests of the device itself: arrays, and a count of failures.
#pragma once

#include <cstdio>

#include "device.h"

inline int failures = 0;

inline void expect(bool condition, const char* what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what);
  ++failures;
}

// An array of the device and its copy on the host.
template <class T, int count>
struct Array {
  T host[count] = {};
  T* device = static_cast<T*>(device::allocate(sizeof host));

  Array() { write(); }
  Array(const Array&) = delete;
  ~Array() { device::release(device); }
  void write() { device::write(device, host, sizeof host); }
  void read() { device::read(host, device, sizeof host); }
};
