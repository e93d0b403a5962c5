// Errors as exceptions inside the library, and as a line in TensorRT's log at its border.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

// What went wrong with a node, in words meant for the person who made the model.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void expect(bool condition, const std::string& otherwise) {
  if (!condition) throw Error(otherwise);
}

// Writes to the logger of the TensorRT that loaded the library, or to stderr where it gives none.
void log_error(const std::string& message) noexcept;

// Runs `body`; what it throws is logged as `op: what`, and `failed` returned.
template <class Result, class Body>
Result guarded(const std::string& op, Result failed, const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    log_error(op + ": " + error.what());
    return failed;
  }
}
