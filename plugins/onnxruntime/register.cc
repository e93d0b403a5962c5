// RegisterCustomOps: adds the operators of domain ai.aftexport to a session. Each is registered for every element that
// the backend has, mechanisms both plain and causal; the runtime picks by name and type.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend.h"
#include "runtime.h"

namespace {

using ort::Api;

constexpr char kDomain[] = "ai.aftexport";

// OrtCustomOp comes first: the runtime hands a pointer to it back, which is a pointer to all of this.
struct Registration : ort::CustomOp {
  const ops::Operator* op;
  ops::Settings settings;
  const Api* api;
};

const Registration& self(const ort::CustomOp* op) { return *static_cast<const Registration*>(op); }

struct Node {
  const Registration* registration;
  std::unique_ptr<ops::Kernel> kernel;
};

ort::ElementType tensor_type(const ort::CustomOp* op) {
  switch (self(op).settings.element) {
    case aft::Element::kFloat16: return ort::ElementType::kFloat16;
    case aft::Element::kBfloat16: return ort::ElementType::kBfloat16;
    default: return ort::ElementType::kFloat;
  }
}

ort::Status* create_kernel(const ort::CustomOp* op, const Api* api, const ort::KernelInfo* info, void** kernel) {
  const Registration& registration = self(op);
  return ort::guarded(*api, registration.settings.name, [&] {
    auto node = std::make_unique<Node>();
    node->registration = &registration;
    node->kernel.reset(registration.op->create(registration.settings, ort::Attributes(*api, info)));
    *kernel = node.release();
  });
}

ort::Status* compute(void* kernel, ort::KernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  const Api& api = *node.registration->api;
  return ort::guarded(api, node.registration->settings.name, [&] { node.kernel->compute(ort::Run(api, context)); });
}

// Whether the runtime knows a shape: one that it does not is that of a scalar, which no input here is,
// and a size that it does not is negative and has no name.
bool is_known(const Api& api, const ort::TensorShape* shape) {
  size_t rank = 0;
  ort::check(api, api.GetDimensionsCount(shape, &rank));
  std::vector<int64_t> sizes(rank);
  std::vector<const char*> names(rank, "");
  ort::check(api, api.GetDimensions(shape, sizes.data(), rank));
  ort::check(api, api.GetSymbolicDimensions(shape, names.data(), rank));
  for (size_t axis = 0; axis < rank; ++axis)
    if (sizes[axis] < 0 && *names[axis] == '\0') return false;
  return rank > 0;
}

// The size and the name of a shape's last axis.
std::pair<int64_t, std::string> width_of(const Api& api, const ort::ShapeInferContext* context, size_t input) {
  ort::TensorShape* shape = nullptr;  // stays the context's
  ort::check(api, api.ShapeInferContext_GetInputTypeShape(context, input, &shape));
  size_t rank = 0;
  ort::check(api, api.GetDimensionsCount(shape, &rank));
  if (rank == 0) return {-1, ""};
  std::vector<int64_t> sizes(rank);
  std::vector<const char*> names(rank, "");
  ort::check(api, api.GetDimensions(shape, sizes.data(), rank));
  ort::check(api, api.GetSymbolicDimensions(shape, names.data(), rank));
  return {sizes.back(), names.back()};
}

// The required outputs have the shape of the operator's input output_like.
ort::Status* infer_shape(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  const Api& api = *self(op).api;
  return ort::guarded(api, self(op).settings.name, [&] {
    ort::TensorShape* shape = nullptr;  // stays the context's
    const size_t like = static_cast<size_t>(self(op).op->output_like);
    ort::check(api, api.ShapeInferContext_GetInputTypeShape(context, like, &shape));
    if (!is_known(api, shape)) return;
    if (self(op).op->key_lengths)
      for (size_t input : {1, 2})
        if (width_of(api, context, input) != width_of(api, context, 0)) return;
    for (size_t index = 0; index < self(op).op->outputs - self(op).op->optional_outputs; ++index)
      ort::check(api, api.ShapeInferContext_SetOutputTypeShape(context, index, shape));
  });
}

Registration describe(const ops::Operator& op, bool causal, aft::Element element, const Api* api) {
  Registration r{};
  r.op = &op;
  r.settings = {std::string(causal ? "Causal" : "") + op.name, element, causal, op.mechanism};
  r.api = api;
  r.version = ort::kApiVersion;
  r.GetName = [](const ort::CustomOp* op) { return self(op).settings.name.c_str(); };
  r.GetExecutionProviderType = [](const ort::CustomOp*) { return ops::kBackend.execution_provider; };
  r.GetInputTypeCount = [](const ort::CustomOp* op) {
    return self(op).op->inputs + (self(op).settings.causal ? 0 : self(op).op->key_lengths);
  };
  r.GetInputType = [](const ort::CustomOp* op, size_t index) {
    const ops::Operator& described = *self(op).op;
    const bool is_integer =
        (described.takes_lengths && index + 1 >= described.inputs) || (described.integer_inputs >> index & 1);
    return is_integer ? ort::ElementType::kInt64 : tensor_type(op);
  };
  r.GetOutputTypeCount = [](const ort::CustomOp* op) { return self(op).op->outputs; };
  r.GetOutputType = [](const ort::CustomOp* op, size_t index) {
    return self(op).op->float_outputs >> index & 1 ? ort::ElementType::kFloat : tensor_type(op);
  };
  r.GetInputCharacteristic = [](const ort::CustomOp* op, size_t index) {
    const ops::Operator& described = *self(op).op;
    const bool optional = index >= described.inputs || (described.optional_inputs >> index & 1);
    return optional ? ort::Arity::kOptional : ort::Arity::kRequired;
  };
  r.GetOutputCharacteristic = [](const ort::CustomOp* op, size_t index) {
    return index + self(op).op->optional_outputs >= self(op).op->outputs ? ort::Arity::kOptional
                                                                         : ort::Arity::kRequired;
  };
  r.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return ort::MemoryType::kDefault; };
  r.GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  r.GetVariadicInputHomogeneity = r.GetVariadicInputMinArity;
  r.GetVariadicOutputMinArity = r.GetVariadicInputMinArity;
  r.GetVariadicOutputHomogeneity = r.GetVariadicInputMinArity;
  r.GetStartVersion = r.GetVariadicInputMinArity;
  r.GetEndVersion = r.GetVariadicInputMinArity;
  r.CreateKernelV2 = create_kernel;
  r.KernelComputeV2 = compute;
  r.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  if (op.output_like >= 0) r.InferOutputShapeFn = infer_shape;
  return r;
}

// The runtime keeps pointers to the registrations and the domain for as long as any session lives, hence they and
// the operators are made once and never freed.
ort::CustomOpDomain* make_domain(const Api& api) {
  auto& registrations = *new std::vector<Registration>;
  auto& operators = *new std::vector<ops::Operator>(ops::operators_of(ops::mechanisms()));
  for (const ops::Operator& op : ops::other_operators()) operators.push_back(op);
  for (aft::Element element : ops::kBackend.elements) {
    for (const ops::Operator& op : operators)
      for (bool causal : {false, true})
        if (!causal || (op.mechanism && op.mechanism->has_causal_form))
          registrations.push_back(describe(op, causal, element, &api));
  }
  ort::CustomOpDomain* domain = nullptr;
  ort::check(api, api.CreateCustomOpDomain(kDomain, &domain));
  for (const Registration& registration : registrations)
    ort::check(api, api.CustomOpDomain_Add(domain, static_cast<const ort::CustomOp*>(&registration)));
  return domain;
}

// Whether this build of the runtime has the provider of the kernels.
bool has_provider(const Api& api) {
  char** names = nullptr;
  int count = 0;
  ort::check(api, api.GetAvailableProviders(&names, &count));
  const bool found = std::any_of(names, names + count, [](const char* name) {
    return std::strcmp(name, ops::kBackend.execution_provider) == 0;
  });
  ort::check(api, api.ReleaseAvailableProviders(names, count));
  return found;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  const Api* api = base->GetApi(ort::kApiVersion);
  if (!api) return nullptr;  // a runtime older than the interface: there is no way to report it
  return ort::guarded(*api, kDomain, [&] {
    // An operator with a schema but without a kernel does not run by its body: the runtime refuses the model.
    if (!has_provider(*api)) return;
    ops::choose_kernels();
    static ort::CustomOpDomain* const domain = make_domain(*api);
    ort::check(*api, api->AddCustomOpDomain(options, domain));
  });
}
