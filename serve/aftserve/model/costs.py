"""The cost of documents on this machine: measurements, predictions and their correction."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from aftexport.engines import RunStoppedError, Stop

MIN_BATCH_GAIN = 0.05
"""Minimum share of the time of single runs that a batch must save."""
_POWER_LENGTH_RATIO = 8
_MAX_LINEAR_POWER = 1.5
_UNMEASURED_CHUNK_FACTOR = 4.0
"""Assumed time of a chunk, over that of a whole document of its length, before chunks are run."""
_HORIZON_SECONDS = 10.0
_PRIOR_SECONDS = 1.0
_MIN_FACTOR, _MAX_FACTOR = 0.1, 10.0
LENGTHS = (1, 16, 64, 256, 1024, 4096, 16_384)
BATCHES = (2, 4, 8, 16)
BATCH_LENGTHS = (16, 64, 256, 1024)
"""Longer documents have single runs: on CPUs, no batch of them was faster."""
_FIRST_SECONDS = 0.5
"""Maximum time of the runs for the first estimates, besides the first run."""
_LINEAR_TOKENS = 64
"""Length up to which the time of the next first run is predicted by its length, not by the square.

Most of the time of such a run does not depend on its length, and by the square one slow moment of
the machine in the run of one token would end the series, and count millions of times.
"""
_ROUNDS = 5
_SLOW_SECONDS = 0.1
_MAX_SECONDS = 0.5
_LONG_CHUNK_SECONDS = 0.5
_FIRST_POWER = 2.0
"""Assumed power of the length with which the time of long documents grows, until it is known."""


@dataclass(frozen=True)
class Measurement:
    """The measured time of one shape of a run."""

    documents: int
    tokens: int  # of each document
    seconds: float  # minimum of several runs, and at most the time of a larger shape


class CostModel:
    """A prediction of the seconds of a run, from measurements.

    Between two measured lengths the prediction is linear. Past the longest it grows linearly, or
    with the power that the long documents show if that is clearly greater: AFT-full is quadratic.
    Softmax attention is quadratic too, but most of the time of its measured lengths may be linear.
    """

    def __init__(
        self,
        # Of single documents of at least one length, and of batches.
        measurements: Iterable[Measurement],
        # Of a document in one chunk and of one in two; empty before these are measured.
        in_chunks: Sequence[Measurement] = (),
        whole_tokens: int | None = None,  # longer documents run in chunks; None if none does
        *,
        chunk_tokens: int = 1,
        min_power: float = 1.0,  # of the length, past the longest measured one
        # length at which the pairs of tokens take as long as the products; None without pairs
        quadratic_tokens: int | None = None,
    ) -> None:
        self._in_chunks = in_chunks
        self._whole_tokens = whole_tokens
        self._chunk_tokens = chunk_tokens
        self._quadratic_tokens = quadratic_tokens
        self.measurements = sorted(measurements, key=lambda m: (m.documents, m.tokens))
        self._curves: dict[int, list[Measurement]] = {}
        for measurement in self.measurements:
            self._curves.setdefault(measurement.documents, []).append(measurement)
        self._power = max(min_power, _power(self._curves[1]))
        pays = [m for m in self.measurements if m.documents > 1 and self.pays(m)]
        self.batch_tokens = max((m.tokens for m in pays), default=0)
        self.batch_documents = max((m.documents for m in pays), default=1)

    def single(self, tokens: int) -> float:
        """Return the seconds of one document, in one run or in all its chunks."""
        if self._whole_tokens is None or tokens <= self._whole_tokens:
            return self.whole(tokens)
        if self._in_chunks:
            longest = self._curves[1][-1]
            one, two = self._in_chunks
            slope = (two.seconds - one.seconds) / (two.tokens - one.tokens)
            # A slow moment in the first measurement would make the slope too small.
            slope = max(slope, longest.seconds / longest.tokens)
            # A window may make chunks longer than the longest document that runs whole.
            linear = one.seconds + slope * max(0, tokens - one.tokens)
            return linear * self._excess(tokens, two.tokens)
        chunks = -(-tokens // self._chunk_tokens)
        linear = _UNMEASURED_CHUNK_FACTOR * chunks * self.whole(self._chunk_tokens)
        return linear * self._excess(tokens, self._chunk_tokens)

    def _excess(self, tokens: int, measured: int) -> float:
        """Return the growth of the time of a token from a measured length to a longer one."""
        if self._quadratic_tokens is None or tokens <= measured:
            return 1.0
        return (self._quadratic_tokens + tokens) / (self._quadratic_tokens + measured)

    def whole(self, tokens: int) -> float:
        """Return the seconds of one document in one run."""
        longest = self._curves[1][-1]
        if tokens > longest.tokens:
            ratio = tokens / longest.tokens
            excess = ratio * self._excess(tokens, longest.tokens)
            return float(longest.seconds * max(ratio**self._power, excess))
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


class SlowdownFactor:
    """The ratio of actual to calibrated seconds over a model's last runs.

    Predictions are multiplied by it, because other processes share the machine and batches save
    time. Each run counts by its length, and old runs count less.

    The factor is at least 1 until ``trust_costs``: the first estimates of short documents are too
    slow, and runs of these would make the predictions of longer documents too fast.
    """

    def __init__(self) -> None:
        self._calibrated = self._actual = _PRIOR_SECONDS
        self._min_factor = 1.0

    @property
    def value(self) -> float:
        """The factor of calibrated seconds."""
        return min(max(self._actual / self._calibrated, self._min_factor), _MAX_FACTOR)

    def observe(self, calibrated: float, actual: float) -> None:
        """Take a run into account."""
        fading = math.exp(-actual / _HORIZON_SECONDS)
        self._calibrated = self._calibrated * fading + calibrated
        self._actual = self._actual * fading + actual

    def trust_costs(self) -> None:
        """Allow factors below 1 from now on, for costs that are completely measured."""
        self._min_factor = _MIN_FACTOR
        if self._actual < self._calibrated:  # by the first estimates, which no longer count
            self._calibrated = self._actual = _PRIOR_SECONDS


@dataclass(frozen=True)
class Shape:
    """A run to measure."""

    documents: int
    tokens: int  # of each document
    chunk_tokens: int | None = None  # None for a run of whole documents


@dataclass(frozen=True)
class MeasuredRange:
    """The runs that a server does."""

    min_tokens: int  # of a document that runs whole
    max_tokens: int
    budget_tokens: int  # of a run, padding included
    batching: bool = True  # whether documents may share a run
    chunk_tokens: int | None = None  # None if no document runs in chunks
    min_chunk_tokens: int = 1
    max_chunked_tokens: int = 0
    quadratic_tokens: int | None = None  # see ``CostModel``
    # Whether a run of a number of documents of a length fits the memory budget. It must not hold
    # the model.
    fits: Callable[[int, int], bool] = lambda documents, tokens: True


class CostMeasurement:
    """The costs of documents, measured step by step.

    ``measure_first`` runs growing documents once each, while they take less than half a second in
    total. These estimates are too slow rather than too fast: a first run allocates memory, and
    longer documents count with the square of their length. ``step`` makes them better, and measures
    batches and chunks. A shape whose run fails is left out.
    """

    # run: a request to stop makes it raise RunStoppedError

    def __init__(self, run: Callable[[Shape, Stop | None], object], limits: MeasuredRange) -> None:
        self._run = run
        self._plan = _Plan(limits)
        self._steps = self._plan.steps()
        self._next: Shape | None = next(self._steps)
        self._is_abandoned = False
        self.seconds = 0.0  # of all steps so far, except those that were stopped

    @property
    def costs(self) -> CostModel:
        """The current predictions, once there was a run."""
        return self._plan.costs

    @property
    def next(self) -> Shape | None:
        """The shape that the next step runs; None if no step is left."""
        return None if self._is_abandoned else self._next

    @property
    def is_done(self) -> bool:
        """Whether no step is left, because all were done or the rest was given up."""
        return self.next is None

    @property
    def is_complete(self) -> bool:
        """Whether every prediction for single documents is based on more than first estimates."""
        return self._plan.is_complete

    @property
    def next_seconds(self) -> float:
        """Predicted time of the next step; 0 if there is none."""
        shape = self.next
        return 0.0 if shape is None else shape.documents * self.costs.single(shape.tokens)

    def up_to(self, tokens: int) -> "CostMeasurement":
        """Return a measurement of whole documents up to a length, and of the batches of these."""
        limits = self._plan.limits
        most = max(limits.min_tokens, min(limits.max_tokens, tokens))
        return CostMeasurement(self._run, replace(limits, max_tokens=most, chunk_tokens=None))

    def measure_first(self) -> None:
        """Do the first step, and further ones as long as they are runs of new, quick lengths."""
        longest = self._plan.lengths[-1]
        while (tokens := self.step().tokens) < longest:
            predicted = self.next_seconds
            if tokens < _LINEAR_TOKENS and (shape := self.next) is not None:
                predicted = self.costs.single(tokens) * shape.tokens / tokens
            if self.seconds + predicted > _FIRST_SECONDS:
                break

    def measure_all(self) -> None:
        """Do all steps."""
        while not self.is_done:
            self.step()

    def step(self, stop: Stop | None = None) -> Shape:
        """Run the next shape and use its time; return the shape.

        Raises:
            RunStoppedError: if ``stop`` ended the run; the next step repeats it.
            EngineError: if the engine fails; the next step runs another shape.
        """
        shape = self._next
        assert shape is not None  # checked by the callers
        start = time.perf_counter()
        try:
            self._run(shape, stop)
        except RunStoppedError:
            raise
        except Exception:
            self._end_step(time.perf_counter() - start, has_failed=True)
            raise
        self._end_step(time.perf_counter() - start)
        return shape

    def abandon(self) -> None:
        """Do no further steps; the current predictions stay. Any thread may call this."""
        self._is_abandoned = True

    def _end_step(self, seconds: float, *, has_failed: bool = False) -> None:
        self.seconds += seconds
        try:
            self._next = self._steps.send(None if has_failed else seconds)
        except StopIteration:
            self._next = None


class _Plan:
    """The order of the shapes, and the predictions from their times.

    It does not know the function that runs them. A generator of steps that is not at its end keeps
    its object in memory, and would keep the model after its replacement.
    """

    costs: CostModel

    def __init__(self, limits: MeasuredRange) -> None:
        # Whether measurements have replaced every first estimate of single documents.
        self.is_complete = False
        self.limits = limits
        self._whole_tokens = limits.max_tokens if limits.chunk_tokens is not None else None

    @property
    def lengths(self) -> list[int]:
        """The lengths of single documents, in the order of their first runs."""
        low, high = self.limits.min_tokens, self.limits.max_tokens
        longest = max(min(high, self.limits.budget_tokens), low)
        return sorted({min(max(length, low), longest) for length in LENGTHS})

    def steps(self) -> "Generator[Shape, float | None, None]":
        """Yield the shapes to run, and update the predictions from their times.

        The generator receives the time of each run, or None if the run failed.
        """
        lengths = yield from self._measure_lengths()
        singles = yield from _measured([Shape(1, n) for n in lengths], _SLOW_SECONDS * _ROUNDS)
        if not singles:
            return
        singles = _increasing(singles)
        self._predict(singles)
        shapes = list[Shape]()
        for shape in self._batch_shapes({one.tokens: one.seconds for one in singles}):
            # The first run allocates memory, so its time does not count.
            if (yield shape) is not None:
                shapes.append(shape)
        batches = yield from _measured(shapes, _SLOW_SECONDS * _ROUNDS)
        whole = _increasing([*singles, *batches])
        self._predict(whole)
        if self.limits.chunk_tokens is not None:
            shapes = self._chunk_shapes(self.limits.chunk_tokens)
            in_chunks = yield from _measured(shapes, _SLOW_SECONDS)
            if len(in_chunks) < len(shapes):
                return
            self._predict(whole, in_chunks)
        self.is_complete = True

    def _measure_lengths(self) -> "Generator[Shape, float | None, list[int]]":
        """Run growing documents until they are slow or fail; return the lengths that ran."""
        found = list[Measurement]()
        for tokens in self.lengths:
            # The first run of a shape allocates memory, and may also be slow by chance, so only two
            # slow runs end the series.
            seconds = yield Shape(1, tokens)
            if seconds is None:
                break
            found.append(Measurement(1, tokens, seconds))
            self._predict(_increasing(found), min_power=_FIRST_POWER)
            if seconds > _MAX_SECONDS:
                again = yield Shape(1, tokens)
                if again is None or again > _MAX_SECONDS:
                    break
        return [one.tokens for one in found]

    def _batch_shapes(self, single_seconds: dict[int, float]) -> list[Shape]:
        return [
            Shape(documents, tokens)
            for tokens in filter(single_seconds.__contains__, BATCH_LENGTHS)
            for documents in (BATCHES if self.limits.batching else ())
            if documents * tokens <= self.limits.budget_tokens
            and self.limits.fits(documents, tokens)
            and documents * single_seconds[tokens] <= _SLOW_SECONDS
        ]

    def _chunk_shapes(self, chunk_tokens: int) -> list[Shape]:
        """Return a document of one chunk and one of two, or of half a chunk and a whole one.

        The chunks are shorter than the real ones if one of these takes too long.
        """
        while chunk_tokens > 1 and self.costs.whole(chunk_tokens) > _LONG_CHUNK_SECONDS:
            chunk_tokens //= 2
        chunk_tokens = max(chunk_tokens, self.limits.min_chunk_tokens)
        longer = max(min(2 * chunk_tokens, self.limits.max_chunked_tokens), 2)
        lengths = (min(chunk_tokens, longer // 2), longer)
        return [Shape(1, tokens, chunk_tokens) for tokens in lengths]

    def _predict(
        self,
        measurements: Sequence[Measurement],
        in_chunks: Sequence[Measurement] = (),
        *,
        min_power: float = 1.0,
    ) -> None:
        self.costs = CostModel(
            measurements,
            in_chunks,
            self._whole_tokens,
            chunk_tokens=self.limits.chunk_tokens or 1,
            min_power=min_power,
            quadratic_tokens=self.limits.quadratic_tokens,
        )


def _measured(
    shapes: Iterable[Shape], enough: float
) -> "Generator[Shape, float | None, list[Measurement]]":
    """Return the minimum of at least two runs of each shape, up to ``enough`` seconds in total.

    The shapes take turns, so that a slow moment of the machine does not hit all runs of one. A
    shape that fails has no further turns, and is left out if none of its runs succeeded.
    """
    seconds: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    failed = set[Shape]()
    for _ in range(_ROUNDS):
        for shape, taken in seconds.items():
            if shape not in failed and (len(taken) < 2 or sum(taken) < enough):
                one = yield shape
                if one is None:
                    failed.add(shape)
                else:
                    taken.append(one)
    return [
        Measurement(shape.documents, shape.tokens, min(taken))
        for shape, taken in seconds.items()
        if taken
    ]


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
