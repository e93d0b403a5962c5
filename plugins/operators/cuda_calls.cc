#include "operators/cuda_calls.h"

namespace ops {

namespace {

static_assert(kMaxCudaHeadChannels == aft::cuda::kMaxHeadChannels, "kMaxCudaHeadChannels");

#define AFT_CUDA_KERNEL(Params, name)                                   \
  size_t workspace_of(const Params& p) { return name##_workspace(&p); } \
  int run(const Params& p, void* workspace, cudaStream_t stream) { return name(&p, workspace, stream); }
AFT_CUDA_KERNEL(aft::AftSimple, aft_cuda_aft_simple)
AFT_CUDA_KERNEL(aft::AftFull, aft_cuda_aft_full)
AFT_CUDA_KERNEL(aft::AftLocal, aft_cuda_aft_local)
AFT_CUDA_KERNEL(aft::AftConv, aft_cuda_aft_conv)
AFT_CUDA_KERNEL(aft::EfficientAttention, aft_cuda_efficient_attention)
AFT_CUDA_KERNEL(aft::LinearAttention, aft_cuda_linear_attention)
AFT_CUDA_KERNEL(aft::Fastformer, aft_cuda_fastformer)
#undef AFT_CUDA_KERNEL

// The factors of AFT-full around a product have the precision of the tensors.
aft::AftFull around_product(aft::AftFull p) {
  p.precision = p.element == aft::Element::kFloat32   ? aft::Precision::kFloat32
                : p.element == aft::Element::kFloat16 ? aft::Precision::kFloat16
                                                      : aft::Precision::kBfloat16;
  return p;
}

size_t workspace_of(const AftFullPrepare& p) { return aft_cuda_aft_full_prepare_workspace(&p); }
int run(const AftFullPrepare& p, void* workspace, cudaStream_t stream) {
  const aft::AftFull call = around_product(p);
  return aft_cuda_aft_full_prepare(&call, p.output, workspace, stream);
}
size_t workspace_of(const AftFullFinish&) { return 0; }
int run(const AftFullFinish& p, void*, cudaStream_t stream) {
  const aft::AftFull call = around_product(p);
  return aft_cuda_aft_full_finish(&call, p.products, stream);
}

}  // namespace

size_t workspace_size(const Params& params) {
  return std::visit([](const auto& p) { return workspace_of(p); }, params);
}

int enqueue(const Params& params, void* workspace, cudaStream_t stream) {
  return std::visit([&](const auto& p) { return run(p, workspace, stream); }, params);
}

}  // namespace ops
