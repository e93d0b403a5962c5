"""Any number of labels holds: the score of each is the sigmoid of its logit."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from annotated_types import Gt, Len, Lt
from pydantic import model_validator

from aftexport.heads.answer import Answer, Names, Numbers
from aftexport.heads.head import (
    DecidingHead,
    Decisions,
    Double,
    check_distinct,
    logit,
    numbered,
    sigmoid,
)

Threshold = Annotated[float, Gt(0), Lt(1)]
"""The smallest score of a label that holds."""
DEFAULT_THRESHOLD = 0.5


class LabelsAnswer(Answer):
    """The labels of a document.

    Attributes:
        labels: the labels whose score is at least their threshold, in the order of the logits.
        scores: the probability of every label.
        calibrated: the calibrated probability of every label, if the head has a calibration.
        abstain: whether the confidence is below the calibration's threshold, if it has one.
    """

    labels: Names
    scores: Numbers
    calibrated: dict[str, float] | None = None
    abstain: bool | None = None


class MultiLabelClassification(DecidingHead):
    """Labels that hold independently of each other.

    Attributes:
        labels: the names in the order of the logits.
        thresholds: for each label the smallest score with which it holds.
    """

    meaning: ClassVar[str] = "sigmoid for each of independent labels"
    answer_type: ClassVar[type[Answer]] = LabelsAnswer

    task: Literal["multi_label_classification"] = "multi_label_classification"
    labels: Annotated[tuple[str, ...], Len(1)]
    thresholds: tuple[Threshold, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_distinct("labels", self.labels)
        if len(self.thresholds) != len(self.labels):
            raise ValueError(
                f"thresholds: expected one for each of {len(self.labels)} labels, got "
                f"{len(self.thresholds)}"
            )
        return self

    @classmethod
    def of_width(cls, width: int, names: Sequence[str] | None) -> Self:
        """Return a head for ``width`` labels with thresholds of 0.5; see ``Head``."""
        labels = numbered(width, names, "label")
        return cls(labels=labels, thresholds=(DEFAULT_THRESHOLD,) * width)

    @property
    def names(self) -> tuple[str, ...]:
        """The labels."""
        return self.labels

    def scores(self, logits: Double) -> Double:
        """Return the sigmoid of each logit."""
        return sigmoid(logits)

    def decisions(self, logits: Double) -> Decisions:
        """Return for each label 1 if its score is at least its threshold, else 0."""
        return np.asarray(self.scores(logits) >= np.array(self.thresholds), np.int64)

    def answer(self, logits: Double) -> LabelsAnswer:
        """Return the labels over their thresholds, and all scores."""
        holds = zip(self.labels, self.decisions(logits).tolist(), strict=True)
        return LabelsAnswer(
            labels=tuple(label for label, is_held in holds if is_held),
            scores=dict(zip(self.labels, self.scores(logits).tolist(), strict=True)),
        )

    def flips(self, output: Double, expected: Double) -> tuple[int, float | None]:
        """Count rows with other labels, and measure the smallest distance from a threshold."""
        holds, wanted = (self.decisions(x) for x in (output, expected))
        above = output - logit(np.array(self.thresholds))
        lead = np.where(wanted == 1, above, -above)
        return int((holds != wanted).any(-1).sum()), float(lead.min())
