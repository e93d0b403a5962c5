#include "methods/choice.h"

#include <atomic>
#include <cstdlib>
#include <memory>
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

// Returns the methods that AFTEXPORT_METHOD names, separated by commas, the one with the largest error first.
MethodOrder forced_methods() {
  const char* variable = std::getenv("AFTEXPORT_METHOD");
  if (!variable || !*variable) return {};
  const std::string names = "," + std::string(variable) + ",";
  MethodOrder forced{};
  size_t length = 1;
  for (int i = kMethodCount; i-- > 0;) {
    const std::string name = kMethods[i].name;
    if (names.find("," + name + ",") == std::string::npos || !is_usable(kMethods[i].method)) continue;
    forced.methods[forced.count++] = kMethods[i].method;
    length += name.size() + 1;
  }
  if (length == names.size()) return forced;
  const MethodOrder usable = usable_methods();
  std::string known;
  for (int i = 0; i < usable.count; ++i) known += (i ? ", " : "") + std::string(facts(usable.methods[i]).name);
  throw std::invalid_argument("the environment variable AFTEXPORT_METHOD is \"" + std::string(variable) +
                              "\", known for " + product_instruction_set() + " are " + known);
}

bool is_allowed(Method method, Precision precision) { return facts(method).finest <= precision; }

// Returns the methods within the bound, the one with the smallest error first. Full precision asks for no tiles.
MethodOrder allowed_methods(Precision precision) {
  MethodOrder allowed{};
  for (const MethodFacts& candidate : kMethods)
    if (is_allowed(candidate.method, precision) && is_usable(candidate.method))
      allowed.methods[allowed.count++] = candidate.method;
  return allowed;
}

// Returns the same rates for the life of the process. Threads that measure at once take those of the first to finish. A
// mutex would stay locked in the child of a process that forks during a measurement.
const KeptRates& rates_of(const Products& products) {
  static std::atomic<const KeptRates*> known[kProductsCount];
  std::atomic<const KeptRates*>& entry = known[products.index()];
  if (const KeptRates* found = entry.load(std::memory_order_acquire)) return *found;
  const KeptRates kept = keep_rates(products, [&] { return measure_rates(products); });
  std::unique_ptr<const KeptRates> own = std::make_unique<const KeptRates>(kept);
  const KeptRates* first = nullptr;
  return entry.compare_exchange_strong(first, own.get()) ? *own.release() : *first;
}

// Orders methods by rate, the fastest first. Of those within a tenth of the fastest, the smallest error comes first.
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

Choice choose(Precision precision, const MethodOrder& forced, const Products& products) {
  const MethodOrder allowed = allowed_methods(precision);
  if (allowed.count == 1) return {allowed, "precision", std::nullopt};
  MethodOrder order{};
  bool taken[kMethodCount] = {};
  const auto take = [&](Method method) {
    if (taken[static_cast<int>(method)]) return;
    taken[static_cast<int>(method)] = true;
    order.methods[order.count++] = method;
  };
  for (int i = 0; i < forced.count; ++i)
    if (is_allowed(forced.methods[i], precision)) take(forced.methods[i]);
  const bool is_forced = order.count > 0;
  // The method of an encoder's weights needs no second choice, and float32 none anywhere.
  if (is_forced && (!products.of_aft_full() || order.methods[0] == Method::kFloat32))
    return {{{order.methods[0]}, 1}, "variable", std::nullopt};
  const KeptRates& kept = rates_of(products);
  const MethodOrder fastest = by_rate(allowed, kept.rates);
  for (int i = 0; i < fastest.count; ++i) take(fastest.methods[i]);
  return {order, is_forced ? "variable" : "measurement", kept};
}

// Returns nothing for a precision that leaves no choice, which needs no valid variable.
MethodOrder forced_methods_of(Precision precision) {
  return allowed_methods(precision).count > 1 ? forced_methods() : MethodOrder{};
}

Products products_of(int64_t width) { return width == 0 ? kAftFullProducts : encoder_products(width); }

std::string quoted(const std::string& text) { return "\"" + text + "\""; }

}  // namespace

MethodChooser::MethodChooser(Precision precision) : precision_(precision), forced_(forced_methods_of(precision)) {}

Method MethodChooser::choose(int64_t width) const {
  return aft::choose(precision_, forced_, encoder_products(width)).order.methods[0];
}

MethodOrder choose_weight_methods(Precision precision) {
  return choose(precision, forced_methods_of(precision), kAftFullProducts).order;
}

std::string describe_choice(Precision precision, int64_t width) {
  const Products products = products_of(width);
  const Choice choice = choose(precision, forced_methods_of(precision), products);
  std::string methods, rates;
  for (int i = 0; i < choice.order.count; ++i) methods += (i ? ", " : "") + quoted(facts(choice.order.methods[i]).name);
  for (const MethodFacts& method : kMethods) {
    const int64_t rate = choice.kept ? choice.kept->rates.of[static_cast<int>(method.method)] : 0;
    if (rate) rates += (rates.empty() ? "" : ", ") + quoted(method.name) + ": " + std::to_string(rate);
  }
  return "{\"methods\": [" + methods + "], \"chosen_by\": " + quoted(choice.by) +
         ", \"products\": " + quoted(products.name()) + ", \"rates\": {" + rates +
         "}, \"kept\": " + (choice.kept && choice.kept->in_file ? "true" : "false") +
         ", \"instruction_set\": " + quoted(product_instruction_set()) +
         ", \"processor\": " + quoted(processor_model()) + "}";
}

void check_method_variable() { forced_methods(); }

}  // namespace aft
