"""The launches of LayerNormFastformer, as its source cuts them."""

from collections.abc import Iterator
from math import ceil

from benchmarks.gpu.launch import Launch, Sizes
from benchmarks.gpu.workloads import HEADS, LAYER


class EncoderLaunches(Sizes):
    """The launches of what surrounds a mechanism."""

    def pool_tile(self) -> int:
        """Return the rows of a tile of 32 KiB."""
        return next(rows for rows in (64, 32, 16) if rows * self.w.dim * self.bytes <= 32 * 1024)

    def layer_norm_fastformer(self) -> Iterator[Launch]:
        w, stem = self.w, LAYER
        matrix = float(w.dim**2 * self.bytes)
        yield from self._global_vectors()
        depth, across = 64 // self.bytes, ceil(w.dim / (256 // self.bytes))
        split = 3 if self.exact else 1
        for fold, rows in ((True, w.dim), (False, w.tokens)):
            yield Launch(
                stem,
                f"product_kernel<{self.element}, {str(fold).lower()}>",
                w.batch * ceil(rows / 128) * across,
                read=3 * matrix if fold else 2 * self.tensor + matrix,
                cached=0 if fold else (across - 1) * self.tensor,
                flops=2 * w.batch * rows * w.dim**2 * split,
                iterations=w.dim / depth,
                exposed=2,
            )

    def _global_vectors(self) -> Iterator[Launch]:
        """Yield the launches from the input to the last vector of a document."""
        w, stem = self.w, LAYER
        tiles = ceil(w.tokens / 64)
        chunk = ceil(tiles / 256)  # tiles of 64 tokens
        chunks, slabs = ceil(tiles / chunk), ceil(w.dim / 64)
        tile, groups = self.pool_tile(), ceil(HEADS / 8)
        matrix = float(w.dim**2 * self.bytes)
        vectors = w.batch * ceil(w.dim / 32)
        for first in (True, False):
            name = f"<{self.element}, {str(first).lower()}>"
            yield Launch(
                stem,
                f"tile_pool_kernel<{self.element}, {tile}, {str(first).lower()}>",
                w.batch * chunks * groups,
                read=self.tensor,
                cached=(groups - 1) * self.tensor,
                flops=2 * self.elements * 8 * (6 if self.exact else 5),
                iterations=chunk * 64 / tile,
                inner=w.dim * self.bytes / 16 / (256 / tile) / 4,  # moments, four vectors at once
                exposed=chunk * 64 / tile,  # the copy of a tile has one tile's work to hide behind
            )
            yield Launch(
                stem, "merge_kernel", ceil(w.batch * w.dim * HEADS / 8),
                iterations=chunks / 256, records=ceil(chunks / 32) + 5, at_once=8,
            )  # fmt: skip
            yield Launch(
                stem, f"global_kernel{name}", vectors, read=matrix, iterations=w.dim / 64,
                exposed=w.dim / 64,
            )  # fmt: skip
            if first:
                yield Launch(
                    stem, f"beta_kernel<{self.element}>", w.batch * slabs, read=matrix,
                    flops=w.batch * 2 * w.dim**2 * 16 * 3, iterations=slabs, exposed=2,
                )  # fmt: skip
        yield Launch(
            stem, f"bias_kernel<{self.element}>", vectors, read=matrix, iterations=w.dim / 64,
            exposed=w.dim / 64,
        )  # fmt: skip
