// Chooses, once per process, the compiled copy of AFT_PRODUCT_KERNELS, and of the functions that prepare their
// parameters, that this machine can run.

#include "dispatch/table.h"
#include "encoder.h"
#include "processor.h"

namespace aft {

PackedWeight::PackedWeight(int64_t rows, int64_t columns, Method method, size_t floats)
    : rows(rows), columns(columns), method(method), memory(floats) {}
PackedWeight::~PackedWeight() = default;

#define AFT_DECLARE_SET(isa)                                         \
  namespace isa {                                                    \
  bool has_method(Method);                                           \
  PackedWeight* pack_weight(const float*, int64_t, int64_t, Method); \
  PackedWeight* pack_position_bias(const AftFull&);                  \
  void half_to_float(const void*, int64_t, float*);                  \
  AFT_PRODUCT_KERNELS(AFT_DECLARE, isa)                              \
  }
AFT_DECLARE_SET(baseline)
AFT_DECLARE_SET(avx2)
AFT_DECLARE_SET(avx512)
AFT_DECLARE_SET(avx512_vnni)
AFT_DECLARE_SET(avx512_bf16)
AFT_DECLARE_SET(neon_dotprod)
AFT_DECLARE_SET(neon_i8mm_bf16)

namespace {

struct Table {
  const char* name;
  bool (*has_method)(Method);
  PackedWeight* (*pack_weight)(const float*, int64_t, int64_t, Method);
  PackedWeight* (*pack_position_bias)(const AftFull&);
  void (*half_to_float)(const void*, int64_t, float*);
  AFT_PRODUCT_KERNELS(AFT_POINTER, )
};

#define AFT_SET(isa) AFT_NAMED_SET(isa)  // isa may be a macro
#define AFT_NAMED_SET(isa)                                                                \
  Table {                                                                                 \
    #isa, isa::has_method, isa::pack_weight, isa::pack_position_bias, isa::half_to_float, \
        AFT_PRODUCT_KERNELS(AFT_ENTRY, isa)                                               \
  }

Table choose() {
#if defined(AFT_ONLY_ISA)
  return AFT_SET(AFT_ONLY_ISA);
#else
  switch (usable_instruction_set()) {
#if defined(__x86_64__)
    case InstructionSet::kAvx512Bf16: return AFT_SET(avx512_bf16);
    case InstructionSet::kAvx512Vnni: return AFT_SET(avx512_vnni);
    case InstructionSet::kAvx512: return AFT_SET(avx512);
    case InstructionSet::kAvx2: return AFT_SET(avx2);
#elif defined(__aarch64__)
#if defined(AFT_I8MM_BF16)
    case InstructionSet::kNeonI8mmBf16: return AFT_SET(neon_i8mm_bf16);
#endif
    case InstructionSet::kNeonDotprod: return AFT_SET(neon_dotprod);
#endif
    default: return AFT_SET(baseline);
  }
#endif
}

bool needs_tiles(Method method) { return method == Method::kAmxBfloat16 || method == Method::kAmxInt8; }

const Table& table() {
  static const Table chosen = choose();
  return chosen;
}

// The copy for AVX512_BF16 has the products by tiles too. Only they need the system's permission, so that a model in
// float32 never asks.
bool has_tiles() {
  static const bool granted = table().has_method(Method::kAmxBfloat16) && request_tiles();
  return granted;
}

}  // namespace

std::unique_ptr<const PackedWeight> pack_weight(const float* weight, int64_t rows, int64_t columns, Method method) {
  return std::unique_ptr<const PackedWeight>(table().pack_weight(weight, rows, columns, method));
}

bool is_usable(Method method) { return table().has_method(method) && (!needs_tiles(method) || has_tiles()); }

MethodOrder usable_methods() {
  MethodOrder usable{};
  for (const MethodFacts& facts : kMethods)
    if (is_usable(facts.method)) usable.methods[usable.count++] = facts.method;
  return usable;
}

std::shared_ptr<const PackedWeight> pack_position_bias(const AftFull& p) {
  return std::shared_ptr<const PackedWeight>(table().pack_position_bias(p));
}

void half_to_float(const void* halves, int64_t count, float* floats) { table().half_to_float(halves, count, floats); }

AFT_PRODUCT_KERNELS(AFT_FORWARD, )

const char* product_instruction_set() { return has_tiles() ? "avx512_amx" : table().name; }

}  // namespace aft
