#include "launch.h"

#include <map>

#include "emulator.h"

namespace emulator {
namespace {

// As every GPU has them, but for shared memory, of which sm_86, sm_89 and sm_120 have least.
constexpr unsigned kMostThreads = 1024, kMostBlocksX = 0x7fffffff, kMostBlocksYZ = 65535;
constexpr size_t kSharedByDefault = 48 << 10, kMostShared = 99 << 10, kMostParameters = 4 << 10;

bool only_checked;

// The dynamic shared memory that each kernel may have.
std::map<const void*, size_t>& allowed() {
  static std::map<const void*, size_t> sizes;
  return sizes;
}

size_t allowed_shared(const void* kernel) {
  const auto found = allowed().find(kernel);
  return found == allowed().end() ? kSharedByDefault : found->second;
}

bool is_between_1_and(unsigned most, unsigned count) { return count >= 1 && count <= most; }

}  // namespace

void only_check_launches(bool only) { only_checked = only; }
bool only_checks_launches() { return only_checked; }

cudaError_t allow_dynamic_shared(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMostShared) return cudaErrorInvalidValue;
  allowed()[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

cudaError_t launch(const Launch& launch) {
  const dim3 &grid = launch.grid, &block = launch.block;
  if (!is_between_1_and(kMostBlocksX, grid.x) || !is_between_1_and(kMostBlocksYZ, grid.y) ||
      !is_between_1_and(kMostBlocksYZ, grid.z))
    return cudaErrorInvalidConfiguration;
  if (!is_between_1_and(kMostThreads, block.x) || block.y != 1 || block.z != 1) return cudaErrorInvalidConfiguration;
  if (launch.parameter_bytes > kMostParameters) return cudaErrorInvalidValue;  // which nvcc refuses to compile
  if (launch.dynamic_shared > allowed_shared(launch.kernel)) return cudaErrorInvalidValue;
  if (!only_checked) run(launch);
  return cudaSuccess;
}

}  // namespace emulator

// As kernels.h declares it.
extern "C" const char* aft_cuda_error_text(int status) {
  switch (status) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
  }
  return "unrecognized error code";
}
