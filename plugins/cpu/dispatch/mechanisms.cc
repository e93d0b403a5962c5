// Chooses, once per process, the compiled copy of AFT_KERNELS that this machine can run.

#include "dispatch/table.h"
#include "kernels.h"
#include "processor.h"

namespace aft {

namespace baseline {
AFT_KERNELS(AFT_DECLARE, baseline)
}
namespace avx2 {
AFT_KERNELS(AFT_DECLARE, avx2)
}
namespace avx512 {
AFT_KERNELS(AFT_DECLARE, avx512)
}

#if defined(AFT_ONLY_ISA)
namespace AFT_ONLY_ISA {
AFT_KERNELS(AFT_DECLARE, AFT_ONLY_ISA)
}
#endif

namespace {

#define AFT_SET(isa) AFT_NAMED_SET(isa)  // isa may be a macro
#define AFT_NAMED_SET(isa) \
  Table { #isa, AFT_KERNELS(AFT_ENTRY, isa) }

struct Table {
  const char* name;
  AFT_KERNELS(AFT_POINTER, )
};

Table choose() {
#if defined(AFT_ONLY_ISA)
  return AFT_SET(AFT_ONLY_ISA);
#else
  [[maybe_unused]] const InstructionSet usable = usable_instruction_set();
#if defined(__x86_64__)
  if (usable >= InstructionSet::kAvx512) return AFT_SET(avx512);
  if (usable >= InstructionSet::kAvx2) return AFT_SET(avx2);
#endif
  return AFT_SET(baseline);
#endif
}

const Table& table() {
  static const Table chosen = choose();
  return chosen;
}

}  // namespace

AFT_KERNELS(AFT_FORWARD, )

const char* instruction_set() { return table().name; }

}  // namespace aft
