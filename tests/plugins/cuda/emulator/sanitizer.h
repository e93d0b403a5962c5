// What sanitizers must be told about fibers, barriers and memory. Weak, so nothing happens in a build without them.
#pragma once

#include <cstddef>

extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* bytes);
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void*);
[[gnu::weak]] void __tsan_release(void*);
[[gnu::weak]] void __asan_poison_memory_region(const volatile void*, size_t);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void*, size_t);
}

namespace emulator {

// What was done before `release(x)` happened before what is done after `acquire(x)`.
inline void acquire(void* x) {
  if (__tsan_acquire) __tsan_acquire(x);
}
inline void release(void* x) {
  if (__tsan_release) __tsan_release(x);
}

inline void poison(void* memory, size_t bytes) {
  if (__asan_poison_memory_region) __asan_poison_memory_region(memory, bytes);
}
inline void unpoison(void* memory, size_t bytes) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(memory, bytes);
}

}  // namespace emulator
