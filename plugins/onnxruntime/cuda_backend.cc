// CUDA devices: the operators' parameters as plugins/cuda/kernels.h has them, work on the run's stream, and memory
// from the runtime. The operators of an encoder have no kernels there and run by their bodies.

#include "backend.h"
#include "cuda/kernels.h"

#ifndef AFT_EXECUTION_PROVIDER  // the tests run the kernels on an emulated device, which is the CPU
#define AFT_EXECUTION_PROVIDER "CUDAExecutionProvider"
#endif

namespace ops {

const Backend kBackend = {AFT_EXECUTION_PROVIDER,
                          {aft::Element::kFloat32, aft::Element::kFloat16, aft::Element::kBfloat16},
                          {}};

namespace {

// Both declare the same settings in the same order.
static_assert(static_cast<int>(aft::Element::kBfloat16) == AFT_CUDA_BFLOAT16, "aft::Element");
static_assert(static_cast<int>(aft::Gate::kNone) == AFT_CUDA_NO_GATE, "aft::Gate");
static_assert(static_cast<int>(aft::Normalization::kScaling) == AFT_CUDA_SCALING, "aft::Normalization");
static_assert(static_cast<int>(aft::FeatureMap::kRelu) == AFT_CUDA_RELU, "aft::FeatureMap");

AftCudaGate gate(aft::Gate gate) { return static_cast<AftCudaGate>(gate); }

// Keys have as many channels as queries, or one for each of `key_channels` heads.
AftCudaSequence sequence(const aft::Sequence& s, int64_t key_channels) {
  const auto packed = [&](const void* data, int64_t channels) {
    return AftCudaTensor{data, s.tokens * channels, channels};
  };
  return {static_cast<AftCudaElement>(s.element),
          s.causal,
          s.batch,
          s.tokens,
          s.channels,
          packed(s.query, s.channels),
          packed(s.key, key_channels),
          packed(s.value, s.channels),
          s.lengths,
          s.output};
}
AftCudaSequence sequence(const aft::Sequence& s) { return sequence(s, s.channels); }

// What `precision` asks for, or the next that holds as large a range where tensors of this element cannot have it.
AftCudaExpPrecision exp_precision(const aft::AftFull& p) {
  if (p.element == aft::Element::kFloat32 || p.precision == aft::Precision::kFloat32) return AFT_CUDA_EXP_FLOAT32;
  const bool half = p.element == aft::Element::kFloat16 && p.precision == aft::Precision::kFloat16;
  return half ? AFT_CUDA_EXP_FLOAT16 : AFT_CUDA_EXP_BFLOAT16;
}

template <class Call>
void enqueue(const Call& call, size_t (*workspace_size)(const Call*), int (*kernel)(const Call*, void*, cudaStream_t),
             const ort::Run& run) {
  const std::shared_ptr<void> workspace = run.workspace(workspace_size(&call));
  if (const int error = kernel(&call, workspace.get(), static_cast<cudaStream_t>(run.stream())))
    throw std::runtime_error("CUDA refuses the kernel with error " + std::to_string(error));
}

}  // namespace

void run_kernel(const aft::AftSimple& p, const ort::Run& run) {
  enqueue<AftCudaAftSimple>({sequence(p), gate(p.gate)}, aft_cuda_aft_simple_workspace, aft_cuda_aft_simple, run);
}

void run_kernel(const aft::AftFull& p, const ort::Run& run) {
  enqueue<AftCudaAftFull>({sequence(p), gate(p.gate), p.position_bias, p.position_bias_width, exp_precision(p)},
                          aft_cuda_aft_full_workspace, aft_cuda_aft_full, run);
}

void run_kernel(const aft::AftLocal& p, const ort::Run& run) {
  enqueue<AftCudaAftLocal>({sequence(p), gate(p.gate), p.band, p.band_rows, p.window}, aft_cuda_aft_local_workspace,
                           aft_cuda_aft_local, run);
}

void run_kernel(const aft::AftConv& p, const ort::Run& run) {
  enqueue<AftCudaAftConv>({sequence(p, p.heads), gate(p.gate), p.filter, p.heads, p.taps},
                          aft_cuda_aft_conv_workspace, aft_cuda_aft_conv, run);
}

void run_kernel(const aft::EfficientAttention& p, const ort::Run& run) {
  enqueue<AftCudaEfficientAttention>(
      {sequence(p), static_cast<AftCudaNormalization>(p.normalization), p.heads, p.scale},
      aft_cuda_efficient_attention_workspace, aft_cuda_efficient_attention, run);
}

void run_kernel(const aft::LinearAttention& p, const ort::Run& run) {
  enqueue<AftCudaLinearAttention>({sequence(p), static_cast<AftCudaFeatureMap>(p.feature_map), p.heads, p.eps},
                                  aft_cuda_linear_attention_workspace, aft_cuda_linear_attention, run);
}

void run_kernel(const aft::Fastformer& p, const ort::Run& run) {
  enqueue<AftCudaFastformer>({sequence(p), p.alpha_weight, p.beta_weight, p.heads}, aft_cuda_fastformer_workspace,
                             aft_cuda_fastformer, run);
}

}  // namespace ops
