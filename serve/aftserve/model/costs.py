"""The cost of documents on this machine, predicted from measurements."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIN_BATCH_GAIN = 0.05
"""Minimum share of the time of single runs that a batch must save."""

_POWER_LENGTH_RATIO = 8
_MAX_LINEAR_POWER = 1.5
_UNMEASURED_CHUNK_FACTOR = 4.0
"""Assumed time of a chunk, over that of a whole document of its length, before chunks are run."""


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
        in_chunks: times of a document in one chunk and of one in two; empty before they are
            measured.
        whole_tokens: maximum length of a document that does not run in chunks; None if none does.
        chunk_tokens: maximum length of a chunk.
        min_power: minimum power of the length with which the time grows past the longest
            measured one, for a model whose longer documents are not measured yet.
    """

    def __init__(
        self,
        measurements: Iterable[Measurement],
        in_chunks: Sequence[Measurement] = (),
        whole_tokens: int | None = None,
        *,
        chunk_tokens: int = 1,
        min_power: float = 1.0,
    ) -> None:
        self._in_chunks = in_chunks
        self._whole_tokens = whole_tokens
        self._chunk_tokens = chunk_tokens
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
            return one.seconds + slope * max(0, tokens - one.tokens)
        chunks = -(-tokens // self._chunk_tokens)
        return _UNMEASURED_CHUNK_FACTOR * chunks * self.whole(self._chunk_tokens)

    def whole(self, tokens: int) -> float:
        """Return the seconds of one document in one run."""
        longest = self._curves[1][-1]
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
