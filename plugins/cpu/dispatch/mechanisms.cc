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

namespace {

struct Table {
  const char* name;
  AFT_KERNELS(AFT_POINTER, )
};

Table choose() {
  [[maybe_unused]] const InstructionSet usable = usable_instruction_set();
#if defined(__x86_64__)
  if (usable >= InstructionSet::kAvx512) return {"avx512", AFT_KERNELS(AFT_ENTRY, avx512)};
  if (usable >= InstructionSet::kAvx2) return {"avx2", AFT_KERNELS(AFT_ENTRY, avx2)};
#endif
  return {"baseline", AFT_KERNELS(AFT_ENTRY, baseline)};
}

const Table& table() {
  static const Table chosen = choose();
  return chosen;
}

}  // namespace

AFT_KERNELS(AFT_FORWARD, )

const char* instruction_set() { return table().name; }

}  // namespace aft
