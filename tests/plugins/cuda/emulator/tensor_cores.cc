// Products of matrices and the reads of their operands, by all lanes of a warp together.
// Compiled without the sanitizers' instrumentation, as threads.cc is.
#include <algorithm>
#include <cmath>

#include "emulator.h"

namespace emulator {

void shuffle(void* const (&lanes)[32]) {
  for (void* lane : lanes) {
    auto* to = static_cast<Shuffle*>(lane);
    to->result = static_cast<Shuffle*>(lanes[to->source])->value;
  }
}

namespace {

TensorCores tensor_cores = TensorCores::kSm80;

// sum + a . b, `together` products at a time with the sum before, all cut off at 2^-bits of the largest one, and their
// sum at a unit of its own last place.
template <int depth, int together, int bits, class A, class B>
float add_some(float sum, const A& a, const B& b) {
  for (int first = 0; first < depth; first += together) {
    double terms[together + 1] = {sum}, largest = 0.0, total = 0.0;
    for (int k = 0; k < together; ++k) terms[k + 1] = static_cast<double>(a(first + k)) * b(first + k);
    for (double term : terms) {
      largest = std::max(largest, std::fabs(term));
      total += term;
    }
    if (largest > 0.0 && std::isfinite(total)) {
      const int exponent = std::ilogb(largest) - bits;
      const double unit = std::ldexp(1.0, exponent), per_unit = std::ldexp(1.0, -exponent);
      total = 0.0;
      for (double term : terms) total += static_cast<int32_t>(term * per_unit) * unit;
    }
    sum = static_cast<float>(total);
    if (std::fabs(sum) > std::fabs(total)) sum = std::nextafter(sum, 0.0f);
  }
  return sum;
}

// sm_80 was found to add half of the products at a time, at half a unit of the last place (Fasi et al., "Numerical
// behavior of NVIDIA tensor cores", 2021). Later ones are finer: here they add all at once, at a quarter of a unit.
template <int depth, class A, class B>
float add_products(float sum, const A& a, const B& b) {
  return tensor_cores == TensorCores::kSm80 ? add_some<depth, depth / 2, 24>(sum, a, b)
                                            : add_some<depth, depth, 25>(sum, a, b);
}

}  // namespace

void choose_tensor_cores(TensorCores choice) { tensor_cores = choice; }

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
      c[i] = add_products<16>(
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
      c[i] = add_products<8>(
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
