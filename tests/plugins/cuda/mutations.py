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
]
