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
        "aft_full",
        "aft_full.cu",
        # exponentials
        ("if (u + 1 >= visible) high = 0.0f;", ""),
        # multiply_step
        (
            "lane % 8 + lane / 8 % 2 * 8, matrix_column = lane / 16 * 8;",
            "lane % 8 + lane / 16 * 8, matrix_column = lane / 8 % 2 * 8;",
        ),
        ("first_key + k + word / 2 * 8 + lane % 4 * 2,", "first_key + k + lane % 4 * 2,"),
        # tensor_kernel
        ("if (next <= rows.least_visible)", "if (u <= rows.least_visible)"),
        ("else if (u < rows.most_visible)", "else if (next < rows.most_visible)"),
        ("bias[stage ^ 1], p, tile, next", "bias[stage], p, tile, next"),
        ("entries[stage ^ 1], next", "entries[stage], next"),
        ("next);\n      async_wait<0>();", "next);"),
        ("async_wait<0>();\n    }\n    __syncthreads();", "async_wait<0>();\n    }"),
        (
            "  __syncthreads();\n  write_tile<T, N, kTensorThreads>",
            "  write_tile<T, N, kTensorThreads>",
        ),
        # float_kernel
        ("write(stage ^ 1, next);\n    __syncthreads();", "write(stage ^ 1, next);"),
        # run
        ("call.position_bias_width % kVector<T> == 0;", "true;"),
    ),
    *_of(
        "aft_full",
        "aft_full_tile.cuh",
        ("first_key + column + k < visible[i] ?", "true ?"),
        ("t >= length ? 0 : causal ? t + 1 : length;", "causal ? t + 1 : length;"),
        (
            "first_row + kTileRows < length ? first_row + kTileRows",
            "first_row < length ? first_row + 32",
        ),
        ("counted ? machine::fast_exp(key[i][c] - maximum[c]) : 0.0f", "1.0f"),
        ("if (channel >= p.call.sequence.channels) return;", ""),
    ),
    *_of(
        "aft_full",
        "aft_full_cell.cuh",
        ("denominator > least ?", "denominator > 0.0f ?"),
        ("kTrustedPerKey<Half> = 0.25f", "kTrustedPerKey<Half> = 0.0f"),
        ("kTrustedPerKey = 1.9721523e-31f", "kTrustedPerKey = 0.0f"),
        ("if (visible == 0) mean[c] = 0.0f;", ""),
        ("if (!all_trusted) sum_exactly", "if (false) sum_exactly"),
        ("key[c] + w - maximum[c]", "key[c] - maximum[c]"),
    ),
    *_of(
        "aft_full",
        "aft_full_maxima.cuh",
        ("for (int r = 1; r < rows; ++r) largest", "for (int r = 1; r < 2; ++r) largest"),
        ("maxima.keys[(b * maxima.blocks + block)", "maxima.keys[(block)"),
        ("round_up<int64_t>(s.tokens, 4) + s.batch * blocks", "s.batch * blocks"),
    ),
    *_of(
        "aft_full_gemm",
        "aft_full_gemm.cu",
        ("if (s.causal) return 1;", ""),
        ("if (u < length) {", "{"),
        ("store(entries + s.channels, denominator);", "store(entries + s.channels, numerator);"),
        ("maximum[c];\n  __syncthreads();", "maximum[c];"),
        ("for (int r = 0; r < rows; ++r)", "for (int r = 0; r < 1; ++r)"),
        ("mean[c] = finite ?", "mean[c] = true ?"),
        ("s.channels % kVector<T> == 0 && all_aligned<T>(s)", "true"),
    ),
    *_of(
        "aft_local",
        "aft_local.cu",
        # which biases
        ("first = left > t ? left - t : 0;", "first = 0;"),
        ("last = end < width ? end : width;", "last = width;"),
        ("t + left + 1 < call.sequence.tokens", "t + left < 0"),
        ("sees_outside ? 0.0f : kNoKey", "kNoKey"),
        ("distance >= -static_cast<int>(p.sums.left)", "distance > -static_cast<int>(p.sums.left)"),
        ("distance <= static_cast<int>(p.sums.right)", "distance < static_cast<int>(p.sums.right)"),
        ("(weight_key - weight_row() + p.sums.left)", "(weight_key - weight_row())"),
        ("if (in_window(p, tile, i)) bias", "bias"),
        # which keys and channels
        ("&& !(p.sums.causal && weight_key > row)", ""),
        ("const bool counts = weight_key < tile.end &&", "const bool counts = "),
        ("(active && entry_key + i * kKeysApart < tile.end) {", "(active) {"),
        ("(active && entry_key + i * kKeysApart < tile.end)\n", "(active)\n"),
        ("end = static_cast<int>(last < span ? last : span);", "end = static_cast<int>(span);"),
        ("band += kKeys;", ""),
        # the pipeline
        ("if (u >= tile.begin) product", "product"),
        ("step.store_to(shared.stages[stage ^ 1]", "step.store_to(shared.stages[stage]"),
        ("      __syncthreads();\n    }\n  }", "    }\n  }"),
        ("shared.outside[c]);\n    }\n  __syncthreads();", "shared.outside[c]);\n    }"),
        # the product
        ("[key + lane % 16][column + n * 8", "[key + lane % 8][column + n * 8"),
        ("cell / 2 % 2 * 8 + lane / 4", "lane / 4"),
        ("weights[r / 4][r % 4] * entries[c]", "weights[0][r % 4] * entries[c]"),
        # what was lost
        ("if (counts && !total.trusted(denominator, least)) lost |= 1u << cell;", ""),
        ("return 0.5f * static_cast<float>(keys);", "return kTrustedDenominator;"),
        ("u >= row_ - left && u <= row_ + right", "u >= row_ - left"),
        # workspace
        (" + sizeof(float) * s.tokens;", ";"),
    ),
    *_of(
        "aft_local",
        "window_sums.cuh",
        ("begin = (rows - left % rows) % rows", "begin = left % rows"),
        ("(key % rows == low ? 1 : 2)", "1"),
        ("if (key >= tokens) return pieces;", ""),
        ("end = cut < length ? cut : length;", "end = cut;"),
        ("if (!w.causal) sum.merge(w.after", "sum.merge(w.after"),
        ("w.after[w.record(b, end, channel)]", "w.after[w.record(b, begin, channel)]"),
        ("sum = w.of_pieces(b, 0, begin, channel)", "sum = w.of_pieces(b, 0, end, channel)"),
        ("from - maximum[k]);", "0.0f);"),
        (
            "for (int i = kScanWarps - 1; i > warp; --i)",
            "for (int i = kScanWarps - 2; i > warp; --i)",
        ),
        ("for (int i = 0; i < warp; ++i)", "for (int i = 1; i < warp; ++i)"),
        (
            "shared.sums[warp][lane] = own;\n  __syncthreads();",
            "shared.sums[warp][lane] = own;",
        ),
        ("i += count * step;", "i += kScanInFlight * step;"),
        ("mine = difference < 0.0f ? factor : 1.0f;", "mine = factor;"),
        ("return denominator >= least * mine;", "return denominator >= least;"),
    ),
    *_of(
        "aft_conv",
        "aft_conv.cu",
        # which taps
        ("call.taps - 1 : (call.taps - 1) / 2", "call.taps - 1 : call.taps / 2"),
        ("const int64_t j = i - (kBlock - 1);", "const int64_t j = i - kBlock;"),
        ("!(call.sequence.causal && j >= table.taps)", "true"),
        ("(taps + kBlock - 2) / kBlock", "(taps - 1) / kBlock"),
        ("head * table.pitch + i] =", "i] ="),
        # which keys and channels
        ("active && index < end && origin + index >= 0", "active && index < end"),
        ("return active && index < end &&", "return active &&"),
        ("begin = origin < 0 ? static_cast<int>(-origin / kBlock * kBlock) : 0;", "begin = 0;"),
        ("head = active ? channel / p.width : 0;", "head = channel / p.width;"),
        # panels
        ("panel.load(p, tile, index + kPanel)", "panel.load(p, tile, index)"),
        ("maximum);\n    __syncthreads();", "maximum);"),
        ("kBlock);\n    __syncthreads();", "kBlock);"),
        # blocks
        ("weight[i - r + kBlock - 1] * own", "weight[i - r + kBlock] * own"),
        ("from + block <= last_block", "from + block < last_block"),
        ("from < 0 ? -from : 0; block", "0; block"),
        ("block < blocks && from + block < 0", "block < blocks && from + block <= 0"),
        ("from > last_block ? 0 : last_block + 1 - from", "last_block + 1"),
        ("if (!p.sums.causal)", "if (true)"),
        ("+ sums.outside_denominator * zero_bias", "+ sums.outside_denominator"),
        # what was lost
        (
            "total.trusted(denominator, kTrustedDenominator)) lost |= 1u << r;",
            "false) lost |= 1u << r;",
        ),
        ("s.causal && t + 1 < last ? t + 1 : last", "last"),
        # workspace
        ("return sizeof(float) * heads * (pitch + 1);", "return sizeof(float) * heads;"),
    ),
    *_of(
        "aft_conv",
        "window_sums.cuh",
        ("+ channel / channels_per_key", "+ channel"),
        ("prepare.items) prepare(item);", "prepare.items - 1) prepare(item);"),
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
