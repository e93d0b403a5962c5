// Errors as exceptions inside the library, and as a line in TensorRT's log at its border.
#pragma once

#include <exception>
#include <string>

#include "operators/operators.h"

using ops::Error;
using ops::expect;

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
