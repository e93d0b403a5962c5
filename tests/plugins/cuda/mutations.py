"""Faults planted in the kernels; the tests must notice every one.

Each is a substitution of text that occurs exactly once in the file.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """In ``file`` of plugins/cuda, ``old`` becomes ``new``; the test of ``kernel`` must fail."""

    kernel: str
    file: str
    old: str
    new: str


def _of(kernel: str, file: str, *substitutions: tuple[str, str]) -> list[Mutation]:
    return [Mutation(kernel, file, old, new) for old, new in substitutions]


MUTATIONS = [
    *_of(
        "aft_simple",
        "aft_simple.cu",
        # merge_rows
        ("distance < kWarp; distance *= 2", "distance < kWarp / 2; distance *= 2"),
        ("for (int warp = 1; warp < kWarps; ++warp)", "for (int warp = 2; warp < kWarps; ++warp)"),
        (
            "shared.sums[tile.warp][tile.column * N + c] = sums[c];\n  __syncthreads();",
            "shared.sums[tile.warp][tile.column * N + c] = sums[c];",
        ),
        (
            "sums[c].merge(shared.sums[warp][tile.column * N + c]);\n  }\n  __syncthreads();\n}\n\n"
            "template <int N>",
            "sums[c].merge(shared.sums[warp][tile.column * N + c]);\n  }\n}\n\ntemplate <int N>",
        ),
        # add_tokens
        ("if (i < count) maximum = fmaxf(maximum, key[i][c]);", ";"),
        ("numerator = sums[c].numerator * rescale", "numerator = sums[c].numerator"),
        # which tokens and channels
        ("active = channel < s.channels;", "active = true;"),
        ("end = tile.end < length ? tile.end : length;\n  clear", "end = tile.end;\n  clear"),
        ("for (int64_t t = tile.begin + tile.row; t < end;", "for (int64_t t = tile.row; t < end;"),
        ("sum_chunks(sums, p, tile, p.chunks);", "sum_chunks(sums, p, tile, p.chunks - 1);"),
        ("sum_chunks(sums, p, tile, tile.chunk);", "sum_chunks(sums, p, tile, tile.chunk + 1);"),
        ("chunk < count; chunk += Tile<T, N>::kRows", "chunk < 1; chunk += Tile<T, N>::kRows"),
        ("all_aligned<T>(call->sequence);", "true;"),
        # scan_rows
        ("if (row_in_warp >= distance) sums", "sums"),
        ("if (row_in_warp == 0) sums[c] = RunningSum::empty();", ""),
        (
            "if (row_in_warp == 0) sums[c] = RunningSum::empty();\n  }\n  __syncthreads();",
            "if (row_in_warp == 0) sums[c] = RunningSum::empty();\n  }",
        ),
        (
            "sums[c].merge(shared.sums[warp][tile.column * N + c]);\n  }\n"
            "  __syncthreads();\n}\n\n//",
            "sums[c].merge(shared.sums[warp][tile.column * N + c]);\n  }\n}\n\n//",
        ),
        ("sums[c].merge(shared.before[tile.column * N + c]);", ""),
        ("for (int warp = 0; warp < tile.warp;", "for (int warp = 0; warp <= tile.warp;"),
        # causal_kernel
        ("keep_before(sums, tile, Layout::kRows - 1);", "keep_before(sums, tile, 0);"),
        ("if (i < counted) sums[c].add(", "sums[c].add("),
        ("tile.active ? count_before(tile.end < length ? tile.end : length, t, 1) : 0", "rows"),
        # workspace
        ("ceil_div<int64_t>(s.tokens, kChunk) * s.channels;", "s.channels;"),
    ),
    *_of(
        "aft_simple",
        "running_sum.cuh",
        (
            "numerator * mine + other.numerator * theirs",
            "numerator * theirs + other.numerator * mine",
        ),
        ("maximum = fmaxf(maximum, other.maximum);", "maximum = other.maximum;"),
        ("denominator > 0.0f ? numerator / denominator : 0.0f", "numerator / denominator"),
    ),
    *_of(
        "aft_simple",
        "element.cuh",
        ("return machine::pack_bfloat(low, high);", "return machine::pack_bfloat(high, low);"),
    ),
    *_of(
        "aft_simple",
        "launch.cuh",
        ("b * tensor.batch_stride + t", "t"),
    ),
    *_of(
        "aft_simple",
        "gate.cuh",
        ("(1.0f + machine::fast_exp(-query))", "(1.0f + machine::fast_exp(query))"),
        ("context * tanhf(query)", "tanhf(query)"),
    ),
    *_of(
        "linear_attention",
        "head_context.cuh",
        # rows on their way to shared memory
        ("if (r >= count || column >= columns) continue;", "if (column >= columns) continue;"),
        ("if (r >= count || column >= columns) continue;", "if (r >= count) continue;"),
        ("if (column + k < columns) raw[i]", "raw[i]"),
        ("if (kUnits % kHeadThreads != 0 && unit >= kUnits) break;", ""),
        ("for (int unit = threadIdx.x + from * kPerRow;", "for (int unit = threadIdx.x;"),
        ("if (column + k < columns) store", "store"),
        # products
        (
            "if constexpr (wanted) low = to_tf32(x - __uint_as_float(high));",
            "if constexpr (wanted) low = 0;",
        ),
        (
            "row = warp / kWarpColumns * kHigh * 16 + lane / 4;",
            "row = warp % kWarpRows * kHigh * 16 + lane / 4;",
        ),
        (
            "f(row + 16 * i + k / 2 * 8, column + 8 * j + k % 2,",
            "f(row + 16 * i + k % 2 * 8, column + 8 * j + k / 2,",
        ),
        # merge_states
        ("summed = scan ? chunks - 1 : chunks;", "summed = chunks - 1;"),
        (
            "if (scan) {\n        state[at] = total;",
            "if (scan && i > 0) {\n        state[at] = total;",
        ),
        # workspace
        (
            "return sizeof(float) * state_floats(width) * (states < most ? states : most);",
            "return sizeof(float) * state_floats(width) * all_heads;",
        ),
    ),
    *_of(
        "linear_attention",
        "head_passes.cuh",
        ("const int count = at_most(end - t, kTokens) - first_row;", "const int count = kTokens;"),
        (
            "for (int g = 1; g < Sizes::kGroups; ++g) sum +=",
            "for (int g = 2; g < Sizes::kGroups; ++g) sum +=",
        ),
        ("shared.queries[r][c] = c <= r ? x : 0.0f;", "shared.queries[r][c] = c < r ? x : 0.0f;"),
        ("shared.queries[r][c] = c <= r ? x : 0.0f;", "shared.queries[r][c] = x;"),
        ("i < kTokens; i += Lanes::kLanes) within", "i < kTokens / 2; i += Lanes::kLanes) within"),
        ("if (group == 0) shared.key_sums[column] = key_sum;\n      }", "}"),
        ("key_sum += all;", "key_sum += sum;"),
        ("shared.context[c][e] = place.chunk > 0 ?", "shared.context[c][e] = place.chunk > 1 ?"),
        # barriers: before the scores, before the results, before the next tile
        ("__syncthreads();\n      scores.for_each", "scores.for_each"),
        ("__syncthreads();\n      result.for_each", "result.for_each"),
        ("__syncthreads();\n    result.for_each", "result.for_each"),
        (
            "p.width - place.first_value, p.vectors);\n      __syncthreads();",
            "p.width - place.first_value, p.vectors);",
        ),
        (
            "p.width - place.first_value, p.vectors);\n    __syncthreads();",
            "p.width - place.first_value, p.vectors);",
        ),
    ),
    *_of(
        "linear_attention",
        "linear_attention.cu",
        ("positive + machine::fast_exp(fminf(x, 0.0f))", "positive + machine::fast_exp(x)"),
        ("c < width ? feature(query[i]) : 0.0f", "feature(query[i])"),
        ("denominator = sum + eps;", "denominator = sum;"),
        ("denominator > 0.0f ? 1.0f / denominator : 0.0f", "1.0f / denominator"),
    ),
    *_of(
        "efficient_attention",
        "head_passes.cuh",
        # maxima of the keys
        ("if (i < count) highest = fmaxf(highest, key[i]);", ";"),
        ("sum *= factor;", ""),
        ("context.for_each([&](int r, int, float& x) { x *= shared.factor[r]; });", ""),
        ("highest = fmaxf(highest, shared.partial[g][column]);\n", ";\n"),
        (
            "factor = key_sums[c] > 0.0f ? 1.0f / key_sums[c] : 0.0f;",
            "factor = 1.0f / key_sums[c];",
        ),
        # keys that exceed the maximum
        ("constexpr float kSafeSpread = 40.0f;", "constexpr float kSafeSpread = 400.0f;"),
        (
            "if (first_row + i == last) shared.next_key",
            "if (first_row + i == last + 1) shared.next_key",
        ),
        ("warp < kHeadWarps; ++warp) cut", "warp < 1; ++warp) cut"),
        (
            "distance < kWarp; distance *= 2) {\n    const int other",
            "distance < kWarp / 2; distance *= 2) {\n    const int other",
        ),
        ("shared.context[at / kValues][at % kValues] *= shared.factor[at / kValues];", ""),
        ("key_sum = (key_sum + all) * factor;", "key_sum = key_sum + all;"),
        (
            "if constexpr (Mechanism::kSoftmax) x *= shared.factor[r];\n        shared.context",
            "shared.context",
        ),
        ("if (g < group) before +=", "if (g <= group) before +="),
        (
            "const float total = key_sum + (before + sums[i]);",
            "const float total = key_sum + (before + sum);",
        ),
        ("first_row + i < end && key[i] - maximum", "key[i] - maximum"),
    ),
    *_of(
        "efficient_attention",
        "head_context.cuh",
        ("total * machine::fast_exp(maximum - highest)", "total"),
        ("mine * machine::fast_exp(my_maximum - highest)", "mine"),
    ),
    *_of(
        "efficient_attention",
        "efficient_attention.cu",
        ("if (lane + i * kLanes < width) highest", "highest"),
        ("? machine::fast_exp(query[i] - highest) : 0.0f", "? machine::fast_exp(query[i]) : 0.0f"),
        ("return scale / sum;", "return 1.0f / sum;"),
        ("keys > 1 ? keys : 1", "keys"),
    ),
    *_of(
        "fastformer",
        "head_pool.cuh",
        (
            "if (place.token + i >= place.counted || channel >= p.sequence.channels) continue;",
            "if (place.token + i >= place.rows || channel >= p.sequence.channels) continue;",
        ),
        ("if (channel + c < p.sequence.channels) raw[i]", "raw[i]"),
        ("kept *= 1.0f - share[i][c];", "kept = 1.0f - share[i][c];"),
        ("segment < place.segment; ++segment)", "segment <= place.segment; ++segment)"),
        ("x[i][c] = mean;\n    }\n  }\n  __syncthreads();", "x[i][c] = mean;\n    }\n  }"),
        (
            "for (int chunk = 0; chunk < p.chunks; chunk += kAtOnce)",
            "for (int chunk = 0; chunk < 8; chunk += kAtOnce)",
        ),
        ("pool.sums[at * s.channels + channel] = total.mean();", ""),
        ("total.mean() * (factor ? factor[index] : 1.0f)", "total.mean()"),
        ("if (lane >= distance) all.merge(above);", "all.merge(above);"),
        ("all = shuffle_up(all, 1);", ""),
        ("all.merge({pool.maxima_before[used], 0.0f, pool.denominators_before[used]});", ""),
    ),
    *_of(
        "fastformer",
        "fastformer.cu",
        (
            "const float scale = 1.0f / sqrtf(static_cast<float>(p.width));",
            "const float scale = 1.0f;",
        ),
        ("if (factor) value *=", "if (false) value *="),
        ("if (channel + c < s.channels && head < heads) {", "if (head < heads) {"),
        ("if (t >= place.counted) continue;\n      highest", "highest"),
        (
            "t < place.counted ? machine::fast_exp(logit[i] - highest) : 0.0f",
            "machine::fast_exp(logit[i] - highest)",
        ),
        ("kProduct || sizeof(T) == 4, true>", "false, false>"),
        (
            "[&](int k, int c) { return shared.weights[k][c]; });\n    __syncthreads();",
            "[&](int k, int c) { return shared.weights[k][c]; });",
        ),
        (
            "segment < kSegments; ++segment) sum += shared.slab",
            "segment < kSegments - 1; ++segment) sum += shared.slab",
        ),
        ("if (s.causal) pool.logits", "pool.logits"),
        (
            "if (place.token + i >= place.rows || channel >= s.channels) continue;",
            "if (channel >= s.channels) continue;",
        ),
        ("take(pool.maxima, chunks * heads);", "take(pool.maxima, chunks);"),
    ),
]
