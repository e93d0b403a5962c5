// CUDA devices: the operators' parameters as plugins/cuda/kernels.h has them, work on the run's stream, and memory
// from the runtime. Of the operators of an encoder those that are not here have no kernels and run by their bodies.

#include <sstream>

#include "backend.h"
#include "checks.h"
#include "cuda/kernels.h"

#ifndef AFT_EXECUTION_PROVIDER  // the tests run the kernels on an emulated device, which is the CPU
#define AFT_EXECUTION_PROVIDER "CUDAExecutionProvider"
#endif

namespace ops {

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

void expect_head_channels(int64_t channels, int64_t heads) {
  if (channels / heads > AFT_CUDA_MOST_HEAD_CHANNELS)
    throw ort::Error("query has heads of " + std::to_string(channels / heads) + " channels, more than the " +
                     std::to_string(AFT_CUDA_MOST_HEAD_CHANNELS) +
                     " of the CUDA kernel; AFTEXPORT_PORTABLE=1 runs the operator by its body");
}

// `form` names the attribute or the input, its value and the expected one. Callers build it only for the refusal.
[[noreturn]] void refuse_form(const std::string& form) {
  throw ort::Error(form + ", as the CUDA kernel takes no other; AFTEXPORT_PORTABLE=1 runs the operator by its body");
}

void expect_gate(aft::Gate gate) {
  if (gate == aft::Gate::kRelu) refuse_form("gate is \"relu\", expected sigmoid, tanh or none");
}

template <class AttentionFree>
void expect_gate_and_eps(const AttentionFree& p) {
  expect_gate(p.gate);
  if (p.eps != 0.0f) {
    std::ostringstream eps;
    eps << p.eps;
    refuse_form("eps is " + eps.str() + ", expected 0");
  }
}

void expect_own_keys(const aft::GroupedHeads& p) {
  const int64_t width = p.channels / p.heads;
  if (p.kv_heads != p.heads)
    refuse_form("kv_num_heads is " + std::to_string(p.kv_heads) + ", expected num_heads " + std::to_string(p.heads));
  if (p.value_width != width)
    refuse_form("value has heads of " + std::to_string(p.value_width) + " channels, expected " + std::to_string(width));
  if (p.key_lengths) refuse_form("key_lengths is given, expected none");
}

void expect_success(int error) {
  if (error)
    throw std::runtime_error(std::string("CUDA refuses the kernel: ") + aft_cuda_error_text(error) + " (error " +
                             std::to_string(error) + ")");
}

cudaStream_t stream(const ort::Run& run) { return static_cast<cudaStream_t>(run.stream()); }

template <class Call>
void enqueue(const Call& call, size_t (*workspace_size)(const Call*), int (*kernel)(const Call*, void*, cudaStream_t),
             const ort::Run& run) {
  const std::shared_ptr<void> workspace = run.workspace(workspace_size(&call));
  expect_success(kernel(&call, workspace.get(), stream(run)));
}

// The precision of AFT-full's factors around a product of tensors of this element.
AftCudaExpPrecision product_precision(aft::Element element) {
  if (element == aft::Element::kFloat32) return AFT_CUDA_EXP_FLOAT32;
  return element == aft::Element::kFloat16 ? AFT_CUDA_EXP_FLOAT16 : AFT_CUDA_EXP_BFLOAT16;
}

// Fills the sizes of `s` from `shape`, [batch, tokens, channels], and the lengths from the input `lengths`.
void set_shape(aft::Sequence& s, const Tensor& lengths, const Shape& shape) {
  s.batch = shape[0];
  s.tokens = shape[1];
  s.channels = shape[2];
  expect_shape("lengths", lengths, {s.batch});
  s.lengths = static_cast<const int64_t*>(lengths.data);
}

// Before the product of AFT-full: key, value, lengths -> entries [batch, tokens, 2 channels].
class AftFullPrepare final : public Kernel {
 public:
  AftFullPrepare(const Settings& settings, const ort::Attributes&) : element_(settings.element) {}

  void compute(const ort::Run& run) const override {
    const ort::Tensor key = run.input(0), value = run.input(1);
    expect_three_dimensions("key", key);
    expect_shape("value", value, key.shape);
    aft::Sequence s{};
    s.element = element_;
    set_shape(s, run.input(2), key.shape);
    s.key = key.data;
    s.value = value.data;
    void* entries = run.output(0, {s.batch, s.tokens, 2 * s.channels});
    const AftCudaAftFull call{sequence(s), AFT_CUDA_NO_GATE, nullptr, 0, product_precision(element_)};
    const std::shared_ptr<void> workspace = run.workspace(aft_cuda_aft_full_prepare_workspace(&call));
    expect_success(aft_cuda_aft_full_prepare(&call, entries, workspace.get(), stream(run)));
  }

 private:
  aft::Element element_;
};

// After it: query, key, value, position_bias, products, lengths -> output.
class AftFullFinish final : public Kernel {
 public:
  AftFullFinish(const Settings& settings, const ort::Attributes& attributes)
      : element_(settings.element), gate_(read_gate(attributes)) {
    expect_gate(gate_);
  }

  void compute(const ort::Run& run) const override {
    const ort::Tensor query = run.input(0), key = run.input(1), value = run.input(2), bias = run.input(3),
                      products = run.input(4);
    expect_three_dimensions("query", query);
    expect_shape("key", key, query.shape);
    expect_shape("value", value, query.shape);
    aft::Sequence s{};
    s.element = element_;
    set_shape(s, run.input(5), query.shape);
    expect_position_bias(bias, query.shape);
    expect_shape("products", products, {s.batch, s.tokens, 2 * s.channels});
    s.query = query.data;
    s.key = key.data;
    s.value = value.data;
    s.output = run.output(0, query.shape);
    const AftCudaAftFull call{sequence(s), gate(gate_), bias.data, bias.shape[1], product_precision(element_)};
    expect_success(aft_cuda_aft_full_finish(&call, products.data, stream(run)));
  }

 private:
  aft::Element element_;
  aft::Gate gate_;
};

// All inputs but lengths are tensors of one element on the device. `precision` is of the products on a CPU; here they
// are as exact as the tensors are.
class LayerNormFastformer final : public Kernel {
 public:
  LayerNormFastformer(const Settings& settings, const ort::Attributes& attributes)
      : element_(settings.element),
        heads_(read_count(attributes, "num_heads")),
        epsilon_(attributes.number("epsilon", 1e-5f)) {}

  void compute(const ort::Run& run) const override {
    const ort::Tensor x = run.input(0);
    expect_three_dimensions("x", x);
    expect_heads_divide(heads_, "x", x.shape);
    const int64_t width = x.shape[2];
    const auto input = [&](const char* name, size_t index, const ort::Shape& shape) {
      const ort::Tensor tensor = run.input(index);
      expect_shape(name, tensor, shape);
      return tensor.data;
    };
    const ort::Shape vector{width}, matrix{width, width}, logits{width, heads_};
    aft::Sequence s{};
    s.element = element_;
    s.batch = x.shape[0];
    s.tokens = x.shape[1];
    s.channels = width;
    s.query = x.data;
    s.lengths = static_cast<const int64_t*>(input("lengths", 11, {s.batch}));
    s.output = run.output(0, x.shape);
    const AftCudaLayerNormFastformer call{sequence(s),
                                          input("norm_weight", 1, vector),
                                          input("norm_bias", 2, vector),
                                          epsilon_,
                                          input("query_weight", 3, matrix),
                                          input("query_bias", 4, vector),
                                          input("key_weight", 5, matrix),
                                          input("key_bias", 6, vector),
                                          input("alpha_weight", 7, logits),
                                          input("beta_weight", 8, logits),
                                          input("weight", 9, matrix),
                                          input("bias", 10, vector),
                                          heads_};
    enqueue(call, aft_cuda_layer_norm_fastformer_workspace, aft_cuda_layer_norm_fastformer, run);
  }

 private:
  aft::Element element_;
  int64_t heads_;
  float epsilon_;
};

}  // namespace

const Backend kBackend = {AFT_EXECUTION_PROVIDER,
                          {aft::Element::kFloat32, aft::Element::kFloat16, aft::Element::kBfloat16},
                          {{"LayerNormFastformer", 12, create<LayerNormFastformer>},
                           {"AftFullPrepare", 3, create<AftFullPrepare>, true, -1},
                           {"AftFullFinish", 6, create<AftFullFinish>}}};

void choose_kernels() {}

aft::MethodOrder choose_weight_methods(aft::Precision) { return {}; }

std::shared_ptr<const aft::PackedWeight> pack_position_bias(const aft::AftFull&) { return nullptr; }

void run_kernel(const aft::AftSimple& p, const ort::Run& run) {
  expect_gate_and_eps(p);
  if (p.key_channels != 0) refuse_form("num_heads is " + std::to_string(p.key_channels) + ", expected 0");
  enqueue<AftCudaAftSimple>({sequence(p), gate(p.gate)}, aft_cuda_aft_simple_workspace, aft_cuda_aft_simple, run);
}

void run_kernel(const aft::AftFull& p, const ort::Run& run) {
  expect_gate_and_eps(p);
  enqueue<AftCudaAftFull>({sequence(p), gate(p.gate), p.position_bias, p.position_bias_width, exp_precision(p)},
                          aft_cuda_aft_full_workspace, aft_cuda_aft_full, run);
}

void run_kernel(const aft::AftLocal& p, const ort::Run& run) {
  expect_gate_and_eps(p);
  enqueue<AftCudaAftLocal>({sequence(p), gate(p.gate), p.band, p.band_rows, p.window}, aft_cuda_aft_local_workspace,
                           aft_cuda_aft_local, run);
}

void run_kernel(const aft::AftConv& p, const ort::Run& run) {
  expect_gate_and_eps(p);
  enqueue<AftCudaAftConv>({sequence(p, p.heads), gate(p.gate), p.filter, p.heads, p.taps},
                          aft_cuda_aft_conv_workspace, aft_cuda_aft_conv, run);
}

void run_kernel(const aft::EfficientAttention& p, const ort::Run& run) {
  expect_own_keys(p);
  expect_head_channels(p.channels, p.heads);
  enqueue<AftCudaEfficientAttention>(
      {sequence(p), static_cast<AftCudaNormalization>(p.normalization), p.heads, p.scale},
      aft_cuda_efficient_attention_workspace, aft_cuda_efficient_attention, run);
}

void run_kernel(const aft::LinearAttention& p, const ort::Run& run) {
  expect_own_keys(p);
  if (p.feature_map == aft::FeatureMap::kIdentity) refuse_form("feature_map is \"identity\", expected elu or relu");
  if (p.normalizer != aft::Normalizer::kAdd) {
    const std::string normalizer = p.normalizer == aft::Normalizer::kClamp ? "clamp" : "none";
    refuse_form("normalizer is \"" + normalizer + "\", expected add");
  }
  expect_head_channels(p.channels, p.heads);
  enqueue<AftCudaLinearAttention>({sequence(p), static_cast<AftCudaFeatureMap>(p.feature_map), p.heads, p.eps},
                                  aft_cuda_linear_attention_workspace, aft_cuda_linear_attention, run);
}

void run_kernel(const aft::Fastformer& p, const ort::Run& run) {
  enqueue<AftCudaFastformer>({sequence(p), p.alpha_weight, p.beta_weight, p.heads}, aft_cuda_fastformer_workspace,
                             aft_cuda_fastformer, run);
}

}  // namespace ops
