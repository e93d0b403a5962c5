"""Documents read in windows of a model with a limit: the cut, the runs, and one answer of all.

Window ``i`` begins at token ``i * stride`` of the content, the document without prefix and suffix;
the last one is moved back so that it is full. Every token belongs to the window in which it stands
most central, the earlier one of two. So the own tokens of all windows sum to the content.

Every aggregate gives logits, so that heads, thresholds and calibration apply as for one run:

- ``max``, ``mean`` and ``logsumexp`` (the logarithm of the mean exponential) of each logit; means
  are weighted by the own tokens of the windows;
- ``noisy_or``: ``1 - prod(1 - p)`` of the probabilities, as a logit.

Exclusive labels are aggregated as logarithms of probabilities, because a shift of all logits of a
window has no meaning. With a background label, ``max`` takes the window with the smallest
probability of it, and ``noisy_or`` multiplies those probabilities; the other labels share the rest
in proportion to ``1 - prod(1 - p)``.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.golden import IN_WINDOWS, Case
from aftexport.bundle.manifest import Aggregate, Manifest, WindowLayout, WindowPolicy
from aftexport.chunked.document import Array, Tokens
from aftexport.chunked.runner import Parts, Sink, TokenOutputs, finished
from aftexport.engines import Engine
from aftexport.errors import EngineError, InputError, UsageError
from aftexport.extra_inputs import NO_EXTRAS, ExtraInput, ExtraValues, stacked, values_of
from aftexport.heads import FeatureExtraction, Head, SingleLabelClassification
from aftexport.system.contract import LENGTHS, main_input

DECIDED = "decided:"
"""The prefix of a result with the windows that decided each logit of a head, int64 ``[1, w]``."""
_MAX_RUN_WINDOWS = 8
_MAX_RUN_TOKENS = 4096
"""The maximum tokens of a run of several windows: other documents have their turn after each."""
_SMALL = 1e-15
"""Sums of so small probabilities are kept as logarithms, which do not underflow."""
Double = NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """The windows of ``tokens`` tokens of content."""

    layout: WindowLayout
    tokens: int

    @property
    def size(self) -> int:
        """The tokens of content in each window."""
        return min(self.layout.content, self.tokens)

    def __len__(self) -> int:
        return 1 - (self.size - self.tokens) // self.layout.stride

    def start(self, window: int) -> int:
        """Return the first token of a window."""
        return min(window * self.layout.stride, self.tokens - self.size)

    def own(self, window: int) -> tuple[int, int]:
        """Return the first own token of a window, and the token after its last."""
        return self._border(window), self._border(window + 1)

    def _border(self, window: int) -> int:
        """Return the first token that stands more central in a window than in the one before."""
        if window in (0, len(self)):
            return self.tokens if window else 0
        return (self.start(window - 1) + self.size + self.start(window) + 1) // 2


class WindowedDocument:
    """A document without the prefix and the suffix that it has, and its windows."""

    def __init__(
        self, layout: WindowLayout, tokens: Tokens, extras: ExtraValues = NO_EXTRAS
    ) -> None:
        self._layout, self._tokens, self._extras = layout, tokens, extras
        first, last = 0, len(tokens)
        if _is_equal(tokens[: len(layout.prefix)], layout.prefix):
            first = len(layout.prefix)
        if _is_equal(tokens[max(first, last - len(layout.suffix)) : last], layout.suffix):
            last -= len(layout.suffix)
        self._first, self._last = first, last
        self.cut = Cut(layout, last - first)

    def tokens_of(self, window: int) -> tuple[int, int]:
        """Return the first token of a window in the document, and the one after its last."""
        start = self._first + self.cut.start(window)
        return start, start + self.cut.size

    def inputs(self, windows: range, extras: Sequence[ExtraInput], main: str) -> dict[str, Array]:
        """Return the inputs of a run of several windows."""
        rows = [self._framed(self._tokens, window) for window in windows]
        values = [
            ExtraValues(
                self._extras.document,
                {name: self._framed(x, window, 0) for name, x in self._extras.tokens.items()},
            )
            for window in windows
        ]
        width = len(rows[0])
        lengths = np.full(len(rows), width, np.int64)
        return {main: np.stack(rows), LENGTHS: lengths, **stacked(extras, values, width)}

    def _framed(self, tokens: Any, window: int, blank: int | None = None) -> NDArray[Any]:
        """Return the tokens of a window between the prefix and the suffix.

        Of values other than ids, the ``blank`` stands for a frame that the document lacks.
        """
        content = tokens[slice(*self.tokens_of(window))]
        if blank is None and not self._layout.prefix and not self._layout.suffix:
            return np.asarray(content)
        before, after = np.array(self._layout.prefix), np.array(self._layout.suffix)
        if blank is not None:
            before, after = np.full_like(before, blank), np.full_like(after, blank)
            before[: self._first] = tokens[: self._first]
            after[: len(self._tokens) - self._last] = tokens[self._last :]
        return np.concatenate([before, content, after], dtype=np.int64)

    def rows(self, window: int) -> slice:
        """Return the rows of a window's output that belong to it, frame included."""
        own, end = self.cut.own(window)
        shift = len(self._layout.prefix) - self.cut.start(window)
        low, high = own + shift, end + shift
        if window == 0:
            low -= self._first
        if window + 1 == len(self.cut):
            high += len(self._tokens) - self._last
        return slice(low, high)


def _is_equal(tokens: NDArray[Any], frame: Sequence[int]) -> bool:
    return bool(frame) and np.array_equal(tokens, frame)


@dataclass(frozen=True)
class WindowRuns:
    """Runs of the windows of documents."""

    engine: Engine  # with the model
    layout: WindowLayout
    inputs: Sequence[str]  # names of the model's inputs
    extras: Sequence[ExtraInput]

    def run(
        self, document: WindowedDocument, windows: range, outputs: Collection[str] | None = None
    ) -> Mapping[str, Array]:
        """Return the outputs for several windows; raise EngineError if one is not finite."""
        given = document.inputs(windows, self.extras, main_input(self.inputs))
        found = self.engine.run({name: given[name] for name in self.inputs}, None, outputs)
        if not all(np.isfinite(output).all() for output in found.values()):
            raise EngineError(
                "The model's output must be finite, got NaN or infinity.", "Send another document."
            )
        return found

    def case(self, name: str, inputs: Mapping[str, Array]) -> Case:
        """Return a case of one document, with the outputs for every window."""
        tokens = inputs[main_input(self.inputs)][0]
        document = WindowedDocument(
            self.layout, tokens, values_of(self.extras, inputs, 0, len(tokens))
        )
        # One window in each run, because a model may compute over the whole batch.
        found = [self.run(document, range(i, i + 1)) for i in range(len(document.cut))]
        outputs = {n: np.concatenate([one[n] for one in found]) for n in found[0]}
        return Case(name, IN_WINDOWS, inputs, outputs)


class WindowedModel:
    """A model for one document of any length, which an engine reads in windows.

    It serves in place of ``ChunkedModel``. A document of ``whole_tokens`` fits one window.
    """

    def __init__(
        self,
        manifest: Manifest,  # with a policy of windows
        engine: Engine,  # with the bundle's model
        *,
        run_windows: int | None = None,  # maximum windows of a run; None for the default
    ) -> None:
        policy = manifest.windows
        assert policy is not None  # checked by the callers
        self._policy, self._heads = policy, manifest.heads
        self._runs = WindowRuns(engine, policy, manifest.inputs, manifest.extra_inputs)
        self.whole_tokens = policy.tokens
        self.run_windows = run_windows or default_run_windows(manifest)

    @property
    def chunk_tokens(self) -> int:
        """The tokens by which a run goes on."""
        return self.run_windows * self._policy.stride

    def in_chunks_of(self, tokens: int) -> Self:
        """Return the same model with runs that go on by at most ``tokens``, or of one window."""
        model = copy.copy(self)
        model.run_windows = max(1, tokens // self._policy.stride)
        return model

    def run(
        self,
        tokens: Tokens,
        extras: ExtraValues = NO_EXTRAS,
        *,
        sinks: Mapping[str, Sink] | None = None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, Array]:
        """Run one document; see ``ChunkedModel.run``.

        A result ``DECIDED + head`` has the window that decided each logit, unless none does.

        Raises:
            InputError: if the document has no tokens.
            EngineError: if the engine fails, or an output is not finite.
        """
        return finished(self.parts(tokens, extras, sinks=sinks, outputs=outputs))

    def parts(
        self,
        tokens: Tokens,
        extras: ExtraValues = NO_EXTRAS,
        *,
        evidence: bool | Sequence[int] = False,
        sinks: Mapping[str, Sink] | None = None,
        outputs: Collection[str] | None = None,
    ) -> Parts:
        """Run one document as ``run``, with a stop between two runs."""
        if evidence:
            raise UsageError(
                "A document in windows has no evidence.", "Do not request evidence for it."
            )
        if not len(tokens):
            raise InputError("The document has no tokens.", "Give at least one token.")
        document = WindowedDocument(self._policy, tokens, extras)
        heads = {n: h for n, h in self._heads.items() if outputs is None or n in outputs}
        widths = {name: head.width for name, head in heads.items() if head.is_per_token}
        rows = TokenOutputs(widths, len(tokens), sinks or {})
        aggregation = Aggregation(self._policy, heads)
        count, end = len(document.cut), 0
        for first in range(0, count, self.run_windows):
            if first:
                yield
            windows = range(first, min(first + self.run_windows, count))
            found = self._runs.run(document, windows, heads)
            aggregation.add(document.cut, windows, found)
            for place, window in enumerate(windows):
                own = document.rows(window)
                end += own.stop - own.start
                rows.add({name: found[name][place : place + 1, own] for name in widths}, end)
        return {**aggregation.results(), **rows.joined}

    def count(
        self,
        tokens: int,
        *,
        evidence: bool | Sequence[int] = False,
        outputs: Collection[str] | None = None,
    ) -> int:
        """Return the number of runs of a document of ``tokens`` tokens."""
        return -(-len(Cut(self._policy, tokens)) // self.run_windows)

    def aggregated(self, tokens: Tokens, found: Mapping[str, Array]) -> dict[str, Array]:
        """Return the results of ``run`` for the outputs of every window of a document."""
        document = WindowedDocument(self._policy, tokens)
        aggregation = Aggregation(self._policy, self._heads)
        windows = range(len(document.cut))
        aggregation.add(document.cut, windows, found)
        whole = aggregation.results()
        return {
            name: np.concatenate([found[name][i, document.rows(i)] for i in windows])[None]
            if head.is_per_token
            else whole[name]
            for name, head in self._heads.items()
        }


def default_run_windows(manifest: Manifest) -> int:
    """Return the maximum windows of a run, before the memory bounds them."""
    policy = manifest.windows
    if policy is None or not manifest.batching:
        return 1
    return max(1, min(_MAX_RUN_WINDOWS, _MAX_RUN_TOKENS // policy.tokens))


class Aggregation:
    """One answer for the outputs of the windows of a document, in constant memory."""

    def __init__(self, policy: WindowPolicy, heads: Mapping[str, Head]) -> None:
        self._rules = {
            name: _rule(policy.aggregate, head, policy.backgrounds.get(name))
            for name, head in heads.items()
            if not head.is_per_token
        }

    def add(self, cut: Cut, windows: range, outputs: Mapping[str, Array]) -> None:
        """Take the outputs ``[windows, width]`` of the next windows into account."""
        own = [end - first for first, end in map(cut.own, windows)]
        weights = np.maximum(own, 1)[:, None]  # the frame of an empty document counts as one
        for name, rule in self._rules.items():
            rule.add(rule.prepare(outputs[name].astype(np.float64)), weights, windows.start)

    def results(self) -> dict[str, Array]:
        """Return the logits ``[1, width]`` of each head, and the windows that decided."""
        rules = self._rules.items()
        found: dict[str, Array] = {n: rule.finish(rule.logits())[None] for n, rule in rules}
        decided = ((name, rule.decided) for name, rule in rules)
        return found | {DECIDED + name: one[None] for name, one in decided if one is not None}


@dataclass
class _Mean:
    """The mean by own tokens, and the base of the other aggregates of one head."""

    width: int
    prepare: Callable[[Double], Double] = np.asarray  # applied to the logits of windows
    finish: Callable[[Double], Double] = np.asarray  # applied to the result

    def __post_init__(self) -> None:
        self._sum, self._weight = np.zeros(self.width), 0
        self.decided: NDArray[np.int64] | None = None  # the window that decided each logit

    def add(self, logits: Double, weights: NDArray[np.int64], first: int) -> None:
        """Add logits ``[windows, width]`` with the own tokens ``[windows, 1]``."""
        self._sum += (weights * logits).sum(0)
        self._weight += int(weights.sum())

    def logits(self) -> Double:
        """Return the aggregated logits ``[width]``."""
        return self._sum / self._weight


class _Max(_Mean):
    """The largest of each logit; of equal ones, the first window has decided."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._largest = np.full(self.width, -np.inf)
        self.decided: NDArray[np.int64] = np.zeros(self.width, np.int64)

    def add(self, logits: Double, weights: NDArray[np.int64], first: int) -> None:
        places, largest = first + logits.argmax(0), logits.max(0)
        self.decided = np.where(largest > self._largest, places, self.decided)
        self._largest = np.maximum(self._largest, largest)

    def logits(self) -> Double:
        return self._largest


class _LogMeanExp(_Max):
    """The logarithm of the mean exponential, by own tokens."""

    def add(self, logits: Double, weights: NDArray[np.int64], first: int) -> None:
        before = self._largest
        super().add(logits, weights, first)
        added = (weights * np.exp(logits - self._largest)).sum(0)
        self._sum = self._sum * np.exp(before - self._largest) + added
        self._weight += int(weights.sum())

    def logits(self) -> Double:
        return np.asarray(self._largest + np.log(self._sum / self._weight))


class _NoisyOr(_Max):
    """The logit of ``1 - prod(1 - p)``, where ``-log(1 - p)`` is the softplus of the logit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._log_sum = np.full(self.width, -np.inf)

    def add(self, logits: Double, weights: NDArray[np.int64], first: int) -> None:
        super().add(logits, weights, first)
        terms = np.logaddexp(0.0, logits)
        # Below, the softplus is the exponential, which may underflow.
        logs = np.where(terms > _SMALL, np.log(np.maximum(terms, _SMALL)), logits)
        self._sum += terms.sum(0)
        self._log_sum = np.logaddexp(self._log_sum, np.logaddexp.reduce(logs, 0))

    def logits(self) -> Double:
        total = np.maximum(self._sum, _SMALL)
        large = total + np.log(-np.expm1(-total))
        return np.asarray(np.where(self._sum > _SMALL, large, self._log_sum))


@dataclass
class _LeastBackground(_Max):
    """The logits of the window with the smallest probability of the background."""

    background: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._found = -np.inf

    def add(self, logits: Double, weights: NDArray[np.int64], first: int) -> None:
        found = -_log_odds(logits)[:, self.background]
        place = int(found.argmax())
        if found[place] > self._found:
            self._found, self._largest = float(found[place]), logits[place]
            self.decided = np.full(self.width, first + place)


_AGGREGATES: Mapping[Aggregate, type[_Mean]] = {
    "max": _Max, "mean": _Mean, "logsumexp": _LogMeanExp, "noisy_or": _NoisyOr,
}  # fmt: skip


def _rule(aggregate: Aggregate | None, head: Head, background: str | None) -> _Mean:
    if isinstance(head, FeatureExtraction):
        return _Mean(head.width)
    assert aggregate is not None  # the manifest has one for labels and values
    if not isinstance(head, SingleLabelClassification):
        return _AGGREGATES[aggregate](head.width)
    place = None if background is None else head.labels.index(background)
    if aggregate == "noisy_or":
        odds, shared = partial(_found_odds, place), partial(_shared, place)
        return _NoisyOr(head.width, odds, shared)
    if aggregate == "max" and place is not None:
        return _LeastBackground(head.width, background=place)
    return _AGGREGATES[aggregate](head.width, _log_softmax)


def _log_softmax(logits: Double) -> Double:
    return np.asarray(logits - np.logaddexp.reduce(logits, -1, keepdims=True))


def _log_odds(logits: Double) -> Double:
    """Return ``log(p / (1 - p))`` of each of exclusive labels, without cancellation."""
    logs, top = _log_softmax(logits), logits.argmax(-1)[..., None]
    others = logs.copy()
    np.put_along_axis(others, top, -np.inf, -1)
    rest = np.log1p(-np.exp(np.minimum(logs, -0.5)))  # only the largest may be above one half
    np.put_along_axis(rest, top, np.logaddexp.reduce(others, -1, keepdims=True), -1)
    return np.asarray(logs - rest)


def _found_odds(background: int | None, logits: Double) -> Double:
    """Return the log odds of each label, and in place of the background's that of any other."""
    odds = _log_odds(logits)
    if background is not None:
        odds[:, background] *= -1
    return odds


def _shared(background: int | None, odds: Double) -> Double:
    """Return logits: the other labels share what is left of the background, by their odds."""
    shares = -np.logaddexp(0.0, -odds)
    if background is None:
        return np.asarray(shares)
    shares[background] = -np.inf
    found = odds[background] + shares - np.logaddexp.reduce(shares)
    found[background] = 0.0
    return np.asarray(found)
