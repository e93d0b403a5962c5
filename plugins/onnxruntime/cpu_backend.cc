// The CPU: its kernels take what the operators have as it is.

#include <iterator>

#include "backend.h"
#include "cpu/methods/choice.h"

namespace ops {

const Backend kBackend = {"CPUExecutionProvider",
                          {aft::Element::kFloat32, aft::Element::kFloat16},
                          [] {
                            std::vector<Operator> all(std::begin(kEncoderOperators), std::end(kEncoderOperators));
                            all.insert(all.end(), std::begin(kRecurrentOperators), std::end(kRecurrentOperators));
                            return all;
                          }()};

void choose_kernels() {
  aft::instruction_set();
  aft::check_method_variable();
}

aft::MethodOrder choose_weight_methods(aft::Precision precision) { return aft::choose_weight_methods(precision); }

std::shared_ptr<const aft::PackedWeight> pack_position_bias(const aft::AftFull& params) {
  return aft::pack_position_bias(params);
}

void run_kernel(const aft::AftSimple& params, const ort::Run& run) { aft::aft_simple(params, run.parallel()); }
void run_kernel(const aft::AftFull& params, const ort::Run& run) { aft::aft_full(params, run.parallel()); }
void run_kernel(const aft::AftLocal& params, const ort::Run& run) { aft::aft_local(params, run.parallel()); }
void run_kernel(const aft::AftConv& params, const ort::Run& run) { aft::aft_conv(params, run.parallel()); }
void run_kernel(const aft::EfficientAttention& params, const ort::Run& run) {
  aft::efficient_attention(params, run.parallel());
}
void run_kernel(const aft::LinearAttention& params, const ort::Run& run) {
  aft::linear_attention(params, run.parallel());
}
void run_kernel(const aft::Fastformer& params, const ort::Run& run) { aft::fastformer(params, run.parallel()); }

}  // namespace ops
