#include "methods/choice.h"

namespace aft {
namespace {

// The usable methods that keep the precision's bound, the one with the largest error first.
MethodOrder allowed_methods(Precision precision) {
  const MethodOrder usable = usable_methods();
  MethodOrder allowed{};
  for (int i = usable.count - 1; i >= 0; --i)
    if (kMethods[static_cast<int>(usable.methods[i])].finest <= precision)
      allowed.methods[allowed.count++] = usable.methods[i];
  return allowed;
}

}  // namespace

Method choose_method(Precision precision, int64_t) { return allowed_methods(precision).methods[0]; }

MethodOrder choose_weight_methods(Precision precision) { return allowed_methods(precision); }

}  // namespace aft
