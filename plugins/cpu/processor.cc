#include "processor.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
// Headers of Linux before 5.6 lack these bits.
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1 << 14)
#endif
#endif

namespace aft {
namespace {

constexpr const char* kNames[] = {"baseline",    "avx2",       "avx512",       "avx512_vnni",
                                  "avx512_bf16", "avx512_amx", "neon_dotprod", "neon_i8mm_bf16"};

#if defined(__x86_64__)
// Clang 14, for one, has no word for it in __builtin_cpu_supports.
bool supports_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

#if defined(AFT_EMULATE_AMX)
bool system_grants_tiles() { return true; }
#elif defined(AFT_AMX)
// GCC 10, for one, has no words for it in __builtin_cpu_supports.
bool has_tiles() {
  constexpr unsigned kSystemSavesState = 1u << 27;                    // OSXSAVE, of leaf 1
  constexpr unsigned kInstructions = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8, of leaf 7
  constexpr unsigned kStates = 1u << 17 | 1u << 18;                   // XTILECFG, XTILEDATA, of XCR0
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kSystemSavesState)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kInstructions) != kInstructions) return false;
  unsigned states, upper;
  __asm__("xgetbv" : "=a"(states), "=d"(upper) : "c"(0));
  return (states & kStates) == kStates;
}

// Linux has a process ask before its first tile, and grants it for all its threads. It refuses where a thread has a
// signal stack too small for the tiles. Asking again is allowed.
bool system_grants_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return has_tiles() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool system_grants_tiles() { return false; }  // the compiler lacks the instructions
#endif

// Returns the highest instruction set of this processor, apart from tiles.
InstructionSet highest() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !supports_f16c())
    return InstructionSet::kBaseline;
#if defined(AFT_EMULATE_AVX512)
  return InstructionSet::kAvx512Bf16;
#endif
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return InstructionSet::kAvx2;
  if (!__builtin_cpu_supports("avx512vnni")) return InstructionSet::kAvx512;
  return __builtin_cpu_supports("avx512bf16") ? InstructionSet::kAvx512Bf16 : InstructionSet::kAvx512Vnni;
}
#elif defined(__aarch64__) && defined(__linux__)
InstructionSet highest() {
  if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return InstructionSet::kBaseline;
  [[maybe_unused]] constexpr unsigned long kProducts = HWCAP2_I8MM | HWCAP2_BF16;
#if defined(AFT_I8MM_BF16)
  if ((getauxval(AT_HWCAP2) & kProducts) == kProducts) return InstructionSet::kNeonI8mmBf16;
#endif
  return InstructionSet::kNeonDotprod;
}
#else
InstructionSet highest() { return InstructionSet::kBaseline; }
#endif

// The same names are known on every processor.
InstructionSet asked_for() {
  const char* isa = std::getenv("AFTEXPORT_ISA");
  if (!isa || !*isa) return static_cast<InstructionSet>(std::size(kNames) - 1);
  const auto* found = std::find(std::begin(kNames), std::end(kNames), std::string(isa));
  if (found != std::end(kNames)) return static_cast<InstructionSet>(found - kNames);
  std::string known;
  for (const char* name : kNames) known += (known.empty() ? "" : ", ") + std::string(name);
  throw std::invalid_argument("the environment variable AFTEXPORT_ISA is \"" + std::string(isa) + "\", known are " +
                              known);
}

}  // namespace

InstructionSet usable_instruction_set() { return std::min(asked_for(), highest()); }

bool request_tiles() {
#if defined(__x86_64__)
  return asked_for() >= InstructionSet::kAvx512Amx && highest() == InstructionSet::kAvx512Bf16 && system_grants_tiles();
#else
  return false;
#endif
}

}  // namespace aft
