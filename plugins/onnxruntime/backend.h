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
  const char* execution_provider;      // as the runtime calls it
  std::vector<aft::Element> elements;  // of tensors
  std::vector<Operator> operators;     // besides the mechanisms
};

extern const Backend kBackend;

// Throws where the kernels cannot be chosen; the library reports that before there is a session.
void choose_kernels();

// For aft::AftFull::methods.
aft::MethodOrder choose_weight_methods(aft::Precision);

// What this provider's kernel keeps of a constant position_bias, as kernels.h has it.
std::shared_ptr<const aft::PackedWeight> pack_position_bias(const aft::AftFull&);

void run_kernel(const aft::AftSimple&, const ort::Run&);
void run_kernel(const aft::AftFull&, const ort::Run&);
void run_kernel(const aft::AftLocal&, const ort::Run&);
void run_kernel(const aft::AftConv&, const ort::Run&);
void run_kernel(const aft::EfficientAttention&, const ort::Run&);
void run_kernel(const aft::LinearAttention&, const ort::Run&);
void run_kernel(const aft::Fastformer&, const ort::Run&);

}  // namespace ops
