// A stack of its own to run a function on, and switching between such stacks.
#pragma once

#include <cstddef>

namespace emulator {

class Fiber {
 public:
  Fiber();                                      // what is running now
  Fiber(void (*entry)(void*), void* argument);  // `entry` on a new stack; it must not return
  ~Fiber();
  Fiber(const Fiber&) = delete;

  // Makes ready to run `entry` from its start, also once more.
  void start();

  // From this fiber to another; returns when something switches back.
  void switch_to(Fiber& to);

 private:
  static void begin();

  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
  char* memory = nullptr;
  void* context = nullptr;  // the stack pointer, or a ucontext_t
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* thread = nullptr;  // ThreadSanitizer's
};

}  // namespace emulator
