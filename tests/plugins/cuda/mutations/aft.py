"""Faults planted in AFT-simple and AFT-full, and in what they share with the other kernels."""

from .mutation import faults, without

_SUM_LAUNCH = "launch<Shared>(sum_kernel<T, N>, grid, kThreads, stream, params)) return status;"
_FUSED_LAUNCH = """0) return status;
  if (!s.causal) {
    void (*const fused)(Params) = [](const Params p) {
      sum_kernel<T, N>(p), gate_kernel<T, N, gate>(p);
    };
    return launch<Shared>(fused, grid, kThreads, stream, params);
  }
  if (const int status = """

MUTATIONS = [
    *faults(
        "aft_simple",
        "problem.h",
        (
            "sequence.lengths = reinterpret_cast<const int64_t*>(lengths.data());",
            "sequence.lengths = reinterpret_cast<const int64_t*>(lengths.host());",
        ),
    ),
    *faults(
        "aft_simple",
        "mechanisms/aft_simple.cu",
        (_SUM_LAUNCH, _FUSED_LAUNCH + _SUM_LAUNCH),
        ("if (i < count) raw[i]", "raw[i]"),
        (
            "most = ceil_div<int64_t>(s.tokens, kChunk);",
            "most = s.lengths[0] == 0 ? 1 : ceil_div<int64_t>(s.tokens, kChunk);",
        ),
        without("__syncthreads();\n  const int c = threadIdx.x;\n  if (c >= channels)"),
        without("__syncthreads();\n  if (!tile.active) return;\n"),
        without("before.merge(own);\n    }\n  __syncthreads();\n"),
        ("active = channel < s.channels;", "active = true;"),
        ("sum_chunks(p, tile, p.chunks);", "sum_chunks(p, tile, p.chunks - 1);"),
        ("chunk < count; chunk += Layout::kParts", "chunk < count; chunk += 2 * Layout::kParts"),
        ("all_aligned<T>(call->sequence);", "true;"),
        ("if (row_in_warp < distance) above.reference = kNoKey;", ""),
        ("before.merge(own);", ""),
        ("(chunks < most ? chunks : most) * s.channels;", "s.channels;"),
    ),
    *faults(
        "aft_simple",
        "sums/running_softmax.cuh",
        ("numerator *= rescale;", ""),
        ("return {0xff80};", "return {0};"),
        ("reference = fmaxf(reference, other.reference);", "reference = other.reference;"),
        ("fmaf(fabsf(product), 1.1920929e-7f, product)", "product"),
    ),
    *faults(
        "aft_simple",
        "device/load_store.cuh",
        ("return machine::pack_bfloat(low, high);", "return machine::pack_bfloat(high, low);"),
    ),
    *faults(
        "aft_simple",
        "device/launch.cuh",
        ("b * tensor.batch_stride + t", "t"),
    ),
    *faults(
        "aft_simple",
        "sums/gate.cuh",
        ("machine::fast_exp(-query)", "machine::fast_exp(query)"),
    ),
    *faults(
        "aft_full",
        "mechanisms/aft_full/aft_full.cu",
        ("if (u + 1 >= visible) high = 0.0f;", ""),
        ("if (next <= rows.least_visible)", "if (u <= rows.least_visible)"),
        ("entries[stage ^ 1])", "entries[stage])"),
        without("entries[stage ^ 1]);\n      async_wait<0>();\n", "async_wait<0>();\n"),
        without("  __syncthreads();\n  write_tile<T, N, kTensorThreads>"),
        without("    }\n    __syncthreads();\n  }\n  if (tile.keys > kSegmentKeys)"),
        ("call.position_bias_width % kVector<T> == 0;", "true;"),
    ),
    *faults(
        "aft_full",
        "mechanisms/aft_full/aft_full_tile.cuh",
        ("first_key + column + k < visible[i] ?", "true ?"),
        ("key_row += kShare * key_step;", ""),
    ),
    *faults(
        "aft_full",
        "mechanisms/aft_full/aft_full_cell.cuh",
        ("kTrustedPerKey<Half> = 0.25f", "kTrustedPerKey<Half> = 0.0f"),
        ("if (!all_trusted) {", "if (false) {"),
    ),
    *faults(
        "aft_full",
        "mechanisms/aft_full/aft_full_maxima.cuh",
        ("maxima.keys[(b * maxima.blocks + block)", "maxima.keys[(block)"),
    ),
    *faults(
        "aft_full_gemm",
        "mechanisms/aft_full/aft_full_gemm.cu",
        ("if (s.causal) return 1;", ""),
        ("if (u < length) {", "{"),
        ("store(entries + s.channels, denominator);", "store(entries + s.channels, numerator);"),
        without("maximum[c];\n  __syncthreads();\n"),
        ("finite ? trusted_mean", "true ? trusted_mean"),
        ("s.channels % kVector<T> == 0 && all_aligned<T>(s)", "true"),
    ),
]
