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
SIGMOID = 0
"""The gate of all workloads, as it is among the kernels' template arguments."""


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
        wanted = ceil(256 / (groups * w.batch))
        chunk = _round_up(ceil(w.tokens / min(wanted, ceil(w.tokens / least_chunk))), least_chunk)
        chunks = ceil(w.tokens / chunk)
        grid, kernel = groups * chunks * w.batch, f"<{self.element}, {self.vector}"
        gated = f"{kernel}, {SIGMOID}>"
        size = {"grid": grid, "iterations": chunk / step}
        if chunks == 1 and not w.causal:
            yield Launch(stem, f"single_chunk_kernel{gated}", read=4 * self.tensor, **size)
            return
        if chunks > 1:
            yield Launch(stem, f"sum_kernel{kernel}>", read=2 * self.tensor, **size)
        # Every block reads the records of its channels, several threads a channel, four at once.
        each = chunks / (256 / (8 * self.vector))
        records = {
            "cached": 16.0 * grid * chunks * 8 * self.vector, "before": each / 4,
            "records": each, "at_once": 4,
        }  # fmt: skip
        if w.causal:
            again = 2 * self.tensor if chunks > 1 else 0
            yield Launch(
                stem, f"causal_kernel{gated}", read=4 * self.tensor - again, again=again,
                reused=2 * self.tensor, exposed=chunk / step, **records, **size,
            )  # fmt: skip
        else:
            yield Launch(
                stem, f"gate_kernel{gated}", read=2 * self.tensor, exposed=2, **records, **size
            )

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
        is_softmax = stem == "efficient_attention"
        suffix = f"<{self.element}, {width}, {'Softmax' if is_softmax else 'Linear'}>"
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
            if is_softmax and not self.exact:
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
            # Groups of channels come one after another, documents last. Two blocks at once on each
            # of 132 multiprocessors read the same keys.
            read=matrix + 4 * self.tensor,
            again=matrix * (w.batch - 1) + 2 * self.tensor * max(0, tiles / 264 - 1),
            reused=max(matrix if w.batch > 1 else 0, 2 * self.tensor),
            cached=matrix * w.batch * (ceil(w.dim / 64) - 1) + 2 * self.tensor * seen / 128,
            before=seen / 128 / 16,
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
        finish = f"finish_kernel<{types}, {SIGMOID}>"
        yield Launch(stem, finish, blocks, read=4 * self.tensor, exposed=2)

    def aft_local(self) -> Iterator[Launch]:
        w, stem = self.w, "aft_local"
        rows, left, keys = 128, WINDOW - 1, 16 if self.exact else 32
        right = 0 if w.causal else left
        band = w.constants * self.bytes
        weights = w.tokens * _round_up(left + right + self.vector, self.vector) * self.bytes
        yield from self._outside(
            stem, f"4, 4, PrepareWeights<{self.element}>", rows, left, right,
            2 * self.tensor + band + weights,
        )  # fmt: skip
        span = rows + left + right
        yield Launch(
            stem,
            f"tile_kernel<{self.element}, {self.vector}, 0>",
            w.batch * ceil(w.tokens / rows) * ceil(w.dim / 64),
            read=2 * self.tensor,
            again=2 * self.tensor + weights,
            reused=2 * self.tensor + weights,
            cached=2 * self.tensor * (span / rows - 1) + weights * (ceil(w.dim / 64) - 1),
            flops=4 * self.elements * span,
            iterations=ceil(span / keys),
            before=0,
        )

    def aft_conv(self) -> Iterator[Launch]:
        w, stem = self.w, "aft_conv"
        rows, panel, block = 128, 64, 8
        left = TAPS - 1 if w.causal else (TAPS - 1) // 2
        yield from self._outside(
            stem, f"4, 1, FillTable<{self.element}>", rows, left, TAPS - 1 - left, self.tensor
        )
        memory = {"read": 2 * self.tensor, "again": self.tensor, "reused": self.tensor}
        memory["cached"] = self.tensor * (TAPS - 1) / rows
        grid = w.batch * ceil(w.tokens / rows) * ceil(w.dim / 64)
        if self.exact:
            reached = ((TAPS + block - 2) // block + 1) * block  # keys that a thread multiplies
            yield Launch(
                stem, f"tile_kernel<{self.element}, 4, 0>", grid,
                flops=2 * self.elements * 1.25 * reached,  # a denominator for four channels
                iterations=ceil((rows + TAPS - 1) / panel), before=0, **memory,
            )  # fmt: skip
        else:
            steps = ceil((rows + TAPS - 1) / 32)
            yield Launch(
                stem, f"product_kernel<{self.element}, 0>", grid,
                flops=2 * self.elements * 1.125 * 32 * steps,  # and a product with ones
                iterations=steps, before=0, **memory,
            )  # fmt: skip

    def _outside(
        self, stem: str, types: str, rows: int, left: int, right: int, read: float
    ) -> Iterator[Launch]:
        """Yield the launches of sums outside a window, without the warps that prepare a table."""
        w, at_once = self.w, 8
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
            yield from self._scan(stem, pieces)

    def _scan(self, stem: str, pieces: int) -> Iterator[Launch]:
        """Yield the launches of a scan of pieces from both ends, by a tree of radix 64."""
        w, radix, slots, each = self.w, 64, 16, 4
        groups, levels, count = w.batch * ceil(w.dim / 64), 0, pieces
        record = 12 * w.batch * w.dim
        while count > radix:
            nodes, levels = ceil(count / radix), levels + 1
            yield Launch(
                stem, "total_kernel<4>", groups * nodes, again=record * count,
                iterations=(slots - 1) / 3, records=each + slots - 1, at_once=each,
            )  # fmt: skip
            count = nodes
        # Two of 16 slots scan the others: on average, a warp runs each of these loops about once.
        yield Launch(
            stem, "scan_kernel<4>", groups * ceil(pieces / radix),
            again=record * pieces * (2 if w.causal else 3), iterations=levels, after=1,
            records=each * (levels + 1) + 2 * slots - 1, at_once=each,
        )  # fmt: skip

    def fastformer(self) -> Iterator[Launch]:
        """Fastformer, with rows whose tiles fit the shared memory where it is not causal."""
        w, stem = self.w, "fastformer"
        slabs = ceil(w.dim / 64)
        if w.causal:
            yield from self._causal_fastformer()
            return
        tile, most_blocks, heads = self.pool_tile(), 512, ceil(HEADS / 8)
        tiles = ceil(w.tokens / tile)
        chunk = max(ceil(64 / tile), ceil(tiles * w.batch * heads / most_blocks))  # tiles
        chunks = ceil(tiles / chunk)
        for _ in ("query", "key"):
            yield Launch(
                stem,
                f"tile_kernel<{self.element}, {tile}>",
                w.batch * chunks * heads,
                read=self.tensor,
                cached=(heads - 1) * self.tensor,
                flops=2 * self.elements * 8 * (6 if self.exact else 3),
                iterations=chunk,
                exposed=chunk,  # the copy of a tile has one tile's work to hide behind
            )
            lane, levels = ceil(chunks / 32), 5
            yield Launch(
                stem, "merge_kernel", ceil(w.batch * w.dim / 8), iterations=lane / 8,
                records=lane + levels, at_once=8,
            )  # fmt: skip
        rows = 4 * 256 * self.vector // 64
        yield Launch(
            stem,
            f"output_kernel<{self.element}, {self.vector}>",
            w.batch * ceil(w.tokens / rows) * slabs,
            read=2 * self.tensor,
        )

    def _causal_fastformer(self) -> Iterator[Launch]:
        w, stem = self.w, "fastformer"
        slabs, chunks = ceil(w.dim / 64), w.batch * ceil(w.tokens / 64)
        for products in (False, True):
            tensors = 2 if products else 1
            yield Launch(
                stem,
                f"pool_kernel<{self.element}, {str(products).lower()}>",
                chunks * ceil(HEADS / 16),
                read=tensors * self.tensor,
                cached=tensors * self.tensor,  # a chunk's rows for its sums
                flops=2 * self.elements * 16 * (3 if products or self.exact else 2),
                iterations=slabs,
                after=slabs,
                exposed=2 * slabs * tensors,
            )
            yield from self._scans(stem, ceil(w.tokens / 64))
            yield Launch(stem, "share_kernel", ceil(chunks * HEADS / 8))
        yield Launch(
            stem, f"causal_output_kernel<{self.element}>", chunks * slabs, read=4 * self.tensor,
            exposed=3,
        )  # fmt: skip

    def _scans(self, stem: str, records: int) -> Iterator[Launch]:
        """Yield the launches that scan the sums of chunks."""
        w, most, warp = self.w, 256, 32
        groups, blocks = ceil(records / most), ceil(w.batch * w.dim / 8)
        lane = ceil(min(records, most) / warp)
        levels = 5  # of a warp's lanes
        if groups > 1:
            yield Launch(
                stem, "group_kernel", blocks * groups, iterations=lane / 8, records=lane + levels,
                at_once=8,
            )  # fmt: skip
        yield Launch(
            stem, "scan_kernel", blocks * groups, iterations=lane / 8, before=lane / 8,
            records=2 * (lane + levels) + ceil(groups / warp), at_once=8,
        )  # fmt: skip


def _round_up(a: int, b: int) -> int:
    return ceil(a / b) * b
