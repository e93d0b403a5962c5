// Chooses, once per process, the compiled copy of AFT-full and the encoder's operators that this machine can run.
// They come in more copies than the other kernels: only products gain from the instructions for bfloat16 and 8-bit
// integers.

#include "encoder.h"
#include "processor.h"

namespace aft {

PackedWeight::PackedWeight(int64_t rows, int64_t columns, Precision precision, size_t floats)
    : rows(rows), columns(columns), precision(precision), memory(floats) {}
PackedWeight::~PackedWeight() = default;

#define AFT_FOR_EACH_OPERATOR(X)                      \
  X(aft_full, AftFull)                                \
  X(layer_norm_linear, LayerNormLinear)               \
  X(layer_norm_feed_forward, LayerNormFeedForward)    \
  X(linear_residual, LinearResidual)                  \
  X(layer_norm_fastformer, LayerNormFastformer)

#define AFT_DECLARE(name, Params) void name(const Params&, const Parallel&);
#define AFT_DECLARE_SET(isa)                                            \
  namespace isa {                                                       \
  PackedWeight* pack_weight(const float*, int64_t, int64_t, Precision); \
  PackedWeight* pack_position_bias(const AftFull&);                     \
  AFT_FOR_EACH_OPERATOR(AFT_DECLARE)                                    \
  }
AFT_DECLARE_SET(baseline)
AFT_DECLARE_SET(avx2)
AFT_DECLARE_SET(avx512)
AFT_DECLARE_SET(avx512_vnni)
AFT_DECLARE_SET(avx512_bf16)

namespace {

#define AFT_POINTER(name, Params) void (*name)(const Params&, const Parallel&);
struct Operators {
  const char* name;
  PackedWeight* (*pack_weight)(const float*, int64_t, int64_t, Precision);
  PackedWeight* (*pack_position_bias)(const AftFull&);
  AFT_FOR_EACH_OPERATOR(AFT_POINTER)
};

#define AFT_SET(isa)                                                                                        \
  Operators {                                                                                               \
    #isa, isa::pack_weight, isa::pack_position_bias, isa::aft_full, isa::layer_norm_linear,                 \
        isa::layer_norm_feed_forward, isa::linear_residual, isa::layer_norm_fastformer                      \
  }

Operators choose() {
  switch (usable_instruction_set()) {
#if defined(__x86_64__)
    case InstructionSet::kAvx512Bf16: return AFT_SET(avx512_bf16);
    case InstructionSet::kAvx512Vnni: return AFT_SET(avx512_vnni);
    case InstructionSet::kAvx512: return AFT_SET(avx512);
    case InstructionSet::kAvx2: return AFT_SET(avx2);
#endif
    default: return AFT_SET(baseline);
  }
}

const Operators& operators() {
  static const Operators chosen = choose();
  return chosen;
}

}  // namespace

std::unique_ptr<const PackedWeight> pack_weight(const float* weight, int64_t rows, int64_t columns,
                                                Precision precision) {
  return std::unique_ptr<const PackedWeight>(operators().pack_weight(weight, rows, columns, precision));
}

std::shared_ptr<const PackedWeight> pack_position_bias(const AftFull& p) {
  return std::shared_ptr<const PackedWeight>(operators().pack_position_bias(p));
}

#define AFT_FORWARD(name, Params) \
  void name(const Params& params, const Parallel& parallel) { operators().name(params, parallel); }
AFT_FOR_EACH_OPERATOR(AFT_FORWARD)

const char* product_instruction_set() { return operators().name; }

}  // namespace aft
