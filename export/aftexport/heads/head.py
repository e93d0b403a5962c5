"""What a head is: the meaning of one output of a model, and the sums and names that heads share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from aftexport.errors import UsageError
from aftexport.heads.answer import Answer, Field

Double = NDArray[np.float64]


class Head(BaseModel, ABC):
    """The meaning of one output of a model.

    The output is ``[batch, width]``, or ``[batch, tokens, width]`` for a head that answers for
    every token.

    Attributes:
        task: the kind of the head, by the names of the transformers library.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    meaning: ClassVar[str]
    """The meaning of the numbers in an answer, in a few words."""
    takes_probabilities: ClassVar[bool] = False
    """Whether a model may end in a sigmoid or a softmax: the head computes none itself."""
    is_named: ClassVar[bool] = True
    """Whether a user gives names to the numbers."""
    answer_type: ClassVar[type[Answer]]
    """The type of an answer."""
    task: str

    @classmethod
    @abstractmethod
    def of_width(cls, width: int, names: Sequence[str] | None) -> Self:
        """Return a head with the usual settings for ``width`` logits, and numbered names if None.

        Raises:
            UsageError: if the head does not fit the width or the names.
        """

    @classmethod
    def of_output(cls, shape: Sequence[int], names: Sequence[str] | None) -> Self:
        """Return a head for an output ``[batch, width]`` or ``[batch, tokens, width]``.

        Raises:
            UsageError: if the head does not fit the shape or the names.
        """
        head = cls.of_width(shape[-1], names)
        if head.is_per_token != (len(shape) == 3):
            expected = "[batch, tokens, width]" if head.is_per_token else "[batch, width]"
            raise UsageError(
                f"Expected an output {expected} for {head.task}, got shape {list(shape)}.",
                "Choose a task for outputs of this shape: token_classification, regression or "
                "feature_extraction if they have a row for every token.",
            )
        return head

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The name of each number in an answer."""

    @property
    def fields(self) -> dict[str, Field]:
        """The kind of each field that every answer has."""
        return self.answer_type.kinds()

    @property
    def logit_names(self) -> tuple[str, ...]:
        """The name of each logit."""
        return self.names

    @property
    def width(self) -> int:
        """The number of logits of a document, or of each of its tokens."""
        return len(self.logit_names)

    @property
    def is_per_token(self) -> bool:
        """Whether the head answers for every token of a document."""
        return False

    @abstractmethod
    def scores(self, logits: Double) -> Double:
        """Return the numbers of answers ``[..., len(names)]`` for logits ``[..., width]``."""

    @abstractmethod
    def answer(self, logits: Double) -> Answer:
        """Return the answer for the logits ``[width]``, or ``[tokens, width]``, of one document."""

    def score_error(self, output: Double, expected: Double) -> float:
        """Return the error of an answer's numbers for two outputs ``[..., width]``."""
        # It is bounded as the error of the logits is: a probability moves by at most half of the
        # difference of two logits, and by a quarter of that of one.
        return float(np.abs(self.scores(output) - self.scores(expected)).max(initial=0.0))

    @abstractmethod
    def flips(self, output: Double, expected: Double) -> tuple[int, float | None]:
        """Return how many of the decisions for two outputs ``[..., width]`` differ, and the lead.

        The lead is the smallest distance of the output from another decision than that of
        ``expected``, in logits; it is negative for a flip, and None if the head decides nothing.
        """


Decisions = NDArray[np.int64]


class DecidingHead(Head):
    """The meaning of an output whose scores are probabilities of labels for a document."""

    @abstractmethod
    def decisions(self, logits: Double) -> Decisions:
        """Return the decisions for logits ``[..., width]``.

        They are the index of the label ``[...]``, or for each of independent labels ``[...,
        width]`` 1 if it holds, else 0. Answers, flips and calibrations follow them.
        """


def numbered(count: int, names: Sequence[str] | None, stem: str) -> tuple[str, ...]:
    """Return a name for each of ``count`` numbers: the given ones, or ``class_0`` and so on.

    Raises:
        UsageError: if the names are not one distinct name for each.
    """
    if names is None:
        return tuple(f"{stem}_{i}" for i in range(count))
    remedy = f"Give one name for each {stem}."
    if not _are_names(names):
        raise UsageError(f"The labels must be a list of names, got {str(names)[:80]}.", remedy)
    if not all(map(_is_unicode, names)):
        raise UsageError(
            "The labels must be UTF-8, got other bytes.", "Give the labels in a UTF-8 locale."
        )
    if len(names) != count or len(set(names)) != count or not all(names):
        raise UsageError(
            f"Expected {count} different labels, got {len(set(filter(None, names)))} in "
            f"{', '.join(map(repr, names))}.",
            remedy,
        )
    return tuple(names)


def is_numbered(names: Sequence[str]) -> bool:
    """Return whether names are those that ``numbered`` makes without given ones."""
    stem = names[0].rpartition("_")[0]
    return stem in ("class", "label", "value") and names == numbered(len(names), None, stem)


def check_distinct(field: str, names: Sequence[str]) -> None:
    """Raise ValueError if two names of a field of the manifest are equal."""
    if len(set(names)) != len(names):
        raise ValueError(f"{field}: expected different names, got one of them twice")


def _are_names(names: object) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line that the locale cannot decode
        return False
    return True


def sigmoid(logits: Double) -> Double:
    """Return ``1 / (1 + exp(-x))`` without overflow, for any finite x."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def logit(probability: Double) -> Double:
    """Return the number whose sigmoid is the probability, between 0 and 1."""
    return np.log(probability) - np.log1p(-probability)


def softmax(logits: Double) -> Double:
    """Return the softmax over the last axis, without overflow for finite logits."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def flips_of_largest(output: Double, expected: Double) -> tuple[int, float | None]:
    """Count rows whose largest logit is another, and measure the lead; see ``Head.flips``."""
    if not output.size:
        return 0, None
    labels = expected.argmax(-1)
    own = np.take_along_axis(output, labels[..., None], -1)
    others = output.copy()
    np.put_along_axis(others, labels[..., None], -np.inf, -1)
    flips = int((output.argmax(-1) != labels).sum())
    return flips, float((own[..., 0] - others.max(-1)).min())
