// Compiled without the sanitizers' instrumentation: nothing the emulator does for itself is an access of a kernel's.
#include "emulator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "fiber.h"
#include "sanitizer.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

constexpr unsigned kMostThreads = 1024, kWarp = 32;

struct Thread {
  explicit Thread(unsigned index);

  unsigned index;
  Fiber fiber;
  AsyncCopies copies;
};

// Threads that wait for `size` of them to come. `order` makes what came before the barrier visible behind it,
// in turns, so that who is already on the way to the next barrier orders nothing at this one.
struct Barrier {
  unsigned size = 0, turn = 0, waiting = 0;
  Thread* threads[kMostThreads];
  char order[2];
};

struct Warp {
  Barrier barrier;
  Combine* combine;
  void* lanes[kWarp];
};

Fiber* scheduler;
std::unique_ptr<Thread> threads[kMostThreads];
Thread* running;
Thread* ready[kMostThreads];
unsigned ready_count, alive, order_seed = 2, random_state;
Barrier block_barrier;
Warp warps[kMostThreads / kWarp];
void (*kernel_entry)(void*);
void* kernel_arguments;
char *shared, block_order;
size_t shared_size, shared_alignment;

unsigned random(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % below;
}

void run_thread(void* self) {
  const auto* thread = static_cast<Thread*>(self);
  acquire(&block_order);
  kernel_entry(kernel_arguments);
  if (!thread->copies.pending.empty()) fail("a thread ends with asynchronous copies under way");
  release(&block_order);
  --alive;
  running->fiber.switch_to(*scheduler);
}

Thread::Thread(unsigned index) : index(index), fiber(run_thread, this) {}

// Threads go on in random order, or always the one with the highest index or the lowest: then `ready` is a heap.
bool goes_later(const Thread* a, const Thread* b) {
  return order_seed == 1 ? a->index < b->index : a->index > b->index;
}

void make_ready(Thread* thread) {
  ready[ready_count++] = thread;
  if (order_seed < 2) std::push_heap(ready, ready + ready_count, goes_later);
}

Thread* next_thread() {
  if (order_seed < 2)
    std::pop_heap(ready, ready + ready_count, goes_later);
  else
    std::swap(ready[random(ready_count)], ready[ready_count - 1]);
  return ready[--ready_count];
}

void wait(Barrier& barrier, bool orders_memory) {
  char& order = barrier.order[barrier.turn % 2];
  if (orders_memory) release(&order);
  barrier.threads[barrier.waiting++] = running;
  if (barrier.waiting == barrier.size) {
    for (unsigned i = 0; i < barrier.size; ++i) make_ready(barrier.threads[i]);
    barrier.waiting = 0;
    ++barrier.turn;
  }
  running->fiber.switch_to(*scheduler);
  if (orders_memory) acquire(&order);
}

void run_block(unsigned count) {
  alive = count;
  block_barrier.size = count;
  for (unsigned i = 0; i < count; ++i) {
    if (!threads[i]) threads[i] = std::make_unique<Thread>(i);
    threads[i]->fiber.start();
    make_ready(threads[i].get());
    warps[i / kWarp].barrier.size = kWarp;
  }
  while (ready_count > 0) {
    running = next_thread();
    threadIdx.x = running->index;
    scheduler->switch_to(running->fiber);
  }
  if (alive > 0) fail("threads wait at a barrier that the others of the block do not reach");
}

void no_exchange(void* const (&)[32]) {}

}  // namespace

void seed(unsigned order) { order_seed = order; }

void fail(const char* what) {
  std::printf("FAILED: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  std::fflush(stdout);
  std::abort();
}

AsyncCopies& async_copies() { return running->copies; }

void* shared_memory(size_t bytes, size_t alignment) {
  if (bytes > shared_size) fail("a kernel uses more shared memory than it was launched with");
  if (alignment > shared_alignment) fail("a kernel aligns its shared memory to more than it was launched with");
  return shared;
}

void run(dim3 grid, unsigned count, SharedMemory memory, void (*kernel)(void*), void* arguments) {
  if (memory.alignment > 16) fail("shared memory is aligned to 16 bytes");
  if (count == 0 || count % kWarp != 0 || count > kMostThreads) fail("blocks are of whole warps, 1024 threads at most");
  if (grid.y > 65535 || grid.z > 65535) fail("the grid is too large");
  Fiber main;
  scheduler = &main;
  kernel_entry = kernel;
  kernel_arguments = arguments;
  random_state = order_seed * 2654435761u | 1;
  gridDim = grid;
  blockDim = dim3(count);
  const size_t blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
  auto order = std::make_unique<size_t[]>(blocks);
  for (size_t i = 0; i < blocks; ++i) {
    order[i] = order_seed == 1 ? blocks - 1 - i : i;
    if (order_seed > 1) std::swap(order[i], order[random(static_cast<unsigned>(i) + 1)]);
  }
  for (size_t i = 0; i < blocks; ++i) {
    blockIdx = dim3(static_cast<unsigned>(order[i] % grid.x), static_cast<unsigned>(order[i] / grid.x % grid.y),
                    static_cast<unsigned>(order[i] / grid.x / grid.y));
    shared_size = memory.bytes;
    shared_alignment = memory.alignment;
    // Aligned as its type is, and no more.
    const size_t offset = memory.alignment % 16;
    char* const allocated = static_cast<char*>(std::malloc(offset + memory.bytes));
    shared = allocated + offset;
    std::fill_n(shared, memory.bytes, '\xff');
    release(&block_order);
    run_block(count);
    acquire(&block_order);
    std::free(allocated);
  }
}

void warp_collective(Combine* combine, void* lane) {
  Warp& warp = warps[running->index / kWarp];
  if (warp.barrier.waiting > 0 && warp.combine != combine) fail("lanes of a warp are at different instructions");
  warp.combine = combine;
  warp.lanes[running->index % kWarp] = lane;
  if (warp.barrier.waiting == kWarp - 1) combine(warp.lanes);
  wait(warp.barrier, combine == no_exchange);
}

void shuffle(void* const (&lanes)[32]) {
  for (void* lane : lanes) {
    auto* to = static_cast<Shuffle*>(lane);
    to->result = static_cast<Shuffle*>(lanes[to->source])->value;
  }
}

// sum + a . b, as sm_80 was found to add (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021; later ones
// are finer): `together` products with the sum before, all cut off at half a unit of the largest one's last place, and
// what they add up to at a unit of its own.
template <int depth, int together, class A, class B>
float add_products(float sum, const A& a, const B& b) {
  for (int first = 0; first < depth; first += together) {
    double terms[together + 1] = {sum}, largest = 0.0, total = 0.0;
    for (int k = 0; k < together; ++k) terms[k + 1] = static_cast<double>(a(first + k)) * b(first + k);
    for (double term : terms) {
      largest = std::max(largest, std::fabs(term));
      total += term;
    }
    if (largest > 0.0 && std::isfinite(total)) {
      const int exponent = std::ilogb(largest) - 24;
      const double unit = std::ldexp(1.0, exponent), per_unit = std::ldexp(1.0, -exponent);
      total = 0.0;
      for (double term : terms) total += static_cast<int32_t>(term * per_unit) * unit;
    }
    sum = static_cast<float>(total);
    if (std::fabs(sum) > std::fabs(total)) sum = std::nextafter(sum, 0.0f);
  }
  return sum;
}

// Where elements lie in the lanes' registers: PTX ISA, "Matrix fragments for mma.m16n8k16" and "m16n8k8".
template <class Decode>
void multiply_16bit(void* const (&lanes)[32], const Decode& decode) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* from = static_cast<Product*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int word = 0; word < 4; ++word)
      for (int half = 0; half < 2; ++half)
        a[g + word % 2 * 8][2 * t + half + word / 2 * 8] = decode(static_cast<uint16_t>(from->a[word] >> 16 * half));
    for (int word = 0; word < 2; ++word)
      for (int half = 0; half < 2; ++half)
        b[2 * t + half + word * 8][g] = decode(static_cast<uint16_t>(from->b[word] >> 16 * half));
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* c = static_cast<Product*>(lanes[lane])->c;
    for (int i = 0; i < 4; ++i)
      c[i] = add_products<16, 8>(
          c[i], [&](int k) { return a[lane / 4 + i / 2 * 8][k]; }, [&](int k) { return b[k][lane % 4 * 2 + i % 2]; });
  }
}

void multiply_half(void* const (&lanes)[32]) { multiply_16bit(lanes, half_to_float); }
void multiply_bfloat(void* const (&lanes)[32]) { multiply_16bit(lanes, bfloat_to_float); }

// The hardware looks at the upper 19 bits alone.
void multiply_tf32(void* const (&lanes)[32]) {
  float a[16][8], b[8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* from = static_cast<Product*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int word = 0; word < 4; ++word)
      a[g + word % 2 * 8][t + word / 2 * 4] = __uint_as_float(from->a[word] & ~0x1fffu);
    for (int word = 0; word < 2; ++word) b[t + word * 4][g] = __uint_as_float(from->b[word] & ~0x1fffu);
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* c = static_cast<Product*>(lanes[lane])->c;
    for (int i = 0; i < 4; ++i)
      c[i] = add_products<8, 4>(
          c[i], [&](int k) { return a[lane / 4 + i / 2 * 8][k]; }, [&](int k) { return b[k][lane % 4 * 2 + i % 2]; });
  }
}

static void distribute(void* const (&lanes)[32], bool transposed) {
  const auto element = [&](int matrix, int row, int column) -> uint32_t {
    if (transposed) std::swap(row, column);
    return static_cast<MatrixRow*>(lanes[8 * matrix + row])->elements[column];
  };
  for (int lane = 0; lane < 32; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix)
      static_cast<MatrixRow*>(lanes[lane])->result[matrix] =
          element(matrix, lane / 4, lane % 4 * 2) | element(matrix, lane / 4, lane % 4 * 2 + 1) << 16;
}
void distribute_rows(void* const (&lanes)[32]) { distribute(lanes, false); }
void distribute_rows_transposed(void* const (&lanes)[32]) { distribute(lanes, true); }

}  // namespace emulator

// As kernels.h declares it; the kernels themselves return 1 for a call that they refuse.
extern "C" const char* aft_cuda_error_text(int status) {
  return status == 0 ? "no error" : status == 1 ? "invalid argument" : "unrecognized error code";
}

void __syncthreads() { emulator::wait(emulator::block_barrier, true); }

void __syncwarp(unsigned mask) {
  emulator::check_mask(mask);
  emulator::warp_collective(emulator::no_exchange, nullptr);
}
