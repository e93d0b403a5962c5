// The file that keeps measured rates for later processes of this user.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "methods/rates.h"

namespace aft {

struct KeptRates {
  MethodRates rates;
  bool in_file;  // false: no file could be written, and another process may measure other rates
};

// Returns the rates of the file for these products, which one call of `measure` fills for all processes that start at
// once. A file that is not exactly as this library writes it is replaced. Where the folder cannot be written, or
// another process does not release its lock, the rates are those of `measure`.
KeptRates keep_rates(const Products&, const std::function<MethodRates()>& measure);

// Two parts of keep_rates(), which tests call: the text of a file, and its rates if it is such a text.
std::string rate_text(const Products&, const MethodRates&);
std::optional<MethodRates> read_rate_text(const Products&, const std::string& text);

// As the operating system and the processor name it.
const std::string& processor_model();

}  // namespace aft
