// Prints the shared memory of the kernels that ask for it at their launch: function, width of a head, bytes.
#include <cstdio>

#include "mechanisms/shared/head_launch.cuh"

template <int kWidth>
void print_sizes() {
  using namespace aft::cuda;
  std::printf("sum_kernel %d %zu\n", kWidth, sizeof(TensorSumShared<kWidth>));
  std::printf("apply_kernel %d %zu\n", kWidth, sizeof(TensorApplyShared<kWidth>));
  std::printf("causal_kernel %d %zu\n", kWidth, sizeof(TensorCausalShared<kWidth>));
  std::printf("tf32_sum_kernel %d %zu\n", kWidth, sizeof(SumShared<kWidth>));
  std::printf("tf32_apply_kernel %d %zu\n", kWidth, sizeof(ApplyShared<kWidth>));
  std::printf("tf32_causal_kernel %d %zu\n", kWidth, sizeof(CausalShared<kWidth>));
}

int main() {
  print_sizes<32>();
  print_sizes<64>();
  print_sizes<128>();
  print_sizes<256>();
}
