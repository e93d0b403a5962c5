// Threads as fibers, several blocks of them at a time.
// Compiled without the sanitizers' instrumentation: nothing the emulator does for itself is an access of a kernel's.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "emulator.h"
#include "fiber.h"
#include "memory.h"
#include "sanitizer.h"
#include "threads.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

constexpr unsigned kMostThreads = 1024, kWarp = 32;
constexpr unsigned kBlocksAtOnce = 3, kOneSwitchIn = 16;

struct Block;

struct Thread {
  Thread(Block& block, unsigned index);

  Block& block;
  unsigned index;
  Fiber fiber;
  AsyncCopies copies;
};

// Threads that wait for `size` of them to come. `order` makes what came before the barrier visible behind it,
// in turns, so that who is already on the way to the next barrier orders nothing at this one.
template <unsigned most>
struct Barrier {
  unsigned size = 0, turn = 0, waiting = 0;
  Thread* threads[most];
  char order[2];
};

struct Warp {
  Barrier<kWarp> barrier;
  Combine* combine;
  void* lanes[kWarp];
  AccessLog* log = create_access_log();
};

// A place for blocks, which takes one after the other.
struct Block {
  dim3 index;
  std::unique_ptr<Thread> threads[kMostThreads];
  Thread* ready[kMostThreads];
  unsigned ready_count = 0, alive = 0;
  Barrier<kMostThreads> barrier;
  Warp warps[kMostThreads / kWarp];
  SharedRegion static_shared, dynamic_shared;
  char order;  // of the blocks in this place
};

Fiber* scheduler;
Block blocks[kBlocksAtOnce];
Thread* running;
unsigned order_seed = 2, random_state;
const Launch* launched;
char launch_begins, launch_ends;

unsigned random(unsigned below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % below;
}

void meet_others() { lane_meets_others(*log_of_running_warp()); }

void run_thread(void* self) {
  const auto* thread = static_cast<Thread*>(self);
  Block& block = thread->block;
  acquire(&launch_begins);
  acquire(&block.order);
  launched->call(launched->arguments);
  if (!thread->copies.pending.empty()) fail("a thread ends with asynchronous copies under way");
  meet_others();
  release(&block.order);
  release(&launch_ends);
  --block.alive;
  running->fiber.switch_to(*scheduler);
}

Thread::Thread(Block& block, unsigned index) : block(block), index(index), fiber(run_thread, this) {}

// Threads go on in random order, or always the one with the highest index or the lowest: then `ready` is a heap.
bool goes_later(const Thread* a, const Thread* b) {
  return order_seed == 1 ? a->index < b->index : a->index > b->index;
}

void make_ready(Thread* thread) {
  Block& block = thread->block;
  block.ready[block.ready_count++] = thread;
  if (order_seed < 2) std::push_heap(block.ready, block.ready + block.ready_count, goes_later);
}

Thread* next_thread(Block& block) {
  if (order_seed < 2)
    std::pop_heap(block.ready, block.ready + block.ready_count, goes_later);
  else
    std::swap(block.ready[random(block.ready_count)], block.ready[block.ready_count - 1]);
  return block.ready[--block.ready_count];
}

template <unsigned most>
void wait(Barrier<most>& barrier, bool orders_memory) {
  char& order = barrier.order[barrier.turn % 2];
  meet_others();
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

void start(Block& block, size_t index) {
  const dim3& grid = launched->grid;
  block.index = dim3(static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
                     static_cast<unsigned>(index / grid.x / grid.y));
  block.alive = block.barrier.size = launched->block.x;
  for (unsigned i = 0; i < block.alive; ++i) {
    if (!block.threads[i]) block.threads[i] = std::make_unique<Thread>(block, i);
    block.threads[i]->fiber.start();
    make_ready(block.threads[i].get());
    block.warps[i / kWarp].barrier.size = kWarp;
  }
  block.static_shared.clear();
  block.dynamic_shared.clear();
  if (launched->dynamic_shared > 0) block.dynamic_shared.place(launched->dynamic_shared, 16);
}

// Runs threads of the block, until it has ended or it is the turn of another.
void run_some(Block& block, bool alone) {
  const unsigned turn = block.barrier.turn;
  do {
    running = block.ready_count > 0 ? next_thread(block) : nullptr;
    if (!running) fail("threads wait at a barrier that the others of the block do not reach");
    threadIdx.x = running->index;
    blockIdx = block.index;
    scheduler->switch_to(running->fiber);
  } while (block.alive > 0 && (alone || (block.barrier.turn == turn && random(kOneSwitchIn) > 0)));
}

// The order of blocks, which is that of threads.
class BlockOrder {
 public:
  explicit BlockOrder(const dim3& grid)
      : count_(static_cast<size_t>(grid.x) * grid.y * grid.z), order_(std::make_unique<size_t[]>(count_)) {
    for (size_t i = 0; i < count_; ++i) {
      order_[i] = order_seed == 1 ? count_ - 1 - i : i;
      if (order_seed > 1) std::swap(order_[i], order_[random(static_cast<unsigned>(i) + 1)]);
    }
  }
  bool is_empty() const { return next_ == count_; }
  size_t take() { return order_[next_++]; }

 private:
  size_t count_, next_ = 0;
  std::unique_ptr<size_t[]> order_;
};

void run_blocks() {
  BlockOrder order(launched->grid);
  Block* in_flight[kBlocksAtOnce];
  unsigned count = 0;
  const unsigned at_once = order_seed < 2 ? 1 : kBlocksAtOnce;
  for (; count < at_once && !order.is_empty(); ++count) start(*(in_flight[count] = &blocks[count]), order.take());
  while (count > 0) {
    const unsigned chosen = count == 1 ? 0 : random(count);
    Block& block = *in_flight[chosen];
    run_some(block, count == 1);
    if (block.alive > 0) continue;
    if (order.is_empty())
      in_flight[chosen] = in_flight[--count];
    else
      start(block, order.take());
  }
}

void no_exchange(void* const (&)[32]) {}

}  // namespace

void seed(unsigned order) { order_seed = order; }

void fail(const char* what) {
  if (running)
    std::printf("FAILED: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  else
    std::printf("FAILED: %s\n", what);
  std::fflush(stdout);
  std::abort();
}

AsyncCopies& async_copies() { return running->copies; }

void* static_shared_memory(size_t bytes, size_t alignment) {
  SharedRegion& shared = running->block.static_shared;
  if (!shared.memory()) return shared.place(bytes, alignment);
  if (bytes != shared.bytes()) fail("a kernel names two structs of shared memory");
  return shared.memory();
}

void* dynamic_shared_memory(size_t bytes) {
  const SharedRegion& shared = running->block.dynamic_shared;
  if (bytes > shared.bytes()) fail("a kernel uses more shared memory than it was launched with");
  return shared.memory();
}

bool is_shared(const void* p, size_t bytes) {
  const Block& block = running->block;
  return block.static_shared.contains(p, bytes) || block.dynamic_shared.contains(p, bytes);
}

AccessLog* log_of_running_warp() { return running ? running->block.warps[running->index / kWarp].log : nullptr; }

static void check_aligned(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) fail("an address is not aligned to what is moved");
}

void check_access(const void* p, size_t bytes) {
  check_aligned(p, bytes);
  if (!is_shared(p, bytes)) check_global(p, bytes);
  record_access(__builtin_return_address(0), p, bytes);
}

void check_matrix_row(const void* row) {
  check_aligned(row, 16);
  if (!is_shared(row, 16)) fail("a kernel reads matrices from other than its shared memory");
  record_access(__builtin_return_address(0), row, 16);
}

void check_copy(const void* shared, const void* global, size_t bytes) {
  check_aligned(shared, 16);
  check_aligned(global, 16);
  if (!is_shared(shared, 16)) fail("a kernel copies to other than its shared memory");
  if (bytes == 0) return;
  check_global(global, bytes);
  const auto* place = static_cast<const char*>(__builtin_return_address(0));
  record_access(place, shared, 16);
  record_access(place + 1, global, bytes);
}

void run(const Launch& launch) {
  if (launch.block.x % kWarp != 0) fail("blocks of other than whole warps are not emulated");
  Fiber main;
  scheduler = &main;
  launched = &launch;
  random_state = order_seed * 2654435761u | 1;
  gridDim = launch.grid;
  blockDim = launch.block;
  open_device_memory();
  release(&launch_begins);
  begin_counting(launch.kernel);
  run_blocks();
  acquire(&launch_ends);
  running = nullptr;
  close_device_memory();
  end_counting();
}

void warp_collective(Combine* combine, void* lane) {
  Warp& warp = running->block.warps[running->index / kWarp];
  if (warp.barrier.waiting > 0 && warp.combine != combine) fail("lanes of a warp are at different instructions");
  warp.combine = combine;
  warp.lanes[running->index % kWarp] = lane;
  if (warp.barrier.waiting == kWarp - 1) combine(warp.lanes);
  wait(warp.barrier, combine == no_exchange);
}

}  // namespace emulator

void __syncthreads() { emulator::wait(emulator::running->block.barrier, true); }

void __syncwarp(unsigned mask) {
  emulator::check_mask(mask);
  emulator::warp_collective(emulator::no_exchange, nullptr);
}
