// Converts float16 parameters for operators that compute with float32 ones.

#include "kernels.h"
#include "simd/load_store.h"

namespace aft::AFT_ISA {

void half_to_float(const void* halves, int64_t count, float* floats) {
  to_float(static_cast<const Half*>(halves), count, floats);
}

}  // namespace aft::AFT_ISA
