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
]
