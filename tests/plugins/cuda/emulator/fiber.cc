#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>

#include "sanitizer.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {
namespace {

constexpr size_t kStack = 256 << 10, kGuard = 64 << 10;
constexpr unsigned kNoOrder = 1;  // switching orders nothing in ThreadSanitizer's eyes

Fiber *from, *now;

}  // namespace

#if defined(__x86_64__)
// Keeps what a function call must keep and no more; swapcontext asks the kernel for the signal mask each time.
extern "C" void emulator_switch_stack(void** from, void* to);
asm(R"(
.text
.globl emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack, .-emulator_switch_stack
)");

namespace {

void prepare(void*& context, char* memory, void (*begin)()) {
  // `begin` finds the stack as behind a call: its (null) return address 8 bytes under a multiple of 16.
  void** top = reinterpret_cast<void**>(memory + kGuard + kStack) - 1;
  *top = nullptr;
  *--top = reinterpret_cast<void*>(begin);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context = top;
}
void switch_stack(void*& from_context, void* to) { emulator_switch_stack(&from_context, to); }
void discard(void*) {}

}  // namespace
#else
namespace {

void prepare(void*& context, char* memory, void (*begin)()) {
  if (!context) context = new ucontext_t;
  auto* made = static_cast<ucontext_t*>(context);
  getcontext(made);
  made->uc_stack.ss_sp = memory + kGuard;
  made->uc_stack.ss_size = kStack;
  made->uc_link = nullptr;
  makecontext(made, begin, 0);
}
void switch_stack(void*& from_context, void* to) {
  if (!from_context) from_context = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from_context), static_cast<ucontext_t*>(to));
}
void discard(void* context) { delete static_cast<ucontext_t*>(context); }

}  // namespace
#endif

Fiber::Fiber() : thread(__tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr) {}

Fiber::Fiber(void (*entry)(void*), void* argument) : entry(entry), argument(argument), bytes(kStack) {
  void* mapped = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED || mprotect(mapped, kGuard, PROT_NONE) != 0) std::abort();
  memory = static_cast<char*>(mapped);
  bottom = memory + kGuard;
}

Fiber::~Fiber() {
  if (!memory) return;
  if (thread) __tsan_destroy_fiber(thread);
  munmap(memory, kGuard + kStack);
  discard(context);
}

void Fiber::start() {
  if (__tsan_create_fiber && !thread) thread = __tsan_create_fiber(0);
  prepare(context, memory, &Fiber::begin);
}

void Fiber::begin() {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &from->bottom, &from->bytes);
  now->entry(now->argument);
  std::abort();
}

void Fiber::switch_to(Fiber& to) {
  from = this;
  now = &to;
  void* fake_stack = nullptr;
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fake_stack, to.bottom, to.bytes);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.thread, kNoOrder);
  switch_stack(context, to.context);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, &from->bottom, &from->bytes);
}

}  // namespace emulator
