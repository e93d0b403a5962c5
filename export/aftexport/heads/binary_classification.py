"""One of two labels holds, and one logit tells which: its sigmoid is the score of the second."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from annotated_types import Len
from pydantic import model_validator

from aftexport.errors import UsageError
from aftexport.heads.answer import Answer
from aftexport.heads.head import (
    DecidingHead,
    Decisions,
    Double,
    check_distinct,
    logit,
    numbered,
    sigmoid,
)
from aftexport.heads.multi_label_classification import DEFAULT_THRESHOLD, Threshold
from aftexport.heads.single_label_classification import LabelAnswer


class BinaryClassification(DecidingHead):
    """Two labels that exclude each other, and one logit.

    Attributes:
        labels: the name for a low score, and the name for a high score.
        threshold: the smallest score with which the second label holds.
    """

    meaning: ClassVar[str] = "sigmoid of one logit, for the second of two labels"
    answer_type: ClassVar[type[Answer]] = LabelAnswer

    task: Literal["binary_classification"] = "binary_classification"
    labels: Annotated[tuple[str, ...], Len(2, 2)]
    threshold: Threshold = DEFAULT_THRESHOLD

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_distinct("labels", self.labels)
        return self

    @classmethod
    def of_width(cls, width: int, names: Sequence[str] | None) -> Self:
        """Return a head for one logit with a threshold of 0.5; see ``Head``."""
        if width != 1:
            raise UsageError(
                f"Expected one logit for binary_classification, got {width}.",
                "Use --task single_label_classification for a logit of each label.",
            )
        return cls(labels=numbered(2, names, "class"))

    @property
    def names(self) -> tuple[str, ...]:
        """Both labels."""
        return self.labels

    @property
    def logit_names(self) -> tuple[str, ...]:
        """The second label, for which the logit stands."""
        return self.labels[1:]

    def scores(self, logits: Double) -> Double:
        """Return the sigmoids of the negative logit and of the logit."""
        return sigmoid(np.concatenate([-logits, logits], -1))

    def decisions(self, logits: Double) -> Decisions:
        """Return 1 for the second label, if its score is at least the threshold, else 0."""
        return np.asarray(self.scores(logits)[..., 1] >= self.threshold, np.int64)

    def answer(self, logits: Double) -> LabelAnswer:
        """Return the second label if its score is at least the threshold, and both scores."""
        scores = self.scores(logits).tolist()
        return LabelAnswer(
            label=self.labels[int(self.decisions(logits))],
            scores=dict(zip(self.labels, scores, strict=True)),
        )

    def flips(self, output: Double, expected: Double) -> tuple[int, float | None]:
        """Count other labels, and measure the smallest distance from the threshold."""
        holds, wanted = (self.decisions(x) for x in (output, expected))
        above = output[..., 0] - logit(np.array(self.threshold))
        return int((holds != wanted).sum()), float(np.where(wanted == 1, above, -above).min())
