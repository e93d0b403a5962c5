// The CPU: its kernels take the operators' parameters as they are.

#include <algorithm>
#include <iterator>

#include "backend.h"
#include "cpu/methods/choice.h"

namespace ops {

namespace {

void run_kernel(const aft::AftSimple& p, const aft::Parallel& threads) { aft::aft_simple(p, threads); }
void run_kernel(const aft::AftFull& p, const aft::Parallel& threads) { aft::aft_full(p, threads); }
void run_kernel(const aft::AftLocal& p, const aft::Parallel& threads) { aft::aft_local(p, threads); }
void run_kernel(const aft::AftConv& p, const aft::Parallel& threads) { aft::aft_conv(p, threads); }
void run_kernel(const aft::EfficientAttention& p, const aft::Parallel& threads) {
  aft::efficient_attention(p, threads);
}
void run_kernel(const aft::LinearAttention& p, const aft::Parallel& threads) { aft::linear_attention(p, threads); }
void run_kernel(const aft::Fastformer& p, const aft::Parallel& threads) { aft::fastformer(p, threads); }
template <class CudaOnly>
void run_kernel(const CudaOnly&, const aft::Parallel&) {
  throw std::logic_error("the operator has no kernel for the CPU");
}

}  // namespace

const Backend kBackend = {"CPUExecutionProvider", Device::kCpu, {aft::Element::kFloat32, aft::Element::kFloat16}};

std::vector<Operator> other_operators() {
  std::vector<Operator> all(std::begin(kEncoderOperators), std::end(kEncoderOperators));
  all.insert(all.end(), std::begin(kRecurrentOperators), std::end(kRecurrentOperators));
  all.push_back(kSoftmaxAttention);
  return all;
}

void choose_kernels() {
  aft::instruction_set();
  aft::check_method_variable();
}

void KeptForAftFull::add_to(aft::AftFull& params) const {
  params.methods = methods;
  params.constant_bias = has_constant_bias;
  params.packed_bias = packed_bias.get();
}

std::unique_ptr<const KeptForAftFull> keep_for_aft_full(const Call& call, const Tensor* bias) {
  auto kept = std::make_unique<KeptForAftFull>();
  const auto precision = static_cast<aft::Precision>(call.values.precision);
  kept->methods = aft::choose_weight_methods(precision);
  if (!bias) return kept;
  expect(bias->shape.size() == 2, "position_bias has shape " + to_string(bias->shape) + ", expected 2 dimensions");
  aft::AftFull constant{};
  constant.element = call.element;
  constant.causal = call.causal;
  constant.precision = precision;
  constant.methods = kept->methods;
  constant.tokens = std::min(bias->shape[0], bias->shape[1]);
  constant.position_bias = bias->data;
  constant.position_bias_width = bias->shape[1];
  kept->packed_bias = aft::pack_position_bias(constant);
  kept->has_constant_bias = true;
  return kept;
}

void run_kernel(const Params& params, const ort::Run& run) {
  std::visit([&](const auto& p) { run_kernel(p, run.parallel()); }, params);
}

}  // namespace ops
