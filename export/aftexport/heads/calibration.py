"""Calibration: probabilities that agree with the shares that were observed, and when to abstain.

``aftexport calibrate`` fits a calibration on labelled documents. The server only applies it.
"""

from typing import Annotated, Literal, TypeVar

import numpy as np
from annotated_types import Ge, Gt, Le, Len, Lt
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict

from aftexport.heads.answer import Answer
from aftexport.heads.head import DecidingHead, Double, Head
from aftexport.heads.multi_label_classification import MultiLabelClassification

Count = Annotated[int, Ge(0), Le((1 << 63) - 1)]
Share = Annotated[float, Ge(0), Le(1)]
_AnswerT = TypeVar("_AnswerT", bound=Answer)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Scaling(_Part):
    """The map of a logit: ``logit / temperature + bias``.

    The temperature is ``exp(log_temperature + slope * log2(tokens))``.

    Attributes:
        log_temperature: the natural logarithm of the temperature at one token.
        slope: the change of that logarithm when a document becomes twice as long; 0 for a
            temperature that does not depend on the length.
        bias: the number that is added to the scaled logit.
    """

    log_temperature: Annotated[float, Ge(-50), Le(50)]
    slope: Annotated[float, Ge(-2), Le(2)] = 0.0
    bias: float = 0.0


class Estimate(_Part):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


class Band(_Part):
    """The documents of a range of lengths.

    Attributes:
        min_tokens, max_tokens: the shortest and the longest document.
        documents: the number of documents.
        error_before, error_after: the expected calibration error of the scores.
    """

    min_tokens: Count
    max_tokens: Count
    documents: Count
    error_before: Estimate
    error_after: Estimate


class FittedScalings(_Part):
    """The scalings of a head that were fitted to documents.

    Attributes:
        scalings: the one scaling, or that of each independent label.
        min_tokens, max_tokens: the range of lengths on which the scalings were fitted; other
            lengths count as the nearest length in it.
        documents: the number of documents on which the scalings were fitted.
    """

    scalings: Annotated[tuple[Scaling, ...], Len(1)]
    min_tokens: Annotated[Count, Ge(1)]
    max_tokens: Annotated[Count, Ge(1)]
    documents: Count

    def logits(self, logits: Double, tokens: ArrayLike) -> Double:
        """Return the calibrated logits ``[..., width]`` of documents with ``tokens [...]``."""
        return scaled(self.scalings, logits, np.clip(tokens, self.min_tokens, self.max_tokens))

    def scores(self, head: Head, logits: Double, tokens: ArrayLike) -> Double:
        """Return the calibrated scores ``[..., len(names)]``; see ``logits``."""
        return head.scores(self.logits(logits, tokens))


class Threshold(_Part):
    """The smallest confidence with which a document is answered within an error budget.

    Attributes:
        fit: the scalings that give the confidence, fitted without the tested documents.
        budget: the allowed share of wrong answers among the answered documents.
        level: the probability with which the share stays within the budget.
        confidence: the smallest confidence; documents below it are abstained from.
        documents: the number of documents on which the threshold was tested.
        answered: the number of those that reached the threshold.
        wrong: the number of wrong answers among those.
        error_bound: the upper bound on the share of wrong answers, at the given level.
        abstained: the share of documents below the threshold.
    """

    fit: FittedScalings
    budget: Annotated[float, Gt(0), Lt(1)]
    level: Annotated[float, Gt(0), Lt(1)]
    confidence: Share
    documents: Count
    answered: Count
    wrong: Count
    error_bound: Share
    abstained: Share


class Calibration(FittedScalings):
    """The calibration of a head, fitted to all labelled documents.

    Attributes:
        method: ``temperature`` for one scaling of all logits without a bias; ``platt`` for a
            scaling of each label.
        error_before, error_after: the expected calibration error, after by cross-fitting.
        bands: the same by length.
        threshold: when to abstain; None without an error budget.
    """

    method: Literal["temperature", "platt"]
    error_before: Estimate
    error_after: Estimate
    bands: tuple[Band, ...]
    threshold: Threshold | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether a temperature depends on the length of the document."""
        return any(scaling.slope != 0 for scaling in self.scalings)

    def problem_for(self, head: Head) -> str | None:
        """Return the reason why the calibration does not fit a head; None if it does."""
        if not isinstance(head, DecidingHead):
            return f"expected a head of labels, got {head.task}"
        method = "platt" if isinstance(head, MultiLabelClassification) else "temperature"
        if self.method != method:
            return f"expected the method {method} for {head.task}, got {self.method}"
        count = head.width if method == "platt" else 1
        for fit in (self, *([self.threshold.fit] if self.threshold else ())):
            if len(fit.scalings) != count:
                return f"scalings: expected {count}, got {len(fit.scalings)}"
        return None

    def applied(self, head: Head, answer: _AnswerT, logits: Double, tokens: int) -> _AnswerT:
        """Return the answer for the logits ``[width]`` with its calibrated scores."""
        scores = self.scores(head, logits, tokens)
        fields: dict[str, object] = {
            "calibrated": dict(zip(head.names, scores.tolist(), strict=True))
        }
        if self.threshold is not None:
            assert isinstance(head, DecidingHead)  # other heads have no calibration
            scores = self.threshold.fit.scores(head, logits, tokens)
            confidence = float(confidences(head, logits, scores))
            fields["abstain"] = confidence < self.threshold.confidence
        return answer.model_copy(update=fields)


def scaled(scalings: tuple[Scaling, ...], logits: Double, tokens: ArrayLike) -> Double:
    """Return logits ``[..., width]`` after their scalings, for documents of these lengths."""
    doublings = np.log2(np.asarray(tokens, np.float64))[..., None]
    start, slope, bias = (
        np.array([getattr(scaling, name) for scaling in scalings])
        for name in ("log_temperature", "slope", "bias")
    )
    return np.asarray(logits * np.exp(-(start + slope * doublings)) + bias)


def confidences(head: DecidingHead, logits: Double, scores: Double) -> Double:
    """Return the confidence ``[...]`` in the decision of a head for logits ``[..., width]``."""
    # It is the calibrated score of the label, which the scores before the calibration decide. For
    # independent labels it is the least certain of their decisions: the score of a label that
    # holds, or 1 minus that of a label that does not.
    decided = head.decisions(logits)
    if isinstance(head, MultiLabelClassification):
        return np.asarray(np.where(decided == 1, scores, 1 - scores).min(-1))
    return np.asarray(np.take_along_axis(scores, decided[..., None], -1)[..., 0])
