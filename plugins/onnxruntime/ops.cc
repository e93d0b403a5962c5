// The mechanisms as kernels of the runtime, by the table of operators/operators.cc.

#include "ops.h"

#include <string_view>

#include "backend.h"

namespace ops {

namespace {

Values read_values(const Mechanism& mechanism, const Attributes& attributes) {
  Values values;
  for (const Attribute& attribute : mechanism.attributes) {
    if (attribute.integer && !attribute.words.empty()) {
      int32_t& index = values.*attribute.integer;
      index = attribute.index_of(attributes.text(attribute.name, attribute.words[0].c_str()), kBackend.device);
    } else if (attribute.integer) {
      const int64_t value = attributes.integer(attribute.name, values.*attribute.integer);
      attribute.check(value, kBackend.device);
      values.*attribute.integer = static_cast<int32_t>(value);
    } else {
      values.*attribute.number = attributes.number(attribute.name, values.*attribute.number);
    }
  }
  check_values(mechanism, values, kBackend.device);
  return values;
}

class MechanismKernel final : public Kernel {
 public:
  MechanismKernel(const Settings& settings, const Attributes& attributes)
      : mechanism_(*settings.mechanism),
        call_{settings.element,
              settings.causal,
              kBackend.device,
              read_values(mechanism_, attributes),
              {},
              std::nullopt,
              nullptr} {
    if (mechanism_.name != std::string_view("AftFull")) return;
    Tensor bias;
    kept_ = keep_for_aft_full(call_, attributes.constant(3, bias) ? &bias : nullptr);
  }

  void compute(const Run& run) const override {
    Call call = call_;
    const size_t count = mechanism_.inputs.size();
    for (size_t i = 0; i < count; ++i) call.inputs.push_back(run.input(i));
    if (mechanism_.takes_key_lengths && !call.causal) call.key_lengths = run.optional_input(count);
    check_shapes(mechanism_, call);
    const Shape output = output_shape(mechanism_, call);
    call.output = run.output(0, output);
    if (output[0] * output[1] * output[2] == 0) return;
    Params params = mechanism_.params(call);
    if (kept_) kept_->add_to(std::get<aft::AftFull>(params));
    run_kernel(params, run);
  }

 private:
  const Mechanism& mechanism_;
  const Call call_;  // without inputs
  std::unique_ptr<const KeptForAftFull> kept_;
};

}  // namespace

std::vector<Operator> operators_of(const std::vector<Mechanism>& mechanisms) {
  std::vector<Operator> all;
  for (const Mechanism& mechanism : mechanisms) {
    Operator op{mechanism.name, mechanism.inputs.size(), create<MechanismKernel>};
    if (mechanism.width == Mechanism::Width::kTwice) op.output_like = -1;
    op.key_lengths = mechanism.takes_key_lengths;
    op.mechanism = &mechanism;
    all.push_back(op);
  }
  return all;
}

}  // namespace ops
