"""The launches of every mechanism: grids, loops, bytes and products, as the sources cut them.

Instructions are not here: they are read from the machine code, see ``expectation.py``.
"""

from collections.abc import Iterator
from math import ceil, log2

from benchmarks.gpu.encoder_launches import EncoderLaunches
from benchmarks.gpu.launch import Launch
from benchmarks.gpu.workloads import HEADS, TAPS, WINDOW, Workload

AFT_FULL_GEMM = "aft_full_gemm"
"""AFT-full around a library's matrix product."""


class Launches(EncoderLaunches):
    """The launches of a workload.

    Args:
        workload: mechanism, sizes and type.
        way: the workload's mechanism, or AFT_FULL_GEMM.
    """

    def __init__(self, workload: Workload, way: str) -> None:
        super().__init__(workload)
        self.way = way

    def all(self) -> Iterator[Launch]:
        """Yield the launches in their order."""
        if self.way in ("linear_attention", "efficient_attention"):
            return self.heads()
        return getattr(self, self.way)()  # type: ignore[no-any-return]

    def aft_simple(self) -> Iterator[Launch]:
        w, stem = self.w, "aft_simple"
        step, least_chunk = 128, 256  # tokens of an iteration and of a chunk
        groups = ceil(w.dim / (8 * self.vector))
        wanted = ceil((256 if w.causal else 1024) / (groups * w.batch))
        chunk = _round_up(ceil(w.tokens / min(wanted, ceil(w.tokens / least_chunk))), least_chunk)
        chunks = ceil(w.tokens / chunk)
        grid, suffix = groups * chunks * w.batch, f"<{self.element}, {self.vector}>"
        size = {"grid": grid, "iterations": chunk / step}
        if chunks > 1:
            yield Launch(stem, f"sum_kernel{suffix}", read=2 * self.tensor, **size)
        if w.causal:
            yield Launch(
                stem,
                f"causal_kernel{suffix}",
                read=(2 if chunks > 1 else 4) * self.tensor,
                again=2 * self.tensor if chunks > 1 else 0,
                reused=2 * self.tensor,
                before=chunks / 64,
                exposed=chunk / step,
                **size,
            )
        elif chunks > 1:
            yield Launch(
                stem, f"gate_kernel{suffix}", read=2 * self.tensor, before=chunks / 32,
                exposed=2, **size,
            )  # fmt: skip
        else:
            yield Launch(stem, f"single_chunk_kernel{suffix}", read=4 * self.tensor, **size)

    def heads(self) -> Iterator[Launch]:
        """Linear and Efficient Attention."""
        w, stem = self.w, self.w.mechanism
        width = next(size for size in (32, 64, 128, 256) if w.dim // HEADS <= size)
        slices = {32: 1, 64: 1, 128: 2, 256: 8}[width]
        tokens = causal_tokens = queries = 64
        blocks, prefix = 384 if w.causal else 512, ""
        if self.exact:
            tokens = 32 if width <= 128 else 16
            causal_tokens, queries = (32, 64) if width <= 64 else (16, 32)
            blocks, prefix = 256 if w.causal else 512, "tf32_"
        all_heads = w.batch * HEADS
        least_chunk = 256 if width < 128 else 2 * width
        most_chunks = min(ceil(w.tokens / least_chunk), ceil(blocks / (all_heads * slices)))
        chunk = _round_up(ceil(w.tokens / most_chunks), queries)
        chunks = ceil(w.tokens / chunk)
        summed = chunks - 1 if w.causal else chunks
        mode = ", Softmax" if stem == "efficient_attention" else ""
        suffix = f"<{self.element}, {width}{mode}>"
        product = 2 * self.elements * width * (3 if self.exact else 1)
        sums = 0 if self.exact else 2 * self.elements * 8  # of weights, by products
        if summed:
            yield Launch(
                stem, f"{prefix}sum_kernel{suffix}", all_heads * summed * slices,
                read=2 * self.tensor, flops=product + sums, iterations=chunk / tokens, inner=0,
            )  # fmt: skip
        if chunks > 1:
            groups, at_once = 256 // (width // 4), 4
            each = ceil(summed / groups)
            yield Launch(
                stem, "merge_kernel", all_heads * width, iterations=ceil(each / at_once),
                after=ceil(each / at_once) if w.causal else 0,
                records=each * (2 if w.causal else 1) + log2(groups), at_once=at_once,
            )  # fmt: skip
        size = {"grid": all_heads * chunks * slices}
        if w.causal:
            seen = causal_tokens if self.exact else 40  # with a warp's 16 queries: 16, 32, 48 or 64
            inside = product * seen / width
            flops = 2 * product + 2 * inside + 2 * sums
            if mode and not self.exact:
                flops += inside - sums  # sums of weights up to each query
            yield Launch(
                stem, f"{prefix}causal_kernel{suffix}", read=2 * self.tensor,
                again=2 * self.tensor, reused=2 * self.tensor, flops=flops,
                iterations=chunk / causal_tokens, **size,
            )  # fmt: skip
        else:
            yield Launch(
                stem, f"{prefix}apply_kernel{suffix}", read=2 * self.tensor, flops=product + sums,
                iterations=chunk / queries, **size,
            )  # fmt: skip

    def aft_full(self) -> Iterator[Launch]:
        w, stem = self.w, "aft_full"
        tiles = w.batch * ceil(w.tokens / 128) * ceil(w.dim / 64)
        seen = w.tokens / 2 if w.causal else w.tokens
        matrix = w.tokens * seen * self.bytes
        yield Launch(
            stem,
            f"maxima_kernel<{self.element}, {self.vector}>",
            ceil(w.tokens / 8) + tiles,
            read=matrix + self.tensor,
            iterations=seen * self.bytes / (32 * 64),
        )
        keys, kernel = 32, f"tensor_kernel<{self.element}, BFloat16, {self.vector}>"
        if self.exact:
            keys, kernel = 16, "float_kernel<float, 4>"
        yield Launch(
            stem,
            kernel,
            tiles,
            read=matrix + 4 * self.tensor,
            again=matrix * (w.batch * ceil(w.dim / 64) - 1),  # groups of channels one after another
            reused=matrix,
            cached=2 * self.tensor * seen / 128,
            flops=w.flops,
            iterations=seen / keys,
        )

    def aft_full_gemm(self) -> Iterator[Launch]:
        w, stem = self.w, AFT_FULL_GEMM
        tiles = w.batch * ceil(w.tokens / 128) * ceil(w.dim / 64)
        types = f"{self.element}, {self.element}, {self.vector}"
        rows = 256 // (64 // self.vector)
        keys = f"maxima_kernel<{self.element}, {self.vector}>"
        yield Launch(stem, keys, tiles, read=self.tensor, iterations=128 / rows / 4)
        yield Launch(
            stem, f"prepare_kernel<{types}>", tiles, read=3 * self.tensor, again=self.tensor,
            reused=self.tensor, iterations=128 / rows / 4, before=w.tokens / 128 / rows,
        )  # fmt: skip
        matrix = w.tokens**2 * self.bytes
        yield Launch(
            stem, "", 0, read=matrix + 4 * self.tensor, flops=w.flops, is_float32=self.exact
        )
        blocks = ceil(self.elements / self.vector / 256)
        yield Launch(stem, f"finish_kernel<{types}>", blocks, read=4 * self.tensor, exposed=2)

    def aft_local(self) -> Iterator[Launch]:
        w, stem = self.w, "aft_local"
        rows, left = 64, WINDOW - 1
        right = 0 if w.causal else left
        band = w.constants * self.bytes
        yield from self._outside(
            stem, f"4, 4, RowMaximum<{self.element}>", rows, left, right, 2 * self.tensor + band
        )
        span = rows + left + right
        yield Launch(
            stem,
            f"tile_kernel<{self.element}, {self.vector}>",
            w.batch * ceil(w.tokens / rows) * ceil(w.dim / 64),
            read=2 * self.tensor,
            again=2 * self.tensor + band,
            reused=2 * self.tensor + band,
            cached=2 * self.tensor * (span / rows - 1) + band * (ceil(w.dim / 64) - 1),
            flops=4 * self.elements * span,
            iterations=ceil(span / 16),
            before=0,
        )

    def aft_conv(self) -> Iterator[Launch]:
        w, stem = self.w, "aft_conv"
        rows, panel, block = 128, 64, 8
        left = TAPS - 1 if w.causal else (TAPS - 1) // 2
        yield from self._outside(
            stem, f"4, 1, FillTable<{self.element}>", rows, left, TAPS - 1 - left, self.tensor
        )
        reached = ((TAPS + block - 2) // block + 1) * block  # keys that a thread multiplies
        yield Launch(
            stem,
            f"tile_kernel<{self.element}, 4>",
            w.batch * ceil(w.tokens / rows) * ceil(w.dim / 64),
            read=2 * self.tensor,
            again=self.tensor,
            reused=self.tensor,
            cached=self.tensor * (TAPS - 1) / rows,
            flops=2 * self.elements * 1.25 * reached,  # a denominator for four channels
            iterations=ceil((rows + TAPS - 1) / panel),
            before=0,
        )

    def _outside(
        self, stem: str, types: str, rows: int, left: int, right: int, read: float
    ) -> Iterator[Launch]:
        """Yield the launches of sums outside a window, without the warps that prepare a table."""
        w, at_once, warps = self.w, 8, 8
        pieces = 2 * ceil(w.tokens / rows) + 1
        cut = abs((rows - left % rows) % rows - right % rows)  # pieces have two lengths in turn
        longest = ceil(max(cut, rows - cut) / at_once)
        mean = (ceil(cut / at_once) + ceil((rows - cut) / at_once)) / 2
        yield Launch(
            stem,
            f"sum_pieces_kernel<{self.element}, {types}>",
            ceil(w.batch * pieces * w.dim / 4 / 128),
            read=read,
            iterations=mean,
            exposed=longest,
        )
        if pieces > 9:
            passes = 2 if w.causal else 3
            yield Launch(
                stem, "scan_pieces_kernel", w.batch * ceil(w.dim / 32),
                iterations=pieces / warps / 4, records=passes * pieces / warps, at_once=4,
            )  # fmt: skip

    def fastformer(self) -> Iterator[Launch]:
        w, stem = self.w, "fastformer"
        slabs, chunks = ceil(w.dim / 64), w.batch * ceil(w.tokens / 64)
        logits = 2 * self.elements * 16
        for products in (False, True) if w.causal else (False, False):
            tensors = 2 if products else 1
            yield Launch(
                stem,
                f"pool_kernel<{self.element}, {str(products).lower()}>",
                chunks * ceil(HEADS / 16),
                read=tensors * self.tensor,
                cached=tensors * self.tensor,  # a chunk's rows for its sums
                flops=logits * (3 if products or self.exact else 2),
                iterations=slabs,
                after=slabs,
                exposed=2 * slabs * tensors,
            )
            yield Launch(
                stem, "merge_kernel", ceil(w.batch * w.dim / 64),
                iterations=ceil(w.tokens / 64) / 8, records=w.tokens / 64, at_once=8,
            )  # fmt: skip
            if w.causal:
                yield Launch(stem, "share_kernel", ceil(chunks * HEADS / 8))
        yield Launch(
            stem,
            f"output_kernel<{self.element}, {str(w.causal).lower()}>",
            chunks * slabs,
            read=(4 if w.causal else 2) * self.tensor,
            exposed=3 if w.causal else 1,
        )


def _round_up(a: int, b: int) -> int:
    return ceil(a / b) * b
