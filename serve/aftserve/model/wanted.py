"""The part of an answer that a request asks for: some heads, and the evidence of some logits."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftexport.heads import (
    BinaryClassification,
    FeatureExtraction,
    Head,
    LabelsAnswer,
    MultiLabelClassification,
    Regression,
)
from aftexport.system.contract import largest

_MAX_EXPLAINED = 32
"""Maximum logits of a document with evidence: each has a number for each token."""
MAX_EVIDENCE_NUMBERS = 1 << 22
"""Maximum numbers in the evidence of a document, one for each token and logit, in memory."""
_SHOWN_NAMES = 20
MAX_NAMES = 256
"""Maximum values of ``explain`` or ``outputs`` of a request."""
DEFAULT_SPANS = 5
"""Maximum passages of a chosen label, or with checks, if a request gives no number."""
SPAN_TOKENS = 64
"""Maximum tokens of a passage if a request gives no number."""
MAX_CHECKS = 5
"""Maximum passages of a logit that a request may check."""


@dataclass(frozen=True)
class ChosenLogit:
    """A logit with evidence."""

    head: str
    number: int  # in the graph, or that of the head's largest logit; see contract.EXPLAINED
    index: int | None = None  # in the head; None for the largest
    sign: int = 1  # -1 for the first of two labels of one logit
    must_hold: bool = False  # whether it has evidence only if its label holds


@dataclass(frozen=True)
class Wanted:
    """The part of an answer that a request asks for."""

    heads: frozenset[str] | None = None  # None for all
    explained: tuple[ChosenLogit, ...] = ()

    def has(self, head: str) -> bool:
        """Return whether a head is part of the answer."""
        return self.heads is None or head in self.heads

    @property
    def numbers(self) -> list[int]:
        """The numbers of the logits with evidence."""
        return [chosen.number for chosen in self.explained]


EVERY_HEAD = Wanted()
"""All heads, without evidence."""
NO_HEAD = Wanted(heads=frozenset())
"""No answer, as for a document that is only checked."""


@dataclass(frozen=True)
class AnswerOptions:
    """The options of a request for its answers."""

    # maximum of each logit; 0 for no evidence, or for DEFAULT_SPANS with explain or checks
    spans: int = 0
    explain: Sequence[str] = ()  # labels, values or heads; empty for the largest logit of the first
    outputs: Sequence[str] = ()  # names of heads; empty for all
    span_tokens: int = 0  # maximum of a passage; 0 for SPAN_TOKENS
    checks: int = 0  # passages of each logit whose document runs again without them

    def __post_init__(self) -> None:
        """Replace 0 spans of chosen or checked logits, and checks of more passages than those.

        Raises:
            InputError: if passages have a maximum, and the answer has none.
        """
        if (self.explain or self.checks) and not self.spans:
            object.__setattr__(self, "spans", DEFAULT_SPANS)
        if self.span_tokens and not self.spans:
            raise InputError(
                "Expected evidence, explain or evidence_check beside evidence_tokens, got none.",
                "Add evidence, such as evidence=3, or leave evidence_tokens out.",
            )
        object.__setattr__(self, "span_tokens", self.span_tokens or SPAN_TOKENS)
        object.__setattr__(self, "checks", min(self.checks, self.spans))

    def wanted(self, manifest: Manifest) -> Wanted:
        """Return the part of an answer of a model.

        Raises:
            InputError: if the model has no such head, label or value, or no evidence for it.
        """
        heads = frozenset(self.outputs) if self.outputs else None
        for name in heads or ():
            if name not in manifest.heads:
                raise InputError(
                    f"Expected outputs of the model, got {name[:100]!r}.",
                    f"Choose among {', '.join(manifest.heads)}.",
                )
        if not self.spans:
            return Wanted(heads)
        if manifest.explained is None:
            raise InputError(
                f"This model has no evidence: {manifest.no_evidence}.", "Do not request evidence."
            )
        explained = (
            _CHOICES.of(manifest).find(self.explain)
            if self.explain
            else (ChosenLogit(manifest.explained, largest(0)),)
        )
        for chosen in explained:
            if heads is not None and chosen.head not in heads:
                raise InputError(
                    f"Expected the explained output {chosen.head} among outputs, got "
                    f"{', '.join(sorted(heads))}.",
                    f"Add outputs={chosen.head}, or choose a label of another head with explain.",
                )
        return Wanted(heads, explained)


NO_OPTIONS = AnswerOptions()
"""Answers of all heads, without evidence."""


def choices(manifest: Manifest) -> Sequence[str]:
    """Return every value of ``explain`` that a model accepts."""
    return _CHOICES.of(manifest).values


def explainable(manifest: Manifest) -> list[str]:
    """Return the names of the heads whose labels or values a request may choose for evidence."""
    heads = manifest.heads
    able = manifest.evidence_heads or ()
    return [name for name in able if not isinstance(heads[name], FeatureExtraction)]


class _Choices:
    """The logits of a model that a request may choose, by their names."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._able = explainable(manifest)
        self._first: dict[str, int] = {}
        first = 0
        for name, offsets in (manifest.evidence_heads or {}).items():
            self._first[name] = first
            first += len(offsets)
        self._indices = {
            head: {name: index for index, name in enumerate(_names(described))}
            for head, described in manifest.heads.items()
        }
        self._having: dict[str, list[str]] = {}
        for head, names in self._indices.items():
            for name in names:
                self._having.setdefault(name, []).append(head)

    @cached_property
    def values(self) -> Sequence[str]:
        """The names that ``find`` accepts."""
        labels = [(head, name) for head in self._able for name in self._indices[head]]
        forms = (f"{head}:{name}" for head, name in labels)
        known = dict.fromkeys([*self._able, *(name for _, name in labels), *forms])
        return [name for name in known if self._is_accepted(name)]

    def _is_accepted(self, name: str) -> bool:
        readings = self._readings(name)
        return len(readings) == 1 and (
            readings[0][1] is not None or self._decision_logits(readings[0][0]) <= _MAX_EXPLAINED
        )

    def find(self, names: Sequence[str]) -> tuple[ChosenLogit, ...]:
        """Return the logits of labels, values or heads, in their order."""
        found: dict[ChosenLogit, None] = {}
        for name in dict.fromkeys(names):
            found |= dict.fromkeys(self._logits(name))
            _check_count(len(found))
        return tuple(found)

    def _readings(self, name: str) -> list[tuple[str, str | None]]:
        """Return each head and label that a name may mean; no label for the head's answer.

        Heads without evidence make no name ambiguous: they count only if no other head has it.
        """
        head, separator, rest = name.partition(":")
        labels: list[tuple[str, str | None]] = [(one, name) for one in self._having.get(name, ())]
        if separator and rest in self._indices.get(head, ()):
            labels.append((head, rest))
        if able := [reading for reading in labels if reading[0] in self._able]:
            return able
        return [(name, None)] if name in self._able else labels[:1]

    def _logits(self, name: str) -> Sequence[ChosenLogit]:
        readings = self._readings(name)
        if len(readings) > 1:
            every = [head for head, _ in readings]
            example, label = readings[0]
            raise InputError(
                f"Expected a label of one output, got {name[:100]!r} of {', '.join(every)}.",
                f"Send explain={example}:{(label or name)[:100]}, or the same with another output.",
            )
        if readings:
            head, label = readings[0]
            return self._decision(head) if label is None else [self._logit(head, label)]
        heads, (head, separator, _) = self.manifest.heads, name.partition(":")
        if name in heads:
            self._check(name)
        if separator and head in heads:
            self._check(head)
            raise _unknown(name, f"{head} has", _names(heads[head]))
        every = [label for one in self._first for label in _names(heads[one])]
        raise _unknown(name, "the model has", every)

    def _logit(self, head: str, name: str) -> ChosenLogit:
        self._check(head)
        index, first = self._indices[head][name], self._first[head]
        if isinstance(self.manifest.heads[head], BinaryClassification):
            return ChosenLogit(head, first, 0, sign=1 if index else -1)
        return ChosenLogit(head, first + index, index)

    def _decision(self, head: str) -> Sequence[ChosenLogit]:
        """Return the logits of a head's answer: its label, the labels that hold, or each value."""
        described, first = self.manifest.heads[head], self._first[head]
        _check_count(self._decision_logits(head))
        if isinstance(described, MultiLabelClassification | Regression):
            must_hold = described.answer_type is LabelsAnswer
            return [
                ChosenLogit(head, first + index, index, must_hold=must_hold)
                for index in range(described.width)
            ]
        return [ChosenLogit(head, largest([*self._first].index(head)))]

    def _decision_logits(self, head: str) -> int:
        """Return the number of logits of a head's answer."""
        described = self.manifest.heads[head]
        return (
            described.width if isinstance(described, MultiLabelClassification | Regression) else 1
        )

    def _check(self, head: str) -> None:
        """Raise InputError if a head has no evidence."""
        if head in self._able:
            return
        described = self.manifest.heads[head]
        if described.is_per_token or isinstance(described, FeatureExtraction):
            reason = f"{described.task} has no labels or values of documents"
        else:
            reason = self.manifest.refused_evidence.get(head, "the bundle has none for it")
        raise InputError(
            f"The output {head} has no evidence: {reason}.",
            f"Choose an output with evidence: {', '.join(self._able)}."
            if self._able
            else "Do not request evidence.",
        )


class _LastChoices:
    """The choices of the manifest of the last request, because an index of its names takes long."""

    def __init__(self) -> None:
        self._last: _Choices | None = None

    def of(self, manifest: Manifest) -> _Choices:
        """Return the choices of a manifest."""
        last = self._last
        if last is None or last.manifest is not manifest:
            last = self._last = _Choices(manifest)
        return last


_CHOICES = _LastChoices()


def _check_count(logits: int) -> None:
    if logits > _MAX_EXPLAINED:
        raise InputError(
            f"A request must explain at most {_MAX_EXPLAINED} labels or values, got "
            f"{logits} or more.",
            "Name the labels with explain=LABEL, some in each request.",
        )


def _names(head: Head) -> Collection[str]:
    """Return the names of a head that a request may choose."""
    return () if isinstance(head, FeatureExtraction) else head.names


def _unknown(name: str, has: str, names: Collection[str]) -> InputError:
    shown = ", ".join([*names][:_SHOWN_NAMES])
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return InputError(
        f"Expected a label, value or output to explain, got {name[:100]!r}.",
        f"Choose one that {has}: {shown}{more}.",
    )
