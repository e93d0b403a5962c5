// The thread that runs, for the other parts of the emulator.
#pragma once

#include <cstddef>

#include "access_counts.h"

namespace emulator {

bool is_shared(const void* p, size_t bytes);  // within the shared memory of the thread's block
AccessLog* log_of_running_warp();             // null where none runs

}  // namespace emulator
