// The speed of every usable method, measured once for each kind of products.
#pragma once

#include <string>

#include "matmul/packed_weight.h"

namespace aft {

// Products whose methods are measured together: those of an encoder's operators of nearly this width, or with width 0
// those of AFT-full.
struct Products {
  int64_t width;

  bool of_aft_full() const { return width == 0; }
  int index() const { return of_aft_full() ? 0 : __builtin_ctzll(static_cast<uint64_t>(width)) - 3; }
  std::string name() const { return of_aft_full() ? "aft_full" : "encoder_" + std::to_string(width); }
};

// The next power of two from 16 to 1,024, on a scale of ratios. Every width has one, so that no choice depends on the
// widths that were measured before.
Products encoder_products(int64_t width);
constexpr Products kAftFullProducts{0};
constexpr int kProductsCount = 8;  // index() is below

// Million multiply-adds a second on one thread, by method; 0 where it is not usable. Whole numbers: a choice is the
// same for the process that measured and for those that read its file.
struct MethodRates {
  int64_t of[kMethodCount];
};

// Takes some 50 ms, so that those of every width together take less than half a second.
MethodRates measure_rates(const Products&);

}  // namespace aft
