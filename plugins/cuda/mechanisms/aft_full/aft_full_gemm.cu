// AFT-full around a matrix product that the caller computes: products = exp(w - r) entries.
//
// Computes: prepare: entries = (exp(K - m) V, exp(K - m))
//           finish:  Y = gate(Q) * the ratio of the two halves of the products
// Cost:     bound by memory. Floor of prepare: 4BTD elements, keys and values read, entries written; here 5, as keys
//           are read for m before. Of finish: 4BTD, products and query read, output written. At 8 x 4096 x 1024 in 16
//           bits that is 0.6 GB, some 150 us at 4 TB/s, beside a product of 0.55 TFLOP, which must win that back.
// Method:   for long T (AFT_CUDA_AFT_FULL_GEMM_TOKENS in kernels.h), where a runtime's own matrix product is nearer to
//           the device's peak than the fused kernel, which takes exponentials in its inner loop. Each thread takes a
//           vector of 16 bytes of channels, several of them at once in prepare. Not causal: half of that product would
//           be wasted, and m could not follow the rows.
// See:      aft_full.cu, aft_full_cell.cuh, aft_full_maxima.cuh

#include "mechanisms/aft_full/aft_full_cell.cuh"
#include "mechanisms/aft_full/aft_full_maxima.cuh"

namespace aft::cuda {
namespace {

constexpr int kThreads = 256;

struct Params {
  Strided<AftFull> call;
  Maxima maxima;
  void* entries;
  const void* products;
};

// Channels that are taken together where everything is aligned.
template <class T, class P>
constexpr int kTogether = kVector<T> < kVector<P> ? kVector<T> : kVector<P>;

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 4) maxima_kernel(const Params p) {
  find_key_maxima<T, N, kThreads>(p.call.sequence, p.maxima, blockIdx.x);
}

struct PrepareShared {
  float maxima[kThreads][8];
};

// A block makes the entries of kTileRows keys and kTileChannels channels.
template <class T, class P, int N>
__global__ void __launch_bounds__(kThreads, 3) prepare_kernel(const Params p) {
  constexpr int columns = kTileChannels / N, rows = kThreads / columns;
  auto& shared = shared_memory<PrepareShared>();
  float* maxima = &shared.maxima[0][0];  // [rows][kTileChannels]
  const StridedSequence& s = p.call.sequence;
  const int groups = static_cast<int>(ceil_div<int64_t>(s.channels, kTileChannels));
  const int64_t block = blockIdx.x / groups % p.maxima.blocks, b = blockIdx.x / groups / p.maxima.blocks;
  const int64_t length = length_of(s, b);
  const int column = threadIdx.x % columns * N, first_row = threadIdx.x / columns;
  const int64_t channel = blockIdx.x % groups * kTileChannels + column;
  const bool active = channel < s.channels;

  float maximum[N];
  p.maxima.load_keys(maximum, s, b, active ? p.maxima.blocks : 0, channel, first_row, rows);
#pragma unroll
  for (int c = 0; c < N; ++c) maxima[first_row * kTileChannels + column + c] = maximum[c];
  __syncthreads();
  if (!active) return;
  for (int r = 0; r < rows; ++r)
#pragma unroll
    for (int c = 0; c < N; ++c) maximum[c] = fmaxf(maximum[c], maxima[r * kTileChannels + column + c]);
  float reference[N];
#pragma unroll
  for (int c = 0; c < N; ++c) reference[c] = raised(kNoKey, maximum[c]);

  const int64_t end = (block + 1) * kTileRows < s.tokens ? (block + 1) * kTileRows : s.tokens;
#pragma unroll 4
  for (int64_t u = block * kTileRows + first_row; u < end; u += rows) {
    float numerator[N] = {}, denominator[N] = {};
    if (u < length) {
      const Raw<T, N> key(row<T>(s.key, b, u) + channel), value(row<T>(s.value, b, u) + channel);
#pragma unroll
      for (int c = 0; c < N; ++c) {
        denominator[c] = weight_of(key[c], reference[c]);
        numerator[c] = denominator[c] * value[c];
      }
    }
    P* entries = static_cast<P*>(p.entries) + (b * s.tokens + u) * 2 * s.channels + channel;
    store(entries, numerator);
    store(entries + s.channels, denominator);
  }
}

template <class T, class P, int N, Gate gate>
__global__ void __launch_bounds__(kThreads, 3) finish_kernel(const Params p) {
  constexpr float largest = 3.402823466e38f;  // numbers that overflowed P became infinite and are not trusted
  constexpr float least_per_key = sizeof(P) == 2 && kLift<P> > 0.0f ? kTrustedPerKeyUnlifted : kTrustedPerKey<P>;
  const StridedSequence& s = p.call.sequence;
  const int64_t vectors = s.channels / N, index = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (index >= s.batch * s.tokens * vectors) return;
  const int64_t channel = index % vectors * N, t = index / vectors % s.tokens, b = index / vectors / s.tokens;
  const int64_t length = length_of(s, b), visible = t < length ? length : 0;
  const P* products = static_cast<const P*>(p.products) + (b * s.tokens + t) * 2 * s.channels + channel;
  const Raw<P, N> numerator(products), denominator(products + s.channels);
  float mean[N];
#pragma unroll
  for (int c = 0; c < N; ++c) {
    const bool finite = fabsf(numerator[c]) <= largest && denominator[c] <= largest;
    mean[c] =
        finite ? trusted_mean(numerator[c], denominator[c], least_per_key * static_cast<float>(visible)) : untrusted();
  }
  complete_means<T>(mean, p.call, b, t, channel, visible);
  write_gated<gate, T>(mean, s, b, t, channel);
}

// Calls f with the element, the type multiplied in and the channels taken together, unless the call is refused.
template <class F>
int with_call(const Strided<AftFull>& call, const F& f) {
  const StridedSequence& s = call.sequence;
  if (s.causal) return 1;  // cudaErrorInvalidValue
  if (s.batch * s.tokens * s.channels == 0) return 0;
  return with_product(call, [&](auto element, auto product) {
    using T = decltype(element);
    return s.channels % kVector<T> == 0 && all_aligned<T>(s)
               ? f(element, product, std::integral_constant<int, kTogether<T, decltype(product)>>{})
               : f(element, product, std::integral_constant<int, 1>{});
  });
}

}  // namespace
}  // namespace aft::cuda

size_t aft_cuda_aft_full_prepare_workspace(const aft::AftFull* params) { return aft::cuda::Maxima::bytes(*params); }

int aft_cuda_aft_full_prepare(const aft::AftFull* params, void* entries, void* workspace, cudaStream_t stream) {
  using namespace aft::cuda;
  const auto call = strided(*params);
  const StridedSequence& s = call.sequence;
  return with_call(call, [&](auto element, auto product, auto n) {
    using T = decltype(element);
    using P = decltype(product);
    constexpr int N = decltype(n)::value;
    const Params p{call, Maxima(call, workspace), entries, nullptr};
    const int64_t groups = ceil_div<int64_t>(s.channels, kTileChannels);
    const dim3 grid(static_cast<unsigned>(s.batch * p.maxima.blocks * groups));
    if (const int status = launch<KeyMaximaShared<kThreads>>(maxima_kernel<T, N>, grid, kThreads, stream, p))
      return status;
    return launch<PrepareShared>(prepare_kernel<T, P, N>, grid, kThreads, stream, p);
  });
}

int aft_cuda_aft_full_finish(const aft::AftFull* params, const void* products, cudaStream_t stream) {
  using namespace aft::cuda;
  const auto call = strided(*params);
  const StridedSequence& s = call.sequence;
  return with_call(call, [&](auto element, auto product, auto n) {
    return with_gate(call.gate, [&](auto gate) {
      using T = decltype(element);
      using P = decltype(product);
      constexpr int N = decltype(n)::value;
      const Params p{call, Maxima(call, nullptr), nullptr, products};
      const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(s.batch * s.tokens * s.channels / N, kThreads)));
      return launch(finish_kernel<T, P, N, decltype(gate)::value>, grid, kThreads, stream, p);
    });
  });
}
