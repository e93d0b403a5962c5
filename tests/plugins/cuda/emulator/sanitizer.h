// What sanitizers must be told about fibers and barriers. Weak, so nothing happens in a build without them.
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
}

namespace emulator {

// What was done before `release(x)` happened before what is done after `acquire(x)`.
inline void acquire(void* x) {
  if (__tsan_acquire) __tsan_acquire(x);
}
inline void release(void* x) {
  if (__tsan_release) __tsan_release(x);
}

}  // namespace emulator
