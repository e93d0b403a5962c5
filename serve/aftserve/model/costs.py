"""The cost of documents: measured at start on this machine, and the current slowdown."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

LENGTHS = (1, 16, 64, 256, 1024, 4096, 16_384)
BATCHES = (2, 4, 8, 16)
BATCH_LENGTHS = (16, 64, 256, 1024)
"""Longer documents have single runs: on CPUs, no batch of them was faster."""

MIN_BATCH_GAIN = 0.05
"""Minimum share of the time of single runs that a batch must save."""

_ROUNDS = 5
_SLOW_SECONDS = 0.1
_MAX_SECONDS = 0.5
_LONG_CHUNK_SECONDS = 2.0
_POWER_LENGTH_RATIO = 8
_MAX_LINEAR_POWER = 1.5

_HORIZON_SECONDS = 10.0
_PRIOR_SECONDS = 1.0
_SLOWDOWN_LIMITS = (0.1, 10.0)


@dataclass(frozen=True)
class Measurement:
    """The measured time of one shape of a run.

    Attributes:
        documents: number of documents.
        tokens: length of each document.
        seconds: minimum of several runs, and at most the time of a larger shape.
            ``SlowdownFactor`` measures how busy the machine is.
    """

    documents: int
    tokens: int
    seconds: float


class CostModel:
    """A prediction of the seconds of a run, from measurements.

    Between two measured lengths the prediction is linear. Past the longest it grows linearly, or
    with the power that the long documents show if that is clearly greater: AFT-full is quadratic.

    Args:
        measurements: times of single documents of at least one length, and of batches.
        in_chunks: times of a document in one chunk and of one in two; empty if none runs in
            chunks.
        whole_tokens: maximum length of a document that does not run in chunks.
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

    def single(self, tokens: int) -> float:
        """Return the seconds of one document, in one run or in all its chunks."""
        longest = self._curves[1][-1]
        if self._in_chunks and tokens > self._whole_tokens:
            one, two = self._in_chunks
            slope = (two.seconds - one.seconds) / (two.tokens - one.tokens)
            # A slow moment in the first measurement would make the slope too small.
            slope = max(slope, longest.seconds / longest.tokens)
            # A window may make chunks longer than the longest document that runs whole.
            return one.seconds + slope * max(0, tokens - one.tokens)
        if tokens > longest.tokens:
            return float(longest.seconds * (tokens / longest.tokens) ** self._power)
        return _interpolate(self._curves[1], tokens)

    def batch(self, documents: int, tokens: int) -> float:
        """Return the seconds of a run of several documents padded to ``tokens``.

        A batch with more or longer documents than any measured one takes infinite seconds, because
        it may be slower than single runs.
        """
        if documents == 1:
            return self.single(tokens)
        sizes = [size for size in self._curves if size > 1]
        above = bisect_left(sizes, documents)
        if above == len(sizes) or tokens > self._curves[sizes[above]][-1].tokens:
            return math.inf
        more = _interpolate(self._curves[sizes[above]], tokens)
        if sizes[above] == documents:
            return more
        fewer = self.batch(sizes[above - 1], tokens) if above else self.single(tokens)
        below = sizes[above - 1] if above else 1
        return fewer + (more - fewer) * (documents - below) / (sizes[above] - below)

    def pays(self, batch: Measurement) -> bool:
        """Return whether a measured batch took clearly less time than single runs."""
        return batch.seconds < (1 - MIN_BATCH_GAIN) * batch.documents * self.single(batch.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements, and the resulting limits of batches, ready for JSON."""
        return {
            "measurements": [asdict(m) | {"pays": self.pays(m)} for m in self.measurements],
            "batch_up_to_tokens": self.batch_tokens,
            "batch_up_to_documents": self.batch_documents,
            "in_chunks": [asdict(m) for m in self._in_chunks],
        }


class SlowdownFactor:
    """The ratio of actual to calibrated seconds over the last runs.

    Predictions are multiplied by it, because other processes share the machine and batches save
    time. Each run counts by its length, and old runs count less.
    """

    def __init__(self) -> None:
        self._calibrated = self._actual = _PRIOR_SECONDS

    @property
    def value(self) -> float:
        """The factor of calibrated seconds."""
        low, high = _SLOWDOWN_LIMITS
        return min(max(self._actual / self._calibrated, low), high)

    def observe(self, calibrated: float, actual: float) -> None:
        """Take a run into account.

        Args:
            calibrated: calibrated seconds of single runs of its documents.
            actual: measured seconds of the run.
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
) -> CostModel:
    """Measure runs of growing documents and batches, for some seconds in total.

    Args:
        run: function that runs a batch, given the number of documents and their length.
        min_tokens, max_tokens: limits on the length of a document that runs whole.
        budget_tokens: maximum tokens of a run, padding included.
        batching: whether documents may share a run; only measured batches are used.
    """
    longest = max(min(max_tokens, budget_tokens), min_tokens)
    shapes: list[tuple[int, int]] = []
    for tokens in sorted({min(max(length, min_tokens), longest) for length in LENGTHS}):
        shapes.append((1, tokens))
        # The first run of a shape does not count, because it allocates memory. It may also be slow
        # by chance, so only two slow runs end the series.
        if all(_seconds(run, 1, tokens) > _MAX_SECONDS for _ in range(2)):
            break
    singles = _measured(run, shapes, _SLOW_SECONDS * _ROUNDS)
    single_seconds = {m.tokens: m.seconds for m in singles}
    shapes = [
        (documents, tokens)
        for tokens in filter(single_seconds.__contains__, BATCH_LENGTHS)
        for documents in (BATCHES if batching else ())
        if documents * tokens <= budget_tokens
        and documents * single_seconds[tokens] <= _SLOW_SECONDS
    ]
    for shape in shapes:
        run(*shape)
    return CostModel(_increasing([*singles, *_measured(run, shapes, _SLOW_SECONDS * _ROUNDS)]))


def measured_chunk(costs: CostModel, chunk_tokens: int) -> int:
    """Return the chunk length to measure: the real one, or less if one chunk takes too long."""
    while chunk_tokens > 1 and costs.single(chunk_tokens) > _LONG_CHUNK_SECONDS:
        chunk_tokens //= 2
    return chunk_tokens


def measure_chunks(
    run: Callable[[int], object], chunk_tokens: int, max_tokens: int
) -> list[Measurement]:
    """Measure a document of one chunk and one of two, or of half a chunk and a whole one.

    Args:
        run: function that runs one document of a given length in chunks.
        chunk_tokens: length of a chunk.
        max_tokens: maximum length of a document.
    """
    longer = max(min(2 * chunk_tokens, max_tokens), 2)
    shapes = [(1, min(chunk_tokens, longer // 2)), (1, longer)]
    return _measured(lambda _, tokens: run(tokens), shapes, _SLOW_SECONDS)


def _measured(
    run: Callable[[int, int], object], shapes: Iterable[tuple[int, int]], enough: float
) -> list[Measurement]:
    """Return the minimum of at least two runs of each shape, up to ``enough`` seconds in total.

    The shapes take turns, so that a slow moment of the machine does not hit all runs of one.
    """
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(_ROUNDS):
        for shape, taken in seconds.items():
            if len(taken) < 2 or sum(taken) < enough:
                taken.append(_seconds(run, *shape))
    return [Measurement(*shape, min(taken)) for shape, taken in seconds.items()]


def _increasing(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Limit the time of every shape to the times of larger shapes.

    A small run may measure slower than a large one, for example because its cache is cold. If two
    documents seemed to cost more than four, no batch would grow from two documents to four.
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
    """Return the power of the length with which the time grows; 1 unless it is clearly larger.

    The power covers a wide range of lengths, so that one slow moment does not make it quadratic.
    """
    high = curve[-1]
    low = next((m for m in reversed(curve) if m.tokens * _POWER_LENGTH_RATIO <= high.tokens), high)
    if low is high:
        return 1.0
    power = math.log(high.seconds / low.seconds) / math.log(high.tokens / low.tokens)
    return power if power > _MAX_LINEAR_POWER else 1.0
