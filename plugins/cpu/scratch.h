// Temporary memory of the kernels.
#pragma once

#include <cstddef>

namespace aft {

// Memory of one call, aligned to 64 bytes and freed with the object. Not initialized.
class Scratch {
 public:
  explicit Scratch(size_t floats);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* data() const { return data_; }

 private:
  float* data_;
};

// Memory of the task that is running, aligned to 64 bytes: one buffer per thread which grows to the
// largest request and stays, so that no task waits for the system to hand out fresh pages. Valid until
// the same thread asks again. Not initialized.
float* task_memory(size_t floats);

}  // namespace aft
