"""Exactly one of several labels holds: the scores are a softmax of the logits."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from annotated_types import Len
from pydantic import model_validator

from aftexport.errors import UsageError
from aftexport.heads.answer import Answer, Name, Numbers
from aftexport.heads.head import (
    DecidingHead,
    Decisions,
    Double,
    check_distinct,
    flips_of_largest,
    numbered,
    softmax,
)


class LabelAnswer(Answer):
    """The label of a document.

    Attributes:
        label: the label with the largest score.
        scores: the probability of every label.
        calibrated: the calibrated probability of every label, if the head has a calibration.
        abstain: whether the confidence is below the calibration's threshold, if it has one.
    """

    label: Name
    scores: Numbers
    calibrated: dict[str, float] | None = None
    abstain: bool | None = None


class SingleLabelClassification(DecidingHead):
    """Labels that exclude each other.

    Attributes:
        labels: the names in the order of the logits.
    """

    meaning: ClassVar[str] = "softmax over exclusive labels"
    answer_type: ClassVar[type[Answer]] = LabelAnswer

    task: Literal["single_label_classification"] = "single_label_classification"
    labels: Annotated[tuple[str, ...], Len(2)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_distinct("labels", self.labels)
        return self

    @classmethod
    def of_width(cls, width: int, names: Sequence[str] | None) -> Self:
        """Return a head for ``width`` labels; see ``Head``."""
        if width < 2:
            raise UsageError(
                f"Expected logits for at least 2 labels that exclude each other, got {width}: a "
                "softmax over one label is always 1.0.",
                "Give another task: --task binary_classification for one logit of two labels.",
            )
        return cls(labels=numbered(width, names, "class"))

    @property
    def names(self) -> tuple[str, ...]:
        """The labels."""
        return self.labels

    def scores(self, logits: Double) -> Double:
        """Return the softmax of the logits."""
        return softmax(logits)

    def decisions(self, logits: Double) -> Decisions:
        """Return the index of the largest logit."""
        return np.asarray(logits.argmax(-1), np.int64)

    def answer(self, logits: Double) -> LabelAnswer:
        """Return the label with the largest logit, and all scores."""
        scores = dict(zip(self.labels, self.scores(logits).tolist(), strict=True))
        return LabelAnswer(label=self.labels[int(self.decisions(logits))], scores=scores)

    def flips(self, output: Double, expected: Double) -> tuple[int, float | None]:
        """Count other labels, and measure the smallest lead of the expected label."""
        return flips_of_largest(output, expected)
