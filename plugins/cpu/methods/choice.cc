#include "methods/choice.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "methods/rate_file.h"

namespace aft {
namespace {

constexpr bool are_in_order() {
  for (int i = 0; i < kMethodCount; ++i)
    if (static_cast<int>(kMethods[i].method) != i) return false;
  return true;
}
static_assert(are_in_order(), "kMethods is in the order of Method");

const MethodFacts& facts(Method method) { return kMethods[static_cast<int>(method)]; }

// Of AFTEXPORT_METHOD, which forces a method for each reduced precision whose bound it keeps.
std::optional<Method> forced_method() {
  const char* name = std::getenv("AFTEXPORT_METHOD");
  if (!name || !*name) return std::nullopt;
  const MethodOrder usable = usable_methods();
  std::string known;
  for (int i = 0; i < usable.count; ++i) {
    if (facts(usable.methods[i]).name == std::string(name)) return usable.methods[i];
    known += (i ? ", " : "") + std::string(facts(usable.methods[i]).name);
  }
  throw std::invalid_argument("the environment variable AFTEXPORT_METHOD is \"" + std::string(name) + "\", known for " +
                              product_instruction_set() + " are " + known);
}

bool is_allowed(Method method, Precision precision) { return facts(method).finest <= precision; }

// By error, the smallest first.
MethodOrder allowed_methods(Precision precision) {
  const MethodOrder usable = usable_methods();
  MethodOrder allowed{};
  for (int i = 0; i < usable.count; ++i)
    if (is_allowed(usable.methods[i], precision)) allowed.methods[allowed.count++] = usable.methods[i];
  return allowed;
}

KeptRates rates_of(const Products& products) {
  static std::mutex mutex;
  static std::map<int64_t, KeptRates> known;  // by width
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = known.find(products.width);
  if (found != known.end()) return found->second;
  return known[products.width] = keep_rates(products, [&] { return measure_rates(products); });
}

// The fastest first; within a tenth of the fastest the one with the smallest error.
MethodOrder by_rate(const MethodOrder& allowed, const MethodRates& rates) {
  const auto rate = [&](int i) { return rates.of[static_cast<int>(allowed.methods[i])]; };
  MethodOrder order{};
  bool taken[kMethodCount] = {};
  while (order.count < allowed.count) {
    int64_t fastest = 0;
    for (int i = 0; i < allowed.count; ++i)
      if (!taken[i] && rate(i) > fastest) fastest = rate(i);
    int next = 0;
    while (taken[next] || 11 * rate(next) < 10 * fastest) ++next;
    taken[next] = true;
    order.methods[order.count++] = allowed.methods[next];
  }
  return order;
}

struct Choice {
  MethodOrder order;
  const char* by;  // "precision", "variable" or "measurement"
  std::optional<KeptRates> kept;
};

Choice choose(Precision precision, const Products& products) {
  const MethodOrder allowed = allowed_methods(precision);
  if (allowed.count == 1) return {allowed, "precision", std::nullopt};
  const std::optional<Method> forced = forced_method();
  const bool keeps_bound = forced && is_allowed(*forced, precision);
  // The method of an encoder's weights needs no second choice, and float32 none anywhere.
  if (keeps_bound && (!products.of_aft_full() || *forced == Method::kFloat32))
    return {{{*forced}, 1}, "variable", std::nullopt};
  const KeptRates kept = rates_of(products);
  const MethodOrder order = by_rate(allowed, kept.rates);
  if (!keeps_bound) return {order, "measurement", kept};
  MethodOrder behind{{*forced}, 1};
  for (int i = 0; i < order.count; ++i)
    if (order.methods[i] != *forced) behind.methods[behind.count++] = order.methods[i];
  return {behind, "variable", kept};
}

Products products_of(int64_t width) { return width == 0 ? kAftFullProducts : encoder_products(width); }

std::string quoted(const std::string& text) { return "\"" + text + "\""; }

}  // namespace

Method choose_method(Precision precision, int64_t width) {
  return choose(precision, encoder_products(width)).order.methods[0];
}

MethodOrder choose_weight_methods(Precision precision) { return choose(precision, kAftFullProducts).order; }

std::string describe_choice(Precision precision, int64_t width) {
  const Products products = products_of(width);
  const Choice choice = choose(precision, products);
  std::string methods, rates;
  for (int i = 0; i < choice.order.count; ++i)
    methods += (i ? ", " : "") + quoted(facts(choice.order.methods[i]).name);
  for (const MethodFacts& method : kMethods) {
    const int64_t rate = choice.kept ? choice.kept->rates.of[static_cast<int>(method.method)] : 0;
    char number[32];
    std::snprintf(number, sizeof number, "%.1f", static_cast<double>(rate) / 1000);
    if (rate) rates += (rates.empty() ? "" : ", ") + quoted(method.name) + ": " + number;
  }
  return "{\"methods\": [" + methods + "], \"chosen_by\": " + quoted(choice.by) +
         ", \"products\": " + quoted(products.name()) + ", \"rates\": {" + rates +
         "}, \"kept\": " + (choice.kept && choice.kept->in_file ? "true" : "false") +
         ", \"instruction_set\": " + quoted(product_instruction_set()) +
         ", \"processor\": " + quoted(processor_model()) + "}";
}

void check_method_variable() { forced_method(); }

}  // namespace aft
