// Misuses of a GPU, each of which the emulated one must end with a message. The argument names one, none lists them.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "device.h"
#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"

namespace {

using namespace aft::cuda;

struct Shared {
  alignas(16) float numbers[64];
};

__global__ void read_kernel(float* to, const float* from) { *to = *from; }
__global__ void load_kernel(float* to, const float* from) { *to = machine::load<float>(from); }
__global__ void store_kernel(float* to) { machine::store(to, 1.0f); }
__global__ void write_kernel(float* to) { *to = 1.0f; }

__global__ void copy_kernel(const float* from) {
  auto& shared = shared_memory<Shared>();
  if (threadIdx.x == 0) async_copy(shared.numbers, from);
  async_wait<0>();
}
__global__ void unfinished_copy_kernel(const float* from) { async_copy(shared_memory<Shared>().numbers, from); }
__global__ void load_matrices_kernel(const float* from) {
  uint32_t words[4];
  load_matrices(words, from);
}
__global__ void leave_shared_kernel() { machine::store(&shared_memory<Shared>().numbers[64], 1.0f); }
__global__ void divided_kernel() {
  if (threadIdx.x < 16) __syncthreads();
}

constexpr int kCount = 64;  // floats, so that an allocation ends where its last 256 bytes do

// One allocation of the device, one of the host, and one of the device that is no more.
struct Memories {
  float* device = static_cast<float*>(device::allocate(kCount * sizeof(float)));
  std::vector<float, device::HostAllocator<float>> host = decltype(host)(kCount);
  float* odd = static_cast<float*>(device::allocate((kCount - 1) * sizeof(float)));
  float* released = static_cast<float*>(device::allocate(kCount * sizeof(float)));

  Memories() { device::release(released); }
};

template <class... P, class... A>
void start(void (*kernel)(P...), A... arguments) {
  launch<Shared>(kernel, 1, 32, nullptr, arguments...);
}

struct Misuse {
  void (*commit)(Memories&);
  const char* message;
};

const char kHost[] = "a kernel accesses host memory", kFromHost[] = "the host accesses device memory",
           kOutside[] = "a kernel accesses device memory outside of every allocation",
           kBeyond[] = "a kernel accesses device memory beyond its allocation",
           kElsewhere[] = "a kernel accesses memory outside of its shared and the device's memory";

const std::map<std::string, Misuse> kMisuses{
    {"read_host", {[](Memories& m) { start(read_kernel, m.device, m.host.data()); }, kHost}},
    {"load_host", {[](Memories& m) { start(load_kernel, m.device, m.host.data()); }, kHost}},
    {"load_stack",
     {[](Memories& m) {
        const float local = 1.0f;
        start(load_kernel, m.device, &local);
      },
      kElsewhere}},
    {"write_host", {[](Memories& m) { start(write_kernel, m.host.data()); }, kHost}},
    {"copy_host", {[](Memories& m) { start(copy_kernel, m.host.data()); }, kHost}},
    {"host_reads", {[](Memories& m) { std::printf("%g\n", static_cast<double>(*m.device)); }, kFromHost}},
    {"host_writes", {[](Memories& m) { *m.device = 1.0f; }, kFromHost}},
    {"read_beyond", {[](Memories& m) { start(read_kernel, m.device, m.device + kCount); }, kOutside}},
    {"load_beyond", {[](Memories& m) { start(load_kernel, m.device, m.odd + kCount - 1); }, kBeyond}},
    {"store_beyond", {[](Memories& m) { start(store_kernel, m.odd + kCount - 1); }, kBeyond}},
    {"copy_beyond", {[](Memories& m) { start(copy_kernel, m.odd + kCount - 4); }, kBeyond}},
    {"write_beyond",
     {[](Memories& m) {
        start(write_kernel, m.odd + kCount - 1);
        device::release(m.odd);
      },
      "a kernel has written next to device memory"}},
    {"read_released", {[](Memories& m) { start(read_kernel, m.device, m.released); }, kOutside}},
    {"load_released", {[](Memories& m) { start(load_kernel, m.device, m.released); }, kOutside}},
    {"release_twice", {[](Memories& m) { device::release(m.released); }, "this is not device memory"}},
    {"leave_shared", {[](Memories&) { start(leave_shared_kernel); }, kElsewhere}},
    {"load_matrices_of_global",
     {[](Memories& m) { start(load_matrices_kernel, m.device); }, "a kernel reads matrices from other than its shared memory"}},
    {"misaligned",
     {[](Memories& m) { start(copy_kernel, m.device + 1); }, "an address is not aligned to what is moved"}},
    {"unfinished_copy",
     {[](Memories& m) { start(unfinished_copy_kernel, m.device); },
      "a thread ends with asynchronous copies under way"}},
    {"divided_barrier",
     {[](Memories&) { start(divided_kernel); },
      "threads wait at a barrier that the others of the block do not reach"}},
    {"copy_to_host",
     {[](Memories& m) { device::write(m.host.data(), m.host.data(), 4); },
      "a copy is not from the host to one device allocation"}},
    {"copy_too_much",
     {[](Memories& m) { device::read(m.host.data(), m.odd, kCount * sizeof(float)); },
      "a copy is not from one device allocation to the host"}},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    for (const auto& [name, misuse] : kMisuses) std::printf("%s\t%s\n", name.c_str(), misuse.message);
    return EXIT_SUCCESS;
  }
  Memories memories;
  kMisuses.at(argv[1]).commit(memories);
  return EXIT_SUCCESS;
}
