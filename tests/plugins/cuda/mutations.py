"""Faults planted in the kernels; the tests must notice every one.

Each substitutes text that occurs exactly once in the file. None is harmless: a kernel that only
loses precision that the exact sums make up for is not faulty.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """In ``file``, ``old`` becomes ``new``; the test of ``kernel`` must fail.

    ``file`` is one of plugins/cuda or, for a fault of the caller, of tests/plugins/cuda.
    """

    kernel: str
    file: str
    old: str
    new: str


def faults(kernel: str, file: str, *substitutions: tuple[str, str]) -> list[Mutation]:
    return [Mutation(kernel, file, old, new) for old, new in substitutions]


def without(text: str, removed: str = "__syncthreads();\n") -> tuple[str, str]:
    return text, text.replace(removed, "")


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
        ("all_aligned<T>(call.sequence);", "true;"),
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
    *faults(
        "aft_local",
        "mechanisms/aft_local.cu",
        ("if (p.sums.causal && numerator != numerator) denominator = numerator;", ""),
        ("p.sums.causal && chunk[i] >= 0 ? 0.0f : outside[i]", "outside[i]"),
        ("static_cast<unsigned>(entry_key + i * kKeysApart) <", "0u <"),
        ("end = static_cast<int>(last < span ? last : span);", "end = static_cast<int>(span);"),
        ("weights[i] += kKeys;", ""),
        ("step.load(shared.stages[stage ^ 1]", "step.load(shared.stages[stage]"),
        ("step.store_to(shared.stages[stage ^ 1]", "step.store_to(shared.stages[stage]"),
        without("      __syncthreads();\n    }\n  }\n"),
        ("async_wait<0>();", "async_wait<1>();"),
        ("trusted = trusted && denominator >= least;", ""),
        ("float y[N] = {};\n    if (r < tile.rows)\n", "float y[N];\n"),
        ("u >= row_ - left && u <= row_ + right", "u >= row_ - left"),
    ),
    *faults(
        "aft_local",
        "sums/running_softmax.cuh",
        ("maximum = fmaxf(maximum, other.maximum);", "maximum = other.maximum;"),
    ),
    *faults(
        "aft_local",
        "mechanisms/aft_local_weights.cuh",
        ("if (j >= row.first && j < row.last)", "if (j >= row.first && j <= row.last)"),
        ("call.sequence.causal && j > left ? 0.0f : outside", "false ? 0.0f : outside"),
        ("edge + t % kVector<T> : t", "edge : t"),
        ("row - edge - kVector<T> + tokens - right", "row"),
    ),
    *faults(
        "aft_local",
        "mechanisms/aft_local_product.cuh",
        ("[key + lane % 16][column + n * 8", "[key + lane % 8][column + n * 8"),
    ),
    *faults(
        "aft_local",
        "sums/window_sums.cuh",
        ("begin = (kWindowRows - left % kWindowRows) % kWindowRows", "begin = left % kWindowRows"),
        ("end = cut < length ? cut : length;", "end = cut;"),
    ),
    *faults(
        "aft_conv",
        "mechanisms/aft_conv.cu",
        (
            "dim3 grid(static_cast<unsigned>(groups * tiles * s.batch))",
            "dim3 grid(static_cast<unsigned>(groups * tiles * s.batch), groups * tiles * s.batch)",
        ),
        ("if (p.sums.causal && counts && numerator != numerator) untrusted |= 1u << r;", ""),
        ("active && index < end && origin + index >= 0", "active && index < end"),
        ("panel.load(p, tile, index + kPanel)", "panel.load(p, tile, index)"),
        without("index);\n    __syncthreads();\n"),
        without("kBlock);\n    __syncthreads();\n"),
        ("from + block <= last_block", "from + block < last_block"),
        ("block < blocks && from + block < 0", "block < blocks && from + block <= 0"),
        ("+ sums.outside_denominator * zero_bias", "+ sums.outside_denominator"),
        ("!total.trusted(denominator, kTrustedDenominator)", "false"),
    ),
    *faults(
        "aft_conv",
        "mechanisms/aft_conv_product.cuh",
        (" && reads_no_later_value(p, product, r)", ""),
        ("index < end && origin + index >= 0", "index < end"),
        ("counts ? weight : 0.0f", "weight"),
        ("const int own = 3 - 2 * m;", "const int own = 3 - m;"),
        ("fragment(own + 1, far)", "fragment(own + 1, near)"),
        ("product.add(shared, stage, table + 2 * index)", "product.add(shared, stage, table)"),
        ("step.load(shared, stage ^ 1", "step.load(shared, stage"),
        without("tile, next);\n    __syncthreads();\n"),
        without("__syncthreads();\n  step.write_output"),
        ("(denominator >= least && reads", "(reads"),
        ("+ outside[n][k]) * reciprocal", ") * reciprocal"),
    ),
    *faults(
        "aft_conv",
        "mechanisms/aft_conv_table.cuh",
        ("call.taps - 1 : (call.taps - 1) / 2", "call.taps - 1 : call.taps / 2"),
        ("!(call.sequence.causal && j >= table.taps)", "true"),
        ("head * table.pitch + i] =", "i] ="),
        ("i / 2 + i % 2 : i", "i / 2 : i"),
        ("s.causal && t + 1 < end ? t + 1 : end", "end"),
    ),
    *faults(
        "aft_conv",
        "sums/window_scan.cuh",
        ("if (i < ancestor) before.merge(records[k]);", ""),
        ("if (i > ancestor) after.merge(records[k]);", ""),
        without("records[0].store(&shared.own[place.slot][place.column]);\n  __syncthreads();\n"),
    ),
    *faults(
        "aft_conv",
        "sums/window_sums.cuh",
        ("+ channel / channels_per_key", "+ channel"),
        ("mine = difference < 0.0f ? factor : 1.0f;", "mine = factor;"),
    ),
    *faults(
        "linear_attention",
        "device/device.cuh",
        ("if (dynamic > 0) {", "if (false) {"),
    ),
    *faults(
        "linear_attention",
        "sums/head_context.cuh",
        ("(states < most ? states : most);", "all_heads;"),
    ),
    *faults(
        "linear_attention",
        "sums/head_merge.cuh",
        ("write(chunk, before);", ""),
        without("total = upto;\n    __syncthreads();\n"),
    ),
    *faults(
        "linear_attention",
        "sums/head_tiles.cuh",
        ("const bool counts = r >= first && r < end;", "const bool counts = true;"),
        ("if (pieces.column + k < columns) target", "target"),
        ("sums, a, {first_column, first_column}", "sums, a, {first_column, 0u}"),
        ("normalizer[2 * half] + normalizer", "normalizer"),
    ),
    *faults(
        "linear_attention",
        "sums/head_state.cuh",
        ("state + r * kWidth + first_value + c, {pair", "state + r * kWidth + c, {pair"),
    ),
    *faults(
        "linear_attention",
        "sums/head_tensor_passes.cuh",
        without("stage]);\n    __syncthreads();\n  }\n  async_wait<0>();"),
        ("async_wait<1>();\n    convert", "convert"),
    ),
    *faults(
        "linear_attention",
        "sums/head_tensor_causal.cuh",
        ("block < warp || key <= query", "true"),
        ("if (place.chunk > 0) state.load(place.state, place.first_value);", ""),
        without("shared.values[stage]);\n      __syncthreads();\n"),
        ("add_row_sums(normalizer, a);", ";"),
    ),
    *faults(
        "linear_attention",
        "device/tile_rows.cuh",
        ("if (column + k < columns) store", "store"),
    ),
    *faults(
        "linear_attention",
        "device/block_product.cuh",
        ("low = to_tf32(x - __uint_as_float(high));", "low = 0;"),
    ),
    *faults(
        "linear_attention",
        "sums/head_passes.cuh",
        ("const int count = at_most(end - t, kTokens) - first_row;", "const int count = kTokens;"),
        ("for (int g = 1; g < Sizes::kGroups", "for (int g = 2; g < Sizes::kGroups"),
    ),
    *faults(
        "linear_attention",
        "sums/head_causal.cuh",
        ("shared.queries[r][c] = c <= r ? x : 0.0f;", "shared.queries[r][c] = x;"),
        ("i < kTokens; i += Lanes::kLanes", "i < kTokens / 2; i += Lanes::kLanes"),
        ("key_sum += all;", "key_sum += sum;"),
        without("__syncthreads();\n      scores.for_each"),
    ),
    *faults(
        "linear_attention",
        "mechanisms/linear_attention.cu",
        ("return x < 0.0f ? below : x + offset;", "return below;"),
        ("offset(map == FeatureMap::kRelu ? 0.0f : 1.0f)", "offset(1.0f)"),
    ),
    *faults(
        "efficient_attention",
        "sums/head_passes.cuh",
        ("if (i < count) new_maximum = fmaxf(new_maximum, key[i]);", ";"),
        without("      sum *= factor;\n", "sum *= factor;"),
        ("context.for_each([&](int r, int, float& x) { x *= shared.factor[r]; });", ""),
    ),
    *faults(
        "efficient_attention",
        "sums/head_causal.cuh",
        ("warp < kBlockWarps; ++warp) cut", "warp < 1; ++warp) cut"),
        ("if (r >= first && r < last) shared.queries[r][column]", "shared.queries[r][column]"),
        ("if (g < group) before +=", "if (g <= group) before +="),
        ("key_sum = (key_sum + all) * factor;", "key_sum = key_sum + all;"),
        ("x *= shared.factor[r];\n        shared", ";\n        shared"),
    ),
    *faults(
        "efficient_attention",
        "sums/head_context.cuh",
        ("constexpr float kSafeSpread = 40.0f;", "constexpr float kSafeSpread = 400.0f;"),
        ("(Mechanism::kAverages || kIsBFloat16<T>)", "true"),
    ),
    *faults(
        "efficient_attention",
        "sums/head_merge.cuh",
        ("cells[i] * mine", "cells[i]"),
    ),
    *faults(
        "efficient_attention",
        "sums/head_tiles.cuh",
        ("x[i] = r < first ? x[i] : 0.0f;", ";"),
        ("cuts[warp] < cut ? cuts[warp] : cut", "cut"),
        ("factor[c] = machine::fast_exp(old - raised);", "factor[c] = 1.0f;"),
    ),
    *faults(
        "efficient_attention",
        "sums/head_state.cuh",
        ("[&](int r, float& sum) { sum *= factor[r]; }", "[&](int, float&) {}"),
    ),
    *faults(
        "efficient_attention",
        "sums/head_tensor_passes.cuh",
        ("        state.scale(shared.factor);\n", ""),
        ("sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum"),
    ),
    *faults(
        "efficient_attention",
        "sums/head_tensor_causal.cuh",
        ("{diagonal, kOnes, 0u, diagonal}", "{diagonal, kOnes, kOnes, diagonal}"),
        ("int block = 0; block < warp;", "int block = 1; block < warp;"),
        ("if (Mechanism::kSoftmax && last < rows) copy_again(stage, t);", ""),
    ),
    *faults(
        "efficient_attention",
        "mechanisms/efficient_attention.cu",
        ("if (first + i * apart < width) maximum", "maximum"),
        ("keys > 1 ? keys : 1", "keys"),
    ),
    *faults(
        "fastformer",
        "mechanisms/fastformer_pool.cuh",
        (
            "machine::fast_exp(logit[i] - maximum)",
            "machine::fast_exp(logit[i] - maximum - 87.5f)",
        ),
        (
            "t < place.counted ? machine::fast_exp(logit[i] - maximum) : 0.0f",
            "machine::fast_exp(logit[i] - maximum)",
        ),
        ("kProduct || sizeof(T) == 4, true>", "false, false>"),
        without("shared.weights[k][c]; });\n    __syncthreads();\n"),
        ("segment < kSegments; ++segment) sum", "segment < kSegments - 1; ++segment) sum"),
    ),
    *faults(
        "fastformer",
        "sums/head_softmax_pool.cuh",
        ("token + i >= place.counted || channel", "token + i >= place.rows || channel"),
        ("kept *= 1.0f - share[i][c];", "kept = 1.0f - share[i][c];"),
        without("x[i][c] = mean;\n    }\n  }\n  __syncthreads();\n"),
        ("if (lane >= distance) all.merge(above);", "all.merge(above);"),
        ("all.merge({pool.before.maxima[used], 0.0f, pool.before.denominators[used]});", ""),
    ),
    *faults(
        "fastformer",
        "sums/pool_tile.cuh",
        ("sums[j][k] * factors[k % 2] + step[k]", "sums[j][k] + step[k]"),
        ("denominator *= factor;", ""),
        ("token < count ? machine::fast_exp", "true ? machine::fast_exp"),
        ("if (column >= channels) count = 0;", ""),
        ("at_most(end - first, kTokens)", "kTokens"),
        ("multiply_add_tf32(sums, high_a, low_b);", ""),
        ("multiply_add_tf32(sums, low_a, high_b);", ""),
        ("(lane / 16 * 8 + lane % 8) * stride", "lane % 16 * stride"),
        ("copy(stage ^ 1, next", "copy(stage, next"),
        without("multiply_rows(stage);\n      __syncthreads();\n"),
        without("exponentiate(count, scale);\n      __syncthreads();\n"),
    ),
    *faults(
        "fastformer",
        "sums/pool_merge.cuh",
        ("total.mean() * (factor ? factor[place.index] : 1.0f)", "total.mean()"),
        ("if (lane >= distance) run.merge(above);", "run.merge(above);"),
        ("if (lane > 0) total.merge(run);", "total.merge(run);"),
        ("if (!leads) return;", "if (channel > 0) return;"),
        ("if (place.group > 0) total =", "if (place.group > 1) total ="),
        ("place.group * kMergeChunks + lane", "lane"),
        ("    total.merge(sum);\n  });\n}\n\n}", "  });\n}\n\n}"),
    ),
    *faults(
        "fastformer",
        "mechanisms/fastformer.cu",
        ("inside < static_cast<unsigned>(p.width)", "true"),
        ("factors ? x * factors[channel] : x", "x"),
        ("token < length) value[i]", "token < tokens) value[i]"),
        ("value[i][c] * mean[c];", "value[i][c] * mean[0];"),
        ("take(records.maxima, count * heads);", "take(records.maxima, count);"),
    ),
    *faults(
        "layer_norm_fastformer",
        "encoder/layer_norm_softmax_pool.cuh",
        ("total * shared.factors[r] + sum", "total + sum"),
        ("sum.denominator * factor + share", "sum.denominator + share"),
        ("lane + j * kWarp < count ? machine::fast_exp", "true ? machine::fast_exp"),
        ("p, batch, channel, heads.first + head);", "p, batch, channel, head);"),
        ("chunk.batch, channel, heads.first + head)", "chunk.batch, channel, head)"),
        ("known[first + mine] : Moments", "known[mine] : Moments"),
        ("(place + head) * p.channels + channel] = sum", "place * p.channels + channel] = sum"),
        ("total / static_cast<float>(channels);", "total;"),
        ("product.template add<true, true>(", "product.template add<false, false>("),
        without("shared.logits[r][c] = logit; });\n    __syncthreads();\n"),
    ),
    *faults(
        "layer_norm_fastformer",
        "device/tile_product.cuh",
        ("right.copy_to(operands.right[stage]);", "right.copy_to(operands.right[0]);"),
        ("lane % 16][k + lane / 16 * 8]", "lane % 16][k]"),
        ("a[i], {b[2], b[3]}", "a[i], {b[0], b[1]}"),
        without("write(stage ^ 1, next);\n    __syncthreads();\n"),
        ("const int depth = at_most(source.depth - k, kTileDepth<T>);", "const int depth = 64;"),
    ),
    *faults(
        "layer_norm_fastformer",
        "encoder/layer_norm_fastformer.cu",
        ("x * global_key[k]", "x"),
        ("static_cast<int>(length_of(s, tile.batch))", "extent"),
        ("p.global_query[at] * pooled", "pooled"),
        ("offset[k] * global_key[k]", "global_key[k]"),
        ("take(p.pool.chunks.maxima, chunks, ", "take(p.pool.chunks.maxima, 1, "),
        without("partial[share][column] = sum;\n  __syncthreads();\n"),
    ),
]

_LANES_ALONG_ROWS = """first_row() { return threadIdx.x / kPerRow; }
  static __device__ __forceinline__ int column() { return threadIdx.x % kPerRow * kUnit; }
"""
_LANES_ALONG_COLUMNS = """first_row() { return threadIdx.x % kRowsApart; }
  static __device__ __forceinline__ int column() { return threadIdx.x / kRowsApart * kUnit; }
"""

SLOWER = [
    *faults(
        "fastformer",
        "mechanisms/fastformer_pool.cuh",
        ("slab[kPoolTokens][kSlab + 4]", "slab[kPoolTokens][kSlab]"),
    ),
    *faults(
        "linear_attention",
        "device/tile_rows.cuh",
        (_LANES_ALONG_ROWS, _LANES_ALONG_COLUMNS),
    ),
]
"""Faults that only cost time: bank conflicts, and lanes that read from different rows."""
