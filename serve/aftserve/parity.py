"""Does the server still answer what PyTorch does? At start, on demand, and in passing."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import EngineError
from aftexport.manifest import Manifest
from aftexport.parity import Case, Comparison, compare
from aftserve.batching import Result
from aftserve.classifier import Tokens
from aftserve.errors import RefusedError
from aftserve.metrics import Metrics
from aftserve.reference_process import ReferenceError, ReferenceProcess
from aftserve.schemas import GoldenCase, OutputParity, ParityCheck, ParityReport

logger = logging.getLogger(__name__)

Logits = NDArray[np.float64]
_MOST_PENDING = 4
_MOST_TOKENS = 1 << 16
"""Of a document checked in passing: PyTorch in float64 would take minutes and gigabytes."""


class Parity:
    """Keeps what is known of it, and tells when it is broken.

    Args:
        manifest: of the bundle.
        golden: the bundle's own cases, run through the served engine.
        reference: PyTorch; None where there is no model file to compare with.
        share: of live documents that are checked in passing.
        alone: runs a document by itself.
        seconds: that a check in passing may take.
        on_breach: called with the reason where a check is outside its bound.
        metrics: what it counts.
    """

    def __init__(
        self,
        manifest: Manifest,
        golden: Sequence[Comparison],
        reference: ReferenceProcess | None,
        *,
        share: float,
        alone: Callable[[Tokens], Awaitable[Result]],
        seconds: float,
        on_breach: Callable[[str], None],
        metrics: Metrics,
    ) -> None:
        self._manifest = manifest
        self.golden = golden
        self._reference = reference
        self._share = share
        self._alone = alone
        self._seconds = seconds
        self._on_breach = on_breach
        self._metrics = metrics
        self._pending: set[asyncio.Task[None]] = set()

    def report(self) -> ParityReport:
        """What ``GET /parity`` answers."""
        return ParityReport(
            golden=[GoldenCase.model_validate(result.to_dict()) for result in self.golden],
            within=all(result.passed for result in self.golden),
            reference=self._reference is not None,
            shadow=self._share,
        )

    async def check(self, ids: Tokens, served: Logits) -> ParityCheck:
        """Compares the served logits of a document with PyTorch's.

        Raises:
            ReferenceError: where there is no reference, or it fails.
        """
        if self._reference is None:
            raise ReferenceError(
                "The server has no PyTorch model to compare with.",
                "Start it with --reference and the model file the bundle was exported from.",
            )
        expected = await self._reference.logits(ids)
        result = self._judge("reference", ids, served, expected)
        outputs = [
            OutputParity(label=label, served=ours, reference=theirs, difference=abs(ours - theirs))
            for label, ours, theirs in zip(
                self._manifest.labels, served.tolist(), expected.tolist(), strict=True
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
                    alone = await self._alone(ids)
                    self._judge("batch", ids, served, alone.answer.logits)
                if self._reference is not None:
                    await self.check(ids, served)
        except (RefusedError, EngineError, TimeoutError) as error:
            self._metrics.skipped_checks.inc()
            logger.warning("a check of parity was not possible: %s", str(error) or "too slow")

    def _judge(self, kind: str, ids: Tokens, served: Logits, expected: Logits) -> Comparison:
        case = Case(kind, "model", {"input_ids": ids[None]}, expected[None])
        result = compare(
            case, served[None], self._manifest.precision, bound=self._manifest.tolerance
        )
        self._metrics.parity_error.labels(kind).observe(result.error)
        self._metrics.parity_checks.labels(kind, "within" if result.passed else "outside").inc()
        if not result.passed:
            self._on_breach(
                f"a document of {len(ids)} tokens differs by {result.error:.1e} from "
                f"{'PyTorch' if kind == 'reference' else 'its run alone'}, bound {result.bound:.0e}"
            )
        return result
