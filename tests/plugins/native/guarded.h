// Tensors of random values between guard bands: what a kernel writes outside of them shows in the bands, what it
// reads there is NaN, and the address sanitizer reports either.
#pragma once

#include <cmath>
#include <cstdint>
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
