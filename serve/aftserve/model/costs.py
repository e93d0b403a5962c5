"""What a document costs: measured at start on this machine, and how much more at present."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

LENGTHS = (1, 16, 64, 256, 1024, 4096, 16_384)
BATCHES = (2, 4, 8, 16)
BATCH_LENGTHS = (16, 64, 256, 1024)
"""Past these a batch has never been seen to pay on a CPU; none is made."""

GAIN = 0.95
"""A run of several takes clearly less than its documents one by one."""

_ROUNDS = 5
_SLOW_SECONDS = 0.1
_MOST_SECONDS = 0.5
_LONG_CHUNK_SECONDS = 2.0
_SPAN = 8
_STEEPEST_FLAT = 1.5

_HORIZON_SECONDS = 10.0
_PRIOR_SECONDS = 1.0
_PACE_LIMITS = (0.1, 10.0)


@dataclass(frozen=True)
class Measurement:
    """One shape of a run.

    Attributes:
        documents: of the batch.
        tokens: of each.
        seconds: the least of several runs, and no more than a larger one took; ``Pace`` tells
            how busy the machine is.
    """

    documents: int
    tokens: int
    seconds: float


class Costs:
    """Predicts the seconds of a run from measurements.

    Between two measured lengths the prediction is linear. Past the longest it grows with
    the tokens, or with the power of them that the long documents show, where that is
    clearly more: AFT-full is quadratic.

    Args:
        measurements: of single documents of at least one length, and of batches.
        in_chunks: of documents that ran in one and in two chunks, where longer ones run so.
        whole_tokens: most tokens of a document that does not.
    """

    def __init__(
        self,
        measurements: Iterable[Measurement],
        in_chunks: Sequence[Measurement] = (),
        whole_tokens: int = 0,
    ) -> None:
        self._in_chunks = in_chunks
        self._whole_tokens = whole_tokens
        self.measurements = sorted(measurements, key=lambda m: (m.documents, m.tokens))
        self._curves: dict[int, list[Measurement]] = {}
        for measurement in self.measurements:
            self._curves.setdefault(measurement.documents, []).append(measurement)
        self._power = _power(self._curves[1])
        pays = [m for m in self.measurements if m.documents > 1 and self.pays(m)]
        self.batch_tokens = max((m.tokens for m in pays), default=0)
        self.batch_documents = max((m.documents for m in pays), default=1)

    def alone(self, tokens: int) -> float:
        """Seconds of a run of one document, or of all its chunks."""
        longest = self._curves[1][-1]
        if self._in_chunks and tokens > self._whole_tokens:
            one, two = self._in_chunks
            slope = (two.seconds - one.seconds) / (two.tokens - one.tokens)
            # A chunk is run twice, of which a slow moment in the first measurement may hide much.
            slope = max(slope, longest.seconds / longest.tokens)
            # A window may make chunks longer than what the budget lets run whole.
            return one.seconds + slope * max(0, tokens - one.tokens)
        if tokens > longest.tokens:
            return float(longest.seconds * (tokens / longest.tokens) ** self._power)
        return _interpolate(self._curves[1], tokens)

    def together(self, documents: int, tokens: int) -> float:
        """Seconds of a run of several documents padded to ``tokens``.

        Infinite for a batch larger, or of longer documents, than any measured: it is not
        known to pay.
        """
        if documents == 1:
            return self.alone(tokens)
        sizes = [size for size in self._curves if size > 1]
        above = bisect_left(sizes, documents)
        if above == len(sizes) or tokens > self._curves[sizes[above]][-1].tokens:
            return math.inf
        more = _interpolate(self._curves[sizes[above]], tokens)
        if sizes[above] == documents:
            return more
        fewer = self.together(sizes[above - 1], tokens) if above else self.alone(tokens)
        below = sizes[above - 1] if above else 1
        return fewer + (more - fewer) * (documents - below) / (sizes[above] - below)

    def pays(self, batch: Measurement) -> bool:
        """Whether a measured batch took clearly less than its documents one by one."""
        return batch.seconds < GAIN * batch.documents * self.alone(batch.tokens)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what was measured, and what follows for batches."""
        return {
            "measurements": [asdict(m) | {"pays": self.pays(m)} for m in self.measurements],
            "batch_up_to_tokens": self.batch_tokens,
            "batch_up_to_documents": self.batch_documents,
            "in_chunks": [asdict(m) for m in self._in_chunks],
        }


class Pace:
    """The ratio of actual to calibrated seconds over the last runs.

    Others share the machine, and batches gain: with every prediction multiplied by this,
    it stays true. A run counts by its length, and an old one less.
    """

    def __init__(self) -> None:
        self._calibrated = self._actual = _PRIOR_SECONDS

    @property
    def value(self) -> float:
        """Multiplies calibrated seconds."""
        low, high = _PACE_LIMITS
        return min(max(self._actual / self._calibrated, low), high)

    def observe(self, calibrated: float, actual: float) -> None:
        """Takes a run into account.

        Args:
            calibrated: seconds its documents would take one by one.
            actual: seconds it took.
        """
        fading = math.exp(-actual / _HORIZON_SECONDS)
        self._calibrated = self._calibrated * fading + calibrated
        self._actual = self._actual * fading + actual


def calibrate(
    run: Callable[[int, int], object],
    *,
    min_tokens: int,
    max_tokens: int,
    budget_tokens: int,
    batching: bool = True,
) -> Costs:
    """Times runs of growing documents and batches, some seconds in all.

    Args:
        run: runs a batch of so many documents of so many tokens.
        min_tokens, max_tokens: of a document that runs whole.
        budget_tokens: of a run, padding included.
        batching: whether documents may share a run; batches that are not measured are not made.
    """
    longest = max(min(max_tokens, budget_tokens), min_tokens)
    shapes: list[tuple[int, int]] = []
    for tokens in sorted({min(max(length, min_tokens), longest) for length in LENGTHS}):
        shapes.append((1, tokens))
        # The first run of a shape allocates, and is not counted: where it takes long, that may be
        # why, or a slow moment of the machine.
        if all(_seconds(run, 1, tokens) > _MOST_SECONDS for _ in range(2)):
            break
    singles = _measured(run, shapes, _SLOW_SECONDS * _ROUNDS)
    alone = {m.tokens: m.seconds for m in singles}
    shapes = [
        (documents, tokens)
        for tokens in filter(alone.__contains__, BATCH_LENGTHS)
        for documents in (BATCHES if batching else ())
        if documents * tokens <= budget_tokens and documents * alone[tokens] <= _SLOW_SECONDS
    ]
    for shape in shapes:
        run(*shape)
    return Costs(_increasing([*singles, *_measured(run, shapes, _SLOW_SECONDS * _ROUNDS)]))


def measured_chunk(costs: Costs, chunk_tokens: int) -> int:
    """The tokens of a chunk to measure by: as it runs, but where even one would take long."""
    while chunk_tokens > 1 and costs.alone(chunk_tokens) > _LONG_CHUNK_SECONDS:
        chunk_tokens //= 2
    return chunk_tokens


def measure_chunks(
    run: Callable[[int], object], chunk_tokens: int, max_tokens: int
) -> list[Measurement]:
    """Times a document of one chunk and one of two, or of half a chunk and a whole one.

    Args:
        run: runs one document of so many tokens in chunks.
        chunk_tokens: of a chunk.
        max_tokens: most tokens of a document; none is made that is longer.
    """
    longer = max(min(2 * chunk_tokens, max_tokens), 2)
    shapes = [(1, min(chunk_tokens, longer // 2)), (1, longer)]
    return _measured(lambda _, tokens: run(tokens), shapes, _SLOW_SECONDS)


def _measured(
    run: Callable[[int, int], object], shapes: Iterable[tuple[int, int]], enough: float
) -> list[Measurement]:
    """The least of two runs of each shape, or more until they took ``enough`` seconds in all.

    In turn: a slow moment of the machine falls on a few runs of each, not on all of one.
    """
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(_ROUNDS):
        for shape, taken in seconds.items():
            if len(taken) < 2 or sum(taken) < enough:
                taken.append(_seconds(run, *shape))
    return [Measurement(*shape, min(taken)) for shape, taken in seconds.items()]


def _increasing(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Every run takes at most as long as one of no fewer documents of no fewer tokens.

    What was measured otherwise is the machine's doing, as where a small run finds the cache filled
    by a large one before it; two documents that seem to cost more than four would never be joined,
    so that no four were either.
    """
    return [
        replace(
            one,
            seconds=min(
                other.seconds
                for other in measurements
                if other.documents >= one.documents and other.tokens >= one.tokens
            ),
        )
        for one in measurements
    ]


def _seconds(run: Callable[[int, int], object], documents: int, tokens: int) -> float:
    start = time.perf_counter()
    run(documents, tokens)
    return time.perf_counter() - start


def _interpolate(curve: Sequence[Measurement], tokens: int) -> float:
    above = bisect_left(curve, tokens, key=lambda m: m.tokens)
    if above == 0:
        return curve[0].seconds
    low, high = curve[above - 1], curve[above]
    share = (tokens - low.tokens) / (high.tokens - low.tokens)
    return low.seconds + (high.seconds - low.seconds) * share


def _power(curve: Sequence[Measurement]) -> float:
    """The power of the tokens that the seconds grow with; 1 unless it is clearly more.

    Taken over a wide span: one slow moment of the machine must not make a model quadratic.
    """
    high = curve[-1]
    low = next((m for m in reversed(curve) if m.tokens * _SPAN <= high.tokens), high)
    if low is high:
        return 1.0
    power = math.log(high.seconds / low.seconds) / math.log(high.tokens / low.tokens)
    return power if power > _STEEPEST_FLAT else 1.0
