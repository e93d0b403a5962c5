// What this processor can run of what was compiled.
#pragma once

namespace aft {

// Each with all of those before it.
enum class InstructionSet { kBaseline, kAvx2, kAvx512, kAvx512Vnni, kAvx512Bf16 };

// The highest that this processor has, or a lower one that the environment variable AFTEXPORT_ISA asks for by its name.
// Throws std::invalid_argument where it has a name that is not known.
InstructionSet usable_instruction_set();

}  // namespace aft
