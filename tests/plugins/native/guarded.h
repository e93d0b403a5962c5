// Tensors of random values between guard bands: what a kernel writes outside of them shows in the bands, what it
// reads there is NaN, and the address sanitizer reports either.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "support.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

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

// `size` bytes somewhere in memory that is all ones around them.
class Guarded {
 public:
  // `shift` bytes off an address that any vector may be at.
  explicit Guarded(size_t size, size_t shift = 0)
      : size_(size), begin_(kBand + shift), memory_(begin_ + size + kBand, '\xff') {
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
  static constexpr size_t kBand = 256;

  void seal() {
    ASAN_POISON_MEMORY_REGION(memory_.data(), begin_);
    ASAN_POISON_MEMORY_REGION(data() + size_, memory_.size() - begin_ - size_);
  }

  size_t size_, begin_;
  std::vector<char> memory_;
};

inline std::vector<double> decode(Guarded& buffer, aft::Element element) {
  std::vector<double> values(buffer.size() / element_size(element));
  for (size_t i = 0; i < values.size(); ++i) values[i] = decode_one(buffer.data() + i * element_size(element), element);
  return values;
}
