// Prints the shared memory of the kernels that ask for it at their launch: function, width of a head or rows of a
// tile, bytes.
#include <cstdio>

#include "encoder/layer_norm_softmax_pool.cuh"
#include "sums/head_causal.cuh"
#include "sums/head_passes.cuh"
#include "sums/head_tensor_causal.cuh"
#include "sums/head_tensor_passes.cuh"
#include "sums/pool_tile.cuh"

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

template <int kTokens>
void print_tile() {
  using namespace aft::cuda;
  constexpr size_t size = sizeof(PoolTileShared<float, kTokens>);
  static_assert(size == sizeof(PoolTileShared<Half, kTokens>), "");
  std::printf("tile_kernel %d %zu\n", kTokens, size);
  std::printf("tile_pool_kernel %d %zu\n", kTokens, sizeof(LayerTileShared<float, kTokens>));
}

int main() {
  print_sizes<32>();
  print_sizes<64>();
  print_sizes<128>();
  print_sizes<256>();
  print_tile<16>();
  print_tile<32>();
  print_tile<64>();
}
