// Chooses, once per process, the compiled copy of the kernels that this machine can run.

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

#if defined(__x86_64__)
// Clang 14, for one, has no word for it in __builtin_cpu_supports.
bool supports_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// What AFTEXPORT_ISA asks for; null for nothing. The same names are known on every processor.
const char* asked_for() {
  const char* isa = std::getenv("AFTEXPORT_ISA");
  if (!isa || !*isa) return nullptr;
  std::string known;
  for (const char* name : {"baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16"}) {
    if (std::strcmp(isa, name) == 0) return isa;
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  throw std::invalid_argument("the environment variable AFTEXPORT_ISA is \"" + std::string(isa) + "\", known are " +
                              known);
}

const Kernels& choose() {
  [[maybe_unused]] const char* limit = asked_for();
#if defined(__x86_64__)
  const bool up_to_avx2 = limit && std::strcmp(limit, "avx2") == 0;
  const bool up_to_baseline = limit && std::strcmp(limit, "baseline") == 0;
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && !up_to_avx2 && !up_to_baseline) return kAvx512;
  if (has_avx2 && !up_to_baseline) return kAvx2;
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
