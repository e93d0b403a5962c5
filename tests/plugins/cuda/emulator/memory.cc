#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "emulator.h"
#include "sanitizer.h"

namespace emulator {
namespace {

constexpr size_t kPage = 4096, kAlignment = 256;
constexpr size_t kReserved = size_t{4} << 30;  // addresses of each memory; pages exist once they are touched

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

char* map(size_t bytes, int protection, int file) {
  const int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* mapped = mmap(nullptr, bytes, protection, kind, file, 0);
  if (mapped == MAP_FAILED) fail("memory cannot be mapped");
  return static_cast<char*>(mapped);
}

void protect(char* begin, size_t bytes, int protection) {
  if (bytes > 0 && mprotect(begin, bytes, protection) != 0) fail("memory cannot be protected");
}

bool is_within(const char* begin, size_t bytes, const void* p) {
  return begin && reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(begin) < bytes;
}

// Pages, of which the allocation is the end, rounded to its alignment.
struct Allocation {
  size_t first, pages, offset, bytes;  // the first two count pages, the others bytes of the arena
  bool live;

  size_t begin() const { return first * kPage; }
  size_t end() const { return (first + pages) * kPage; }
};

// The device's memory is mapped twice: for kernels, and for copies of the host.
struct DeviceArena {
  char *device = nullptr, *host = nullptr;
  std::vector<Allocation> allocations;
  uint32_t* owner = nullptr;  // 1 + the index of each page's allocation
  size_t pages = 0, live = 0;
};

// Blocks of powers of two, each kept for others of its size.
struct HostArena {
  static constexpr int kSizes = 32;
  static constexpr size_t kLeast = 64;
  char* memory = nullptr;
  size_t used = 0;
  std::vector<void*> free[kSizes];
};

DeviceArena arena;
HostArena host;
bool is_open;

[[noreturn]] void explain(const void* address) {
  const char* what = "an access to memory that does not exist";
  if (is_within(arena.device, kReserved, address))
    what = is_open ? "a kernel accesses device memory outside of every allocation" : "the host accesses device memory";
  else if (is_within(host.memory, kReserved, address))
    what = "a kernel accesses host memory";
  else if (is_open)
    what = "a kernel accesses memory outside of its shared and the device's memory";
  fail(what);
}

void on_fault(int, siginfo_t* info, void*) { explain(info->si_addr); }

void watch_faults() {
  static bool watching;
  if (watching) return;
  watching = true;
  constexpr size_t kStack = 64 << 10;
  stack_t stack{};
  stack.ss_sp = map(kStack, PROT_READ | PROT_WRITE, -1);
  stack.ss_size = kStack;
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  if (sigaltstack(&stack, nullptr) != 0 || sigaction(SIGSEGV, &action, nullptr) != 0) fail("faults cannot be watched");
}

void create_device_arena() {
  watch_faults();
  const int file = memfd_create("device", 0);
  if (file < 0 || ftruncate(file, kReserved) != 0) fail("device memory cannot be made");
  arena.device = map(kReserved, PROT_NONE, file);
  arena.host = map(kReserved, PROT_READ | PROT_WRITE, file);
  close(file);
  arena.owner = reinterpret_cast<uint32_t*>(map(kReserved / kPage * sizeof(uint32_t), PROT_READ | PROT_WRITE, -1));
}

Allocation* find(const void* p) {
  if (!is_within(arena.device, kReserved, p)) return nullptr;
  const uint32_t owner = arena.owner[(static_cast<const char*>(p) - arena.device) / kPage];
  return owner > 0 && arena.allocations[owner - 1].live ? &arena.allocations[owner - 1] : nullptr;
}

// Where the host's copies find `bytes` of one allocation, or null.
char* to_host_view(const void* p, size_t bytes) {
  const Allocation* a = find(p);
  if (!a) return nullptr;
  const size_t at = static_cast<const char*>(p) - arena.device;
  return at >= a->offset && at + bytes <= a->offset + a->bytes ? arena.host + at : nullptr;
}

int size_class(size_t bytes) {
  int found = 0;
  while (HostArena::kLeast << found < bytes) ++found;
  return found;
}

}  // namespace

void* allocate_device(size_t bytes) {
  if (!arena.device) create_device_arena();
  const size_t aligned = std::max(round_up(bytes, kAlignment), kAlignment);
  const size_t pages = round_up(aligned, kPage) / kPage, first = arena.pages;
  arena.pages += pages + 1;
  if (arena.pages * kPage > kReserved) fail("device memory is full");
  const Allocation a{first, pages, (first + pages) * kPage - aligned, bytes, true};
  arena.allocations.push_back(a);
  std::fill_n(arena.owner + first, pages, static_cast<uint32_t>(arena.allocations.size()));
  std::fill(arena.host + a.begin(), arena.host + a.end(), '\xff');
  poison(arena.device + a.begin(), a.end() - a.begin());
  unpoison(arena.device + a.offset, bytes);
  ++arena.live;
  return arena.device + a.offset;
}

bool is_intact(const void* memory) {
  const Allocation* a = find(memory);
  if (!a) fail("this is not device memory");
  const auto is_nan = [](char byte) { return byte == '\xff'; };
  return std::all_of(arena.host + a->begin(), arena.host + a->offset, is_nan) &&
         std::all_of(arena.host + a->offset + a->bytes, arena.host + a->end(), is_nan);
}

// Addresses are used again when nothing is left, so that a pointer kept for too long is noticed before.
void release_device(void* memory) {
  if (!is_intact(memory)) fail("a kernel has written next to device memory");
  Allocation* a = find(memory);
  a->live = false;
  std::fill_n(arena.owner + a->first, a->pages, 0u);
  unpoison(arena.device + a->begin(), a->end() - a->begin());
  if (--arena.live > 0) return;
  arena.allocations.clear();
  arena.pages = 0;
}

void copy_to_device(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  char* const view = to_host_view(to, bytes);
  if (!view || find(from)) fail("a copy is not from the host to one device allocation");
  std::memcpy(view, from, bytes);
}

void copy_from_device(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const char* const view = to_host_view(from, bytes);
  if (!view || find(to)) fail("a copy is not from one device allocation to the host");
  std::memcpy(to, view, bytes);
}

void* allocate_host(size_t bytes) {
  watch_faults();
  if (!host.memory) host.memory = map(kReserved, PROT_READ | PROT_WRITE, -1);
  const int index = size_class(bytes);
  const size_t size = HostArena::kLeast << index;
  auto& free = host.free[index];
  char* memory;
  if (free.empty()) {
    memory = host.memory + host.used;
    host.used += size;
    if (host.used > kReserved) fail("host memory is full");
  } else {
    memory = static_cast<char*>(free.back());
    free.pop_back();
  }
  poison(memory, size);
  unpoison(memory, bytes);
  return memory;
}

void release_host(void* memory, size_t bytes) {
  const int index = size_class(bytes);
  poison(memory, HostArena::kLeast << index);
  host.free[index].push_back(memory);
}

void open_device_memory() {
  if (!arena.device) return;
  is_open = true;
  for (const Allocation& a : arena.allocations)
    if (a.live) protect(arena.device + a.begin(), a.end() - a.begin(), PROT_READ | PROT_WRITE);
  protect(host.memory, round_up(host.used, kPage), PROT_NONE);
}

void close_device_memory() {
  if (!arena.device) return;
  is_open = false;
  for (const Allocation& a : arena.allocations)
    if (a.live) protect(arena.device + a.begin(), a.end() - a.begin(), PROT_NONE);
  protect(host.memory, round_up(host.used, kPage), PROT_READ | PROT_WRITE);
}

void check_global(const void* p, size_t bytes) {
  if (arena.live == 0 || to_host_view(p, bytes)) return;
  if (find(p)) fail("a kernel accesses device memory beyond its allocation");
  explain(p);
}

bool is_device_memory(const void* p) { return is_within(arena.device, kReserved, p); }

namespace {

// Fills memory with NaN. Sanitizers see memset as an access of the thread that runs, but not these stores.
void fill_unseen(char* memory, size_t bytes) {
  size_t i = 0;
  if (reinterpret_cast<uintptr_t>(memory) % 4 == 0)
    for (; i + 4 <= bytes; i += 4) *reinterpret_cast<volatile uint32_t*>(memory + i) = ~0u;
  for (; i < bytes; ++i) *static_cast<volatile char*>(memory + i) = '\xff';
}

}  // namespace

char* SharedRegion::place(size_t bytes, size_t alignment) {
  constexpr size_t kRegion = 256 << 10;
  if (alignment > 16) fail("shared memory is aligned to 16 bytes");
  if (bytes > kRegion - 32) fail("no GPU has so much shared memory");
  if (!region_) {
    watch_faults();
    region_ = map(kRegion + kPage, PROT_READ | PROT_WRITE, -1);
    protect(region_ + kRegion, kPage, PROT_NONE);
  }
  const size_t apart = alignment % 16;
  memory_ = region_ + (kRegion - bytes - apart) / 16 * 16 + apart;
  bytes_ = bytes;
  poison(region_, kRegion);
  unpoison(memory_, bytes);
  fill_unseen(memory_, bytes);
  return memory_;
}

}  // namespace emulator
