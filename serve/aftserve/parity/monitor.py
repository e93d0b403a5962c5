"""Does the server still answer what PyTorch does? At start, on demand, and in passing."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import EngineError
from aftexport.parity import Case, Comparison, compare
from aftserve.errors import NotFoundError, RefusedError
from aftserve.model.active import Served
from aftserve.observability.metrics import Metrics
from aftserve.parity.reference import ReferenceProcess
from aftserve.scheduling.job import Result
from aftserve.schemas import GoldenCase, OutputParity, ParityCheck, ParityReport
from aftserve.types import Tokens

logger = logging.getLogger("aftserve.parity")

Logits = NDArray[np.float64]
_MOST_PENDING = 4
_MOST_TOKENS = 1 << 16
"""Of a document checked in passing: PyTorch in float64 would take minutes and gigabytes."""


class Parity:
    """Keeps what is known of it, and tells when it is broken.

    Args:
        served: what is compared.
        reference: PyTorch; None where there is no model file to compare with.
        share: of live documents that are checked in passing.
        alone: runs a document of it by itself.
        seconds: that a check in passing may take.
        on_breach: called with it and the reason where a check is outside its bound.
        metrics: what it counts.
    """

    def __init__(
        self,
        served: Served,
        reference: ReferenceProcess | None,
        *,
        share: float,
        alone: Callable[[Served, Tokens], Awaitable[Result]],
        seconds: float,
        on_breach: Callable[[Served, str], None],
        metrics: Metrics,
    ) -> None:
        self.served = served
        self._reference = reference
        self._share = share
        self._alone = alone
        self._seconds = seconds
        self._on_breach = on_breach
        self._metrics = metrics
        self._pending: set[asyncio.Task[None]] = set()
        self._holders = 0
        self._retired = False

    def report(self) -> ParityReport:
        """What ``GET /parity`` answers."""
        golden = self.served.model.golden
        return ParityReport(
            golden=[GoldenCase.model_validate(result.to_dict()) for result in golden],
            within=all(result.passed for result in golden),
            reference=self._reference is not None,
            shadow=self._share,
        )

    async def check(self, ids: Tokens, served: Logits) -> ParityCheck:
        """Compares the served logits of a document with PyTorch's.

        Raises:
            NotFoundError: where there is no reference.
            ReferenceError: where it fails.
        """
        if self._reference is None:
            raise NotFoundError(
                "The server has no PyTorch model to compare with.",
                "Start it with --reference and the model file the bundle was exported from.",
            )
        expected = await self._reference.logits(ids)
        result = self._judge("reference", ids, served, expected)
        outputs = [
            OutputParity(label=label, served=ours, reference=theirs, difference=abs(ours - theirs))
            for label, ours, theirs in zip(
                self.served.bundle.manifest.labels, served.tolist(), expected.tolist(), strict=True
            )
        ]
        return ParityCheck(
            tokens=len(ids),
            outputs=outputs,
            error=result.error,
            bound=result.bound,
            within=result.passed,
            label_flips=result.label_flips,
        )

    def sample(self, ids: Tokens, result: Result) -> None:
        """Checks an answered document in passing, if its lot is drawn; waits for nothing."""
        if random.random() >= self._share:
            return
        if len(self._pending) >= _MOST_PENDING or len(ids) > _MOST_TOKENS:
            self._metrics.skipped_checks.inc()
            return
        task = asyncio.create_task(self._shadow(ids, result))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Self]:
        """While the block runs, there is something to compare with."""
        self._holders += 1
        try:
            yield self
        finally:
            self._holders -= 1
            await self._close_if_done()

    async def retire(self) -> None:
        """Closes it once nobody holds it: others are served by another bundle."""
        self._retired = True
        await self._close_if_done()

    async def _close_if_done(self) -> None:
        if self._retired and not self._holders:
            await self.close()

    async def close(self) -> None:
        """Ends what is under way, and the reference."""
        for task in self._pending:
            task.cancel()
        if self._reference is not None:
            await self._reference.close()

    async def _shadow(self, ids: Tokens, result: Result) -> None:
        served = result.answer.logits
        try:
            async with asyncio.timeout(self._seconds):
                if result.batch_documents > 1:
                    alone = await self._alone(self.served, ids)
                    self._judge("batch", ids, served, alone.answer.logits)
                if self._reference is not None:
                    await self.check(ids, served)
        except (RefusedError, EngineError, TimeoutError) as error:
            self._metrics.skipped_checks.inc()
            logger.warning("a check of parity was not possible: %s", str(error) or "too slow")

    def _judge(self, kind: str, ids: Tokens, served: Logits, expected: Logits) -> Comparison:
        case = Case(kind, "model", {"input_ids": ids[None]}, expected[None])
        manifest = self.served.bundle.manifest
        result = compare(case, served[None], manifest.precision, bound=manifest.tolerance)
        self._metrics.parity_error.labels(kind).observe(result.error)
        self._metrics.parity_checks.labels(kind, "within" if result.passed else "outside").inc()
        if not result.passed:
            other = "PyTorch" if kind == "reference" else "its run alone"
            self._on_breach(
                self.served,
                f"a document of {len(ids)} tokens differs by {result.error:.1e} from {other}, "
                f"bound {result.bound:.0e}",
            )
        return result
