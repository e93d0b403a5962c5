// Takes ThreadSanitizer's place in a program whose kernels are compiled for it, to see every access to memory.
#include <cstddef>

#include "access_counts.h"

#define RECORD(name, bytes) \
  void name(void* p) { emulator::record_instrumented_access(__builtin_return_address(0), p, bytes); }
#define RECORD_SIZE(bytes)               \
  RECORD(__tsan_read##bytes, bytes)      \
  RECORD(__tsan_write##bytes, bytes)     \
  RECORD(__tsan_unaligned_read##bytes, bytes) \
  RECORD(__tsan_unaligned_write##bytes, bytes)

extern "C" {
RECORD_SIZE(1)
RECORD_SIZE(2)
RECORD_SIZE(4)
RECORD_SIZE(8)
RECORD_SIZE(16)
void __tsan_read_range(void* p, size_t bytes) { emulator::record_instrumented_access(__builtin_return_address(0), p, bytes); }
void __tsan_write_range(void* p, size_t bytes) { emulator::record_instrumented_access(__builtin_return_address(0), p, bytes); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
