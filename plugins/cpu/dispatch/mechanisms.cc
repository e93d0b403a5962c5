// Chooses, once per process, the compiled copy of the kernels that this machine can run.

#include "kernels.h"
#include "processor.h"

namespace aft {

#define AFT_FOR_EACH_KERNEL(X)                    \
  X(aft_simple, AftSimple)                        \
  X(aft_local, AftLocal)                          \
  X(aft_conv, AftConv)                            \
  X(efficient_attention, EfficientAttention)      \
  X(linear_attention, LinearAttention)            \
  X(fastformer, Fastformer)

#define AFT_DECLARE(name, Params) void name(const Params&, const Parallel&);
#define AFT_POINTER(name, Params) void (*name)(const Params&, const Parallel&);

namespace baseline {
AFT_FOR_EACH_KERNEL(AFT_DECLARE)
}
namespace avx2 {
AFT_FOR_EACH_KERNEL(AFT_DECLARE)
}
namespace avx512 {
AFT_FOR_EACH_KERNEL(AFT_DECLARE)
}

namespace {

struct Kernels {
  const char* name;
  AFT_FOR_EACH_KERNEL(AFT_POINTER)
};

#define AFT_ENTRY(name, Params) baseline::name,
constexpr Kernels kBaseline{"baseline", AFT_FOR_EACH_KERNEL(AFT_ENTRY)};
#undef AFT_ENTRY
#if defined(__x86_64__)
#define AFT_ENTRY(name, Params) avx2::name,
constexpr Kernels kAvx2{"avx2", AFT_FOR_EACH_KERNEL(AFT_ENTRY)};
#undef AFT_ENTRY
#define AFT_ENTRY(name, Params) avx512::name,
constexpr Kernels kAvx512{"avx512", AFT_FOR_EACH_KERNEL(AFT_ENTRY)};
#undef AFT_ENTRY
#endif

const Kernels& choose() {
  [[maybe_unused]] const InstructionSet usable = usable_instruction_set();
#if defined(__x86_64__)
  if (usable >= InstructionSet::kAvx512) return kAvx512;
  if (usable >= InstructionSet::kAvx2) return kAvx2;
#endif
  return kBaseline;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace

#define AFT_FORWARD(name, Params) \
  void name(const Params& params, const Parallel& parallel) { kernels().name(params, parallel); }
AFT_FOR_EACH_KERNEL(AFT_FORWARD)

const char* instruction_set() { return kernels().name; }

}  // namespace aft
