// CUDA devices: work on the run's stream, and memory from the runtime. Of the operators of an encoder those that are
// not here have no kernels and run by their bodies.

#include "backend.h"
#include "checks.h"
#include "operators/cuda_calls.h"

#ifndef AFT_EXECUTION_PROVIDER  // the tests run the kernels on an emulated device, which is the CPU
#define AFT_EXECUTION_PROVIDER "CUDAExecutionProvider"
#endif

namespace ops {

namespace {

void expect_success(int error) {
  if (error)
    throw std::runtime_error(std::string("CUDA refuses the kernel: ") + aft_cuda_error_text(error) + " (error " +
                             std::to_string(error) + ")");
}

cudaStream_t stream(const ort::Run& run) { return static_cast<cudaStream_t>(run.stream()); }

// All inputs but lengths are tensors of one element on the device. `precision` is of the products on a CPU; here they
// are as exact as the tensors are.
class LayerNormFastformer final : public Kernel {
 public:
  LayerNormFastformer(const Settings& settings, const ort::Attributes& attributes)
      : element_(settings.element),
        heads_(read_count(attributes, "num_heads")),
        epsilon_(attributes.number("epsilon", 1e-5f)) {}

  void compute(const ort::Run& run) const override {
    const Tensor x = run.input(0);
    expect_three_dimensions("x", x);
    expect_heads_divide(heads_, "x", x);
    const int64_t width = x.shape[2];
    const auto input = [&](const char* name, size_t index, const Shape& shape) {
      const Tensor tensor = run.input(index);
      expect_shape(name, tensor, shape);
      return tensor.data;
    };
    const Shape vector{width}, matrix{width, width}, logits{width, heads_};
    aft::cuda::LayerNormFastformer call{};
    call.element = element_;
    call.batch = x.shape[0];
    call.tokens = x.shape[1];
    call.channels = width;
    call.query = x.data;
    call.lengths = static_cast<const int64_t*>(input("lengths", 11, {call.batch}));
    call.norm_weight = input("norm_weight", 1, vector);
    call.norm_bias = input("norm_bias", 2, vector);
    call.epsilon = epsilon_;
    call.query_weight = input("query_weight", 3, matrix);
    call.query_bias = input("query_bias", 4, vector);
    call.key_weight = input("key_weight", 5, matrix);
    call.key_bias = input("key_bias", 6, vector);
    call.alpha_weight = input("alpha_weight", 7, logits);
    call.beta_weight = input("beta_weight", 8, logits);
    call.weight = input("weight", 9, matrix);
    call.bias = input("bias", 10, vector);
    call.output = run.output(0, x.shape);
    call.heads = heads_;
    const std::shared_ptr<void> workspace = run.workspace(aft_cuda_layer_norm_fastformer_workspace(&call));
    expect_success(aft_cuda_layer_norm_fastformer(&call, workspace.get(), stream(run)));
  }

 private:
  aft::Element element_;
  int64_t heads_;
  float epsilon_;
};

}  // namespace

const Backend kBackend = {
    AFT_EXECUTION_PROVIDER, Device::kCuda, {aft::Element::kFloat32, aft::Element::kFloat16, aft::Element::kBfloat16}};

std::vector<Operator> other_operators() {
  std::vector<Operator> all = operators_of(cuda_mechanisms());
  all.push_back({"LayerNormFastformer", 12, create<LayerNormFastformer>});
  return all;
}

void choose_kernels() {}

void KeptForAftFull::add_to(aft::AftFull&) const {}

std::unique_ptr<const KeptForAftFull> keep_for_aft_full(const Call&, const Tensor*) { return nullptr; }

void run_kernel(const Params& params, const ort::Run& run) {
  const std::shared_ptr<void> workspace = run.workspace(workspace_size(params));
  expect_success(enqueue(params, workspace.get(), stream(run)));
}

}  // namespace ops
