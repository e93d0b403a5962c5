// Bank conflicts of shared memory and uncoalesced accesses of global memory, counted for each launch.
//
// Accesses count as one instruction of a warp if they have the same place in the program and the same turn there,
// between two points where the lanes meet. A lane that leaves out a turn of a loop shifts its later ones. Plain
// accesses are seen in kernels that are compiled for ThreadSanitizer with EMULATOR_RECORDS, and linked with
// instrumentation.cc in its place. The compiler's choice of what stays in registers may differ from nvcc's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct AccessCounts {
  const void* kernel = nullptr;
  // Passes over the 32 banks of 4 bytes that the accesses to shared memory take, and the fewest for as many bytes.
  int64_t passes = 0, fewest_passes = 0;
  // Sectors of 32 bytes that the accesses to global memory touch, and the fewest for as many bytes.
  int64_t sectors = 0, fewest_sectors = 0;
};

// Counts those of launches from now on; `report`, if any, is called after each.
void count_accesses(void (*report)(const AccessCounts&));

// An access of the thread that runs, by the instruction at `place`.
void record_access(const void* place, const void* address, size_t bytes);

// While one lives, instrumented accesses are not recorded: those that the emulator records by itself.
struct Unrecorded {
#if defined(EMULATOR_RECORDS)
  Unrecorded();
  ~Unrecorded();
#else
  Unrecorded() {}
#endif
};
void record_instrumented_access(const void* place, const void* address, size_t bytes);

// For the scheduler: the log of a warp, which is counted whenever all its lanes have met.
struct AccessLog;
AccessLog* create_access_log();
void begin_counting(const void* kernel);
void lane_meets_others(AccessLog& warp);
void end_counting();

}  // namespace emulator
