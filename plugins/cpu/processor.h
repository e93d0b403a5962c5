// The instruction sets of this processor.
#pragma once

namespace aft {

// Each includes those before it that belong to the same processor, and the baseline.
enum class InstructionSet {
  kBaseline,
  kAvx2,
  kAvx512,
  kAvx512Vnni,
  kAvx512Bf16,
  kAvx512Amx,
  kNeonDotprod,
  kNeonI8mmBf16
};

// Returns the highest that this processor has, or a lower one that the environment variable AFTEXPORT_ISA names. For the
// highest, the process asks the system for the tiles of AMX; where it is refused, the one below is returned.
// Throws std::invalid_argument if the name is unknown.
InstructionSet usable_instruction_set();

}  // namespace aft
