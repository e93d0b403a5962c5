// The kernels that a library's operators run: those of one execution provider. cpu_backend.cc and cuda_backend.cc
// define all of this, and a library is built with one of them.
//
// One library for both providers would be worse: the runtime gives a node to whatever kernel there is for it, so a
// model on the GPU would leave it for every operator that only has a kernel for the CPU, instead of running its body.
#pragma once

#include <memory>
#include <vector>

#include "ops.h"

namespace ops {

struct Backend {
  const char* execution_provider;  // as the runtime calls it
  Device device;
  std::vector<aft::Element> elements;  // of tensors
};

extern const Backend kBackend;

// The operators besides mechanisms().
std::vector<Operator> other_operators();

// Throws where the kernels cannot be chosen; the library reports that before there is a session.
void choose_kernels();

// What a node of AFT-full keeps with the session: the methods of its products, and a constant position_bias, packed.
struct KeptForAftFull {
  aft::MethodOrder methods;
  bool has_constant_bias;
  std::shared_ptr<const aft::PackedWeight> packed_bias;

  void add_to(aft::AftFull&) const;
};

// `bias` is null where position_bias is not constant. The result is null where the kernels need nothing.
std::unique_ptr<const KeptForAftFull> keep_for_aft_full(const Call&, const Tensor* bias);

void run_kernel(const Params&, const ort::Run&);

}  // namespace ops
