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

// Returns the highest that this processor has, or a lower one that the environment variable AFTEXPORT_ISA names.
// kAvx512Amx is returned as kAvx512Bf16, which it has too. Throws std::invalid_argument if the name is unknown.
InstructionSet usable_instruction_set();

// Asks the system for the tiles of AMX, unless AFTEXPORT_ISA names a lower instruction set. Returns whether it grants them.
bool request_tiles();

}  // namespace aft
