"""Faults planted in the mechanisms of heads: linear and efficient attention."""

from .mutation import faults, without

MUTATIONS = [
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
        ("offset(map == AFT_CUDA_RELU ? 0.0f : 1.0f)", "offset(1.0f)"),
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
]
