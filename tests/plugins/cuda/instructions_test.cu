// The instructions that kernels use, on the emulated GPU or a real one, against what they are said to do.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "array.h"
#include "device/async_copy.cuh"
#include "device/block_product.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "float16.h"

namespace {

using namespace aft::cuda;

// Small integers, exact in every element type.
float a_element(int row, int k) { return static_cast<float>((3 * row + 5 * k) % 13 - 6); }
float b_element(int k, int column) { return static_cast<float>((7 * k + 2 * column) % 11 - 5); }

struct Operands {
  alignas(16) uint16_t a[16][16];  // row major
  alignas(16) uint16_t b[16][8];   // row major: read transposed
};

// One warp, by the documented use of ldmatrix: lane l passes row l % 16 and column 8 * (l / 16).
template <class T>
__global__ void product_kernel(float* c, const uint16_t* a, const uint16_t* b) {
  auto& shared = shared_memory<Operands>();
  const int lane = threadIdx.x;
  async_copy(&shared.a[lane / 2][lane % 2 * 8], a + lane * 8);
  if (lane < 16) async_copy(shared.b[lane], b + lane * 8);
  async_commit();
  async_wait<0>();
  __syncwarp();
  uint32_t a_words[4], b_words[4];
  load_matrices(a_words, &shared.a[lane % 16][lane / 16 * 8]);
  load_matrices_transposed(b_words, shared.b[lane % 16]);
  float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  multiply_add<T>(sums, a_words, {b_words[0], b_words[1]});
  for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

__global__ void product_tf32_kernel(float* c, const float* a, const float* b) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const uint32_t a_words[4] = {to_tf32(a[g * 8 + t]), to_tf32(a[(g + 8) * 8 + t]), to_tf32(a[g * 8 + t + 4]),
                               to_tf32(a[(g + 8) * 8 + t + 4])};
  const uint32_t b_words[2] = {to_tf32(b[t * 8 + g]), to_tf32(b[(t + 4) * 8 + g])};
  float sums[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  multiply_add_tf32(sums, a_words, b_words);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = sums[i];
}

// Lower bits are cut off, and with them those that make this a NaN.
__global__ void cut_off_nan_kernel(float* c) {
  const uint32_t nan = threadIdx.x == 0 ? 0x7f800001u : 0u, a[4] = {nan, 0u, 0u, 0u};
  const uint32_t one = __float_as_uint(1.0f), b[2] = {one, one};
  float sums[4] = {};
  multiply_add_tf32(sums, a, b);
  if (threadIdx.x == 0) c[0] = sums[0];
}

constexpr int kPowers = 4096;
__device__ __forceinline__ float exponent(int i) { return static_cast<float>(i - kPowers / 2) * 0.0625f; }
__global__ void approximate_kernel(float* powers, float* quotients) {
  for (int i = threadIdx.x; i < kPowers; i += 32) {
    powers[i] = machine::fast_exp2(exponent(i));
    quotients[i] = machine::fast_divide(exponent(i), static_cast<float>(i + 3));
  }
}

void expect_product(const float* c, int depth, const char* what) {
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float sum = 1.0f;
      for (int k = 0; k < depth; ++k) sum += a_element(row, k) * b_element(k, column);
      expect(c[row * 8 + column] == sum, what);
    }
}

void products() {
  Array<uint16_t, 16 * 16> a;
  Array<uint16_t, 16 * 8> b;
  Array<float, 16 * 8> a_single, c;
  Array<float, 8 * 8> b_single;
  for (bool half : {true, false}) {
    const auto encoded = [&](float x) { return half ? emulator::float_to_half(x) : emulator::float_to_bfloat(x); };
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) a.host[row * 16 + k] = encoded(a_element(row, k));
      for (int column = 0; column < 8; ++column) b.host[row * 8 + column] = encoded(b_element(row, column));
    }
    a.write();
    b.write();
    launch<Operands>(half ? product_kernel<Half> : product_kernel<BFloat16>, 1, 32, nullptr, c.device, a.device,
                     b.device);
    c.read();
    expect_product(c.host, 16, half ? "float16 product" : "bfloat16 product");
  }
  for (int i = 0; i < 16 * 8; ++i) a_single.host[i] = a_element(i / 8, i % 8);
  for (int i = 0; i < 8 * 8; ++i) b_single.host[i] = b_element(i / 8, i % 8);
  a_single.write();
  b_single.write();
  launch(product_tf32_kernel, 1, 32, nullptr, c.device, a_single.device, b_single.device);
  c.read();
  expect_product(c.host, 8, "tf32 product");
}

// No number of tf32 each, and all above 0, so that what is lost adds up.
__host__ __device__ float left_of_long_sum(int row, int k) { return 1.0f + static_cast<float>(row + k % 89) / 97.0f; }
__host__ __device__ float right_of_long_sum(int k, int column) { return 1.0f / static_cast<float>(column + 3 + k % 7); }

constexpr int kLongDepth = 16384;
__global__ void long_sum_kernel(float* sums) {
  Product<16, 8> product;
  product.clear();
  product.add<true, true>(kLongDepth, left_of_long_sum, right_of_long_sum);
  product.for_each([&](int row, int column, float sum) { sums[row * 8 + column] = sum; });
}

void long_sums() {
  Array<float, 16 * 8> sums;
  launch(long_sum_kernel, 1, kBlockThreads, nullptr, sums.device);
  sums.read();
  double error = 0.0;
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      double sum = 0.0;
      for (int k = 0; k < kLongDepth; ++k)
        sum += static_cast<double>(left_of_long_sum(row, k)) * right_of_long_sum(k, column);
      error = std::max(error, std::fabs(sums.host[row * 8 + column] / sum - 1.0));
    }
  std::printf("a sum of %d products is off by %.1e\n", kLongDepth, error);
  expect(error < 1e-5, "a long sum of float32 products");
}

// On the emulated GPU a copy shows as NaN until its group is waited for; bytes beyond those asked for become 0.
__global__ void copy_kernel(float* seen, const float* source) {
  struct Two {
    alignas(16) float first[4], second[4];
  };
  auto& shared = shared_memory<Two>();
  if (threadIdx.x == 0) {
    async_copy(shared.first, source);
    async_commit();
    async_copy(shared.second, source, 8);
    async_commit();
    seen[0] = shared.first[0];
    async_wait<1>();
    seen[1] = shared.first[3];
    seen[2] = shared.second[0];
    async_wait<0>();
    seen[3] = shared.second[1];
    seen[4] = shared.second[2];
  }
}

__global__ void shuffle_kernel(int* seen) {
  const int lane = threadIdx.x;
  seen[lane] = __shfl_xor_sync(~0u, lane, 5) == (lane ^ 5) && __shfl_sync(~0u, lane, 3) == 3 &&
               __shfl_up_sync(~0u, lane, 2) == (lane < 2 ? lane : lane - 2) &&
               __shfl_down_sync(~0u, lane, 2) == (lane > 29 ? lane : lane + 2);
}

double units_off(float x, double exact) {
  return std::fabs(x - exact) / std::ldexp(1.0, std::ilogb(exact) - 23);
}

void approximations() {
  Array<float, kPowers> powers, quotients;
  launch(approximate_kernel, 1, 32, nullptr, powers.device, quotients.device);
  powers.read();
  quotients.read();
  double most = 0.0;
  for (int i = 0; i < kPowers; ++i) {
    const double x = static_cast<double>(i - kPowers / 2) * 0.0625, power = std::exp2(x);
    if (x < -126.0 || x >= 128.0) {
      expect(powers.host[i] == (x < 0.0 ? 0.0f : INFINITY), "powers out of range");
      continue;
    }
    most = std::max(most, units_off(powers.host[i], power));
    if (x != 0.0) most = std::max(most, units_off(quotients.host[i], x / (i + 3)));
  }
  expect(most <= 2.0 && (!device::kEmulated || most >= 1.0), "approximations are off by 1 to 2 units");
  expect(powers.host[kPowers / 2] == 1.0f, "2^0");

  Array<float, 1> c;
  launch(cut_off_nan_kernel, 1, 32, nullptr, c.device);
  c.read();
  expect(std::isinf(c.host[0]), "a NaN of lower bits through tf32");
}

void conversions() {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float x = emulator::half_to_float(half);
    expect(std::isnan(x) || emulator::float_to_half(x) == half, "float16 there and back");
  }
  expect(emulator::half_to_float(0x3c00) == 1.0f && emulator::half_to_float(0x7bff) == 65504.0f, "float16 values");
  expect(emulator::half_to_float(0x0001) == std::ldexp(1.0f, -24), "float16 subnormal");
  expect(emulator::float_to_half(1.0f + 1.0f / 2048) == 0x3c00, "float16 tie to even");
  expect(emulator::float_to_half(1.0f + 3.0f / 2048) == 0x3c02, "float16 tie to even, upwards");
  expect(emulator::float_to_bfloat(1.0f + 1.0f / 256) == 0x3f80, "bfloat16 tie to even");
  expect(emulator::float_to_bfloat(1.0f + 3.0f / 256) == 0x3f82, "bfloat16 tie to even, upwards");
}

void copies() {
  Array<float, 4> source;
  for (int i = 0; i < 4; ++i) source.host[i] = static_cast<float>(i + 1);
  source.write();
  Array<float, 5> seen;
  struct Eight {
    alignas(16) float floats[8];
  };
  launch<Eight>(copy_kernel, 1, 32, nullptr, seen.device, source.device);
  seen.read();
  const float* copied = seen.host;
  if (device::kEmulated) expect(std::isnan(copied[0]) && std::isnan(copied[2]), "copies come when waited for");
  expect(copied[1] == 4.0f && copied[3] == 2.0f && copied[4] == 0.0f, "copies come, and fill with 0");
}

void shuffles() {
  Array<int, 32> lanes;
  launch(shuffle_kernel, 1, 32, nullptr, lanes.device);
  lanes.read();
  for (int right : lanes.host) expect(right == 1, "shuffles");
}

}  // namespace

int main() {
  conversions();
  copies();
  shuffles();
  for (bool finer : {true, false}) {
    device::use_finer_tensor_cores(finer);
    products();
    long_sums();
  }
  approximations();
  std::printf("%d failures\n", failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
