// A weight matrix packed for the products of one method, and the methods that this machine has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "method.h"
#include "scratch.h"

namespace aft {

// A weight matrix rearranged for the products of one method; weight_layout.h has the layout.
struct PackedWeight {
  PackedWeight(int64_t rows, int64_t columns, Method method, size_t floats);
  ~PackedWeight();

  int64_t rows, columns;
  Method method;
  Scratch memory;
};

// The method must be one of usable_methods().
std::unique_ptr<const PackedWeight> pack_weight(const float* weight, int64_t rows, int64_t columns, Method method);

// Whether product_instruction_set() has the method. For a method by tiles, the process asks the system for them.
bool is_usable(Method);

// All usable methods, in the order of kMethods.
MethodOrder usable_methods();

// The instruction set chosen for these products: as instruction_set(), or "avx512_vnni", "avx512_bf16" (which
// has VNNI too) or "avx512_amx" (which has both) where the machine has more than the other kernels use. For the last, the
// process asks the system for tiles.
const char* product_instruction_set();

}  // namespace aft
