#include "operators/cuda_calls.h"

namespace ops {

namespace {

// Both declare the same settings in the same order.
static_assert(static_cast<int>(aft::Element::kBfloat16) == AFT_CUDA_BFLOAT16, "aft::Element");
static_assert(static_cast<int>(aft::Gate::kNone) == AFT_CUDA_NO_GATE, "aft::Gate");
static_assert(static_cast<int>(aft::Normalization::kScaling) == AFT_CUDA_SCALING, "aft::Normalization");
static_assert(static_cast<int>(aft::FeatureMap::kRelu) == AFT_CUDA_RELU, "aft::FeatureMap");
static_assert(kMaxCudaHeadChannels == AFT_CUDA_MOST_HEAD_CHANNELS, "kMaxCudaHeadChannels");

AftCudaSequence sequence(const aft::Sequence& s) { return to_cuda(s, s.channels); }
AftCudaGate gate(aft::Gate gate) { return static_cast<AftCudaGate>(gate); }

// The precision of AFT-full's factors around a product of tensors of this element.
AftCudaExpPrecision product_precision(aft::Element element) {
  if (element == aft::Element::kFloat32) return AFT_CUDA_EXP_FLOAT32;
  return element == aft::Element::kFloat16 ? AFT_CUDA_EXP_FLOAT16 : AFT_CUDA_EXP_BFLOAT16;
}

// The precision that the node asks for, or the next that holds as large a range where tensors of this element cannot
// have it. Its default, float32, is right for every position_bias.
AftCudaExpPrecision exp_precision(const aft::AftFull& p) {
  if (p.element == aft::Element::kFloat32 || p.precision == aft::Precision::kFloat32) return AFT_CUDA_EXP_FLOAT32;
  const bool half = p.element == aft::Element::kFloat16 && p.precision == aft::Precision::kFloat16;
  return half ? AFT_CUDA_EXP_FLOAT16 : AFT_CUDA_EXP_BFLOAT16;
}

// A kernel's parameters, its workspace and its call, for each type of parameters.
AftCudaAftSimple convert(const aft::AftSimple& p) { return {sequence(p), gate(p.gate)}; }
AftCudaAftFull convert(const aft::AftFull& p) {
  return {sequence(p), gate(p.gate), p.position_bias, p.position_bias_width, exp_precision(p)};
}
AftCudaAftFull convert(const AftFullPrepare& p) {
  return {sequence(p), AFT_CUDA_NO_GATE, nullptr, 0, product_precision(p.element)};
}
AftCudaAftFull convert(const AftFullFinish& p) {
  return {sequence(p), gate(p.gate), p.position_bias, p.position_bias_width, product_precision(p.element)};
}
AftCudaAftLocal convert(const aft::AftLocal& p) { return {sequence(p), gate(p.gate), p.band, p.band_rows, p.window}; }
AftCudaAftConv convert(const aft::AftConv& p) { return {to_cuda(p, p.heads), gate(p.gate), p.filter, p.heads, p.taps}; }
AftCudaEfficientAttention convert(const aft::EfficientAttention& p) {
  return {sequence(p), static_cast<AftCudaNormalization>(p.normalization), p.heads, p.scale};
}
AftCudaLinearAttention convert(const aft::LinearAttention& p) {
  return {sequence(p), static_cast<AftCudaFeatureMap>(p.feature_map), p.heads, p.eps};
}
AftCudaFastformer convert(const aft::Fastformer& p) { return {sequence(p), p.alpha_weight, p.beta_weight, p.heads}; }

#define AFT_CUDA_KERNEL(Type, name)                                                                     \
  size_t workspace_of(const Type&, const decltype(convert(Type{}))& p) { return name##_workspace(&p); } \
  int run(const Type&, const decltype(convert(Type{}))& p, void* workspace, cudaStream_t stream) {      \
    return name(&p, workspace, stream);                                                                 \
  }
AFT_CUDA_KERNEL(aft::AftSimple, aft_cuda_aft_simple)
AFT_CUDA_KERNEL(aft::AftFull, aft_cuda_aft_full)
AFT_CUDA_KERNEL(aft::AftLocal, aft_cuda_aft_local)
AFT_CUDA_KERNEL(aft::AftConv, aft_cuda_aft_conv)
AFT_CUDA_KERNEL(aft::EfficientAttention, aft_cuda_efficient_attention)
AFT_CUDA_KERNEL(aft::LinearAttention, aft_cuda_linear_attention)
AFT_CUDA_KERNEL(aft::Fastformer, aft_cuda_fastformer)
#undef AFT_CUDA_KERNEL

size_t workspace_of(const AftFullPrepare&, const AftCudaAftFull& p) { return aft_cuda_aft_full_prepare_workspace(&p); }
int run(const AftFullPrepare& of, const AftCudaAftFull& p, void* workspace, cudaStream_t stream) {
  return aft_cuda_aft_full_prepare(&p, of.output, workspace, stream);
}
size_t workspace_of(const AftFullFinish&, const AftCudaAftFull&) { return 0; }
int run(const AftFullFinish& of, const AftCudaAftFull& p, void*, cudaStream_t stream) {
  return aft_cuda_aft_full_finish(&p, of.products, stream);
}

}  // namespace

AftCudaSequence to_cuda(const aft::Sequence& s, int64_t key_channels) {
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

size_t workspace_size(const Params& params) {
  return std::visit([](const auto& p) { return workspace_of(p, convert(p)); }, params);
}

int enqueue(const Params& params, void* workspace, cudaStream_t stream) {
  return std::visit([&](const auto& p) { return run(p, convert(p), workspace, stream); }, params);
}

}  // namespace ops
