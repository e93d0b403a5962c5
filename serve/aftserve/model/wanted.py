"""The part of an answer that a request asks for: some heads, and the evidence of some logits."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from aftexport.bundle.manifest import Manifest
from aftexport.contract import largest
from aftexport.errors import InputError
from aftexport.heads import (
    BinaryClassification,
    FeatureExtraction,
    Head,
    LabelsAnswer,
    MultiLabelClassification,
    Regression,
)

_MAX_EXPLAINED = 32
"""Maximum logits of a document with evidence: each has a number for each token."""
_SHOWN_NAMES = 20
DEFAULT_SPANS = 5
"""Maximum passages of a chosen label if a request gives no number."""


@dataclass(frozen=True)
class ChosenLogit:
    """A logit with evidence.

    Attributes:
        head: name of its head.
        number: its number in the graph, or that of the head's largest logit; see
            ``aftexport.contract.EXPLAINED``.
        index: its index in the head; None for the largest.
        sign: -1 for the first of two labels of one logit, whose logit is the negative one.
        must_hold: whether it has evidence only if its label holds.
    """

    head: str
    number: int
    index: int | None = None
    sign: int = 1
    must_hold: bool = False


@dataclass(frozen=True)
class Wanted:
    """The part of an answer that a request asks for.

    Attributes:
        heads: names of the heads; None for all.
        explained: logits with evidence.
    """

    heads: frozenset[str] | None = None
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


@dataclass(frozen=True)
class AnswerOptions:
    """The options of a request for its answers.

    Attributes:
        spans: maximum number of evidence spans of each logit; 0 for no evidence.
        explain: labels, values or heads with evidence; empty for the largest logit of the first.
        outputs: names of heads; empty for all.
    """

    spans: int = 0
    explain: Sequence[str] = ()
    outputs: Sequence[str] = ()

    def wanted(self, manifest: Manifest) -> Wanted:
        """Return the part of an answer of a model.

        Raises:
            InputError: if the model has no such head, label or value, or no evidence for it.
        """
        heads = frozenset(self.outputs) if self.outputs else None
        for name in heads or ():
            if name not in manifest.heads:
                raise InputError(
                    f"There is no output {name[:100]!r}.",
                    f"Outputs are {', '.join(manifest.heads)}.",
                )
        if not self.spans:
            return Wanted(heads)
        if manifest.evidence is None or manifest.explained is None:
            why = manifest.no_evidence or "an earlier version exported it"
            raise InputError(f"This model has no evidence: {why}.", "Do not request evidence.")
        explained = (
            _Choices(manifest).find(self.explain)
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


def choices(manifest: Manifest) -> list[str]:
    """Return the values of ``explain`` that a model accepts, without those of an output's label."""
    heads = explainable(manifest)
    counts = Counter(name for head in heads for name in manifest.heads[head].names)
    return [*heads, *(name for name, count in counts.items() if count == 1 and name not in heads)]


def explainable(manifest: Manifest) -> list[str]:
    """Return the names of the heads whose labels or values a request may choose for evidence."""
    heads = manifest.heads
    able = manifest.evidence_heads or ()
    return [name for name in able if not isinstance(heads[name], FeatureExtraction)]


class _Choices:
    """The logits of a model that a request may choose, by their names."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._first: dict[str, int] = {}
        first = 0
        for name, offsets in (manifest.evidence_heads or {}).items():
            self._first[name] = first
            first += len(offsets)

    def find(self, names: Sequence[str]) -> tuple[ChosenLogit, ...]:
        """Return the logits of labels, values or heads, in their order.

        Raises:
            InputError: if a name has no logits with evidence, or there are too many logits.
        """
        if self._manifest.evidence_heads is None:
            raise InputError(
                "This bundle explains only the largest logit of "
                f"{self._manifest.explained}, because an earlier version exported it.",
                "Export the model again, or leave explain out.",
            )
        found = tuple(dict.fromkeys(chosen for name in names for chosen in self._logits(name)))
        if len(found) > _MAX_EXPLAINED:
            raise InputError(
                f"A request must explain at most {_MAX_EXPLAINED} labels or values, got "
                f"{len(found)}.",
                "Name the labels with explain=LABEL, some in each request.",
            )
        return found

    def _logits(self, name: str) -> Sequence[ChosenLogit]:
        heads = self._manifest.heads
        head, separator, rest = name.partition(":")
        having = [one for one in heads if name in _names(heads[one])]
        # Labels of tokens have no evidence, so they make no label of documents ambiguous.
        of_documents = [one for one in having if not heads[one].is_per_token]
        named = [(one, name) for one in of_documents or having[:1]]
        if separator and head in heads and rest in _names(heads[head]):
            named.append((head, rest))
        if len(named) > 1:
            raise InputError(
                f"The label {name[:100]!r} is one of several outputs, "
                f"{', '.join(one for one, _ in named)}.",
                f"Send explain={named[0][0]}:{name[:100]}, or the same with another output.",
            )
        if named:
            return [self._logit(*named[0])]
        if name in heads:
            return self._decision(name)
        if separator and head in heads:
            self._check(head)
            raise _unknown(name, f"{head} has", _names(heads[head]))
        every = [label for one in self._first for label in _names(heads[one])]
        raise _unknown(name, "the model has", every)

    def _logit(self, head: str, name: str) -> ChosenLogit:
        self._check(head)
        described = self._manifest.heads[head]
        if isinstance(described, BinaryClassification):
            sign = 1 if name == described.labels[1] else -1
            return ChosenLogit(head, self._first[head], 0, sign)
        index = described.logit_names.index(name)
        return ChosenLogit(head, self._first[head] + index, index)

    def _decision(self, head: str) -> Sequence[ChosenLogit]:
        """Return the logits of a head's answer: its label, the labels that hold, or each value."""
        self._check(head)
        described, first = self._manifest.heads[head], self._first[head]
        if isinstance(described, MultiLabelClassification | Regression):
            must_hold = described.answer_type is LabelsAnswer
            return [
                ChosenLogit(head, first + index, index, must_hold=must_hold)
                for index in range(described.width)
            ]
        return [ChosenLogit(head, largest([*self._first].index(head)))]

    def _check(self, head: str) -> None:
        described = self._manifest.heads[head]
        if described.is_per_token or isinstance(described, FeatureExtraction):
            reason = f"{described.task} has no labels or values of documents"
        elif head not in self._first:
            reason = self._manifest.refused_evidence.get(head, "the bundle has none for it")
        else:
            return
        able = explainable(self._manifest)
        raise InputError(
            f"The output {head} has no evidence: {reason}.",
            f"Choose an output with evidence: {', '.join(able)}."
            if able
            else "Do not request evidence.",
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
