"""Labelled documents after their run: logits, lengths and truths of one head."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aftexport.heads import MultiLabelClassification
from aftexport.heads.calibration import confidences
from aftexport.heads.deciding_head import DecidingHead
from aftexport.heads.head import Double


@dataclass(frozen=True)
class Sample:
    """The labelled documents of one head.

    Attributes:
        head: the head.
        logits: the logits ``[documents, width]``.
        tokens: the lengths ``[documents]``.
        truths: the index of the true label ``[documents]``; for independent labels ``[documents,
            width]``, 1 for a label that holds.
    """

    head: DecidingHead
    logits: Double
    tokens: NDArray[np.int64]
    truths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def has_independent_labels(self) -> bool:
        """Whether any number of labels may hold."""
        return isinstance(self.head, MultiLabelClassification)

    def part(self, chosen: NDArray[np.generic]) -> Self:
        """Return the documents of an index or a mask."""
        return type(self)(self.head, self.logits[chosen], self.tokens[chosen], self.truths[chosen])

    def is_wrong(self) -> NDArray[np.bool_]:
        """Return whether the answer for each document is wrong, in at least one label."""
        wrong = self.head.decisions(self.logits) != self.truths
        return np.asarray(wrong.any(-1) if self.has_independent_labels else wrong)

    def observations(self, scores: Double) -> tuple[Double, Double]:
        """Return the scores whose calibration counts, and whether each came true.

        Args:
            scores: scores ``[documents, names]``, calibrated or not.

        Returns:
            Two arrays ``[documents, columns]``: the score of every independent label and whether
            it holds, else the score of the answered label and whether it is right.
        """
        if self.has_independent_labels:
            return scores, self.truths.astype(np.float64)
        right = ~self.is_wrong()
        own = confidences(self.head, self.logits, scores)
        return own[:, None], right[:, None].astype(np.float64)
