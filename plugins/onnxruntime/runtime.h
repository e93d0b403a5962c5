// ONNX Runtime's C interface as C++: tensors with shapes, attributes with defaults, errors as exceptions
// that become an OrtStatus at the border.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "operators/operators.h"
#include "ort_api.h"

namespace ort {

using ops::Error;
using ops::Shape;
using ops::Tensor;

// Throws Error with the status's message unless it is null; frees it.
void check(const Api& api, Status* status);

// Runs `body` and turns what it throws into a status that starts with `op`.
template <class Body>
Status* guarded(const Api& api, const std::string& op, const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const Error& error) {
    return api.CreateStatus(ErrorCode::kInvalidArgument, (op + ": " + error.what()).c_str());
  } catch (const std::exception& error) {
    return api.CreateStatus(ErrorCode::kFail, (op + ": " + error.what()).c_str());
  }
}

// The attributes and constant inputs of a node, at kernel creation. An attribute that is not there is `otherwise`, one
// of another type an Error.
class Attributes {
 public:
  Attributes(const Api& api, const KernelInfo* info) : api_(api), info_(info) {}

  int64_t integer(const char* name, int64_t otherwise) const;
  float number(const char* name, float otherwise) const;
  std::string text(const char* name, const char* otherwise) const;
  bool constant(size_t input, Tensor& tensor) const;  // false: only known when the node runs

 private:
  // `status` says why an attribute could not be read; throws unless that is because there is none. Frees it.
  void expect_absent(Status* status, const char* name, const char* expected) const;

  const Api& api_;
  const KernelInfo* info_;
};

// The inputs and the outputs of one run of a node, and the threads or the device it runs on.
class Run {
 public:
  Run(const Api& api, KernelContext* context) : api_(api), context_(context) {}

  Tensor input(size_t index) const;
  std::optional<Tensor> optional_input(size_t index) const;
  // The data of an output without elements may be null.
  void* output(size_t index, const Shape& shape) const;
  void* optional_output(size_t index, const Shape& shape) const;  // null as well where the node has none
  aft::Parallel parallel() const;
  void* stream() const;  // a cudaStream_t; null for the CPU
  // Memory where input 0 lies, aligned to 256 bytes. It may be given back as soon as its last use is enqueued on the
  // stream.
  std::shared_ptr<void> workspace(size_t bytes) const;

 private:
  const Api& api_;
  KernelContext* context_;
};

}  // namespace ort
