"""The fit of scalings by negative log likelihood, with a trend by length where there is one.

Single-label and binary heads have one temperature (Guo et al., "On calibration of modern neural
networks", ICML 2017). Independent labels have a temperature and a bias each (Platt, "Probabilistic
outputs for support vector machines", 1999). Targets are smoothed as in Platt's paper: otherwise
documents that are all answered correctly would have a temperature of 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import chdtrc, expit

from aftexport.errors import UsageError
from aftexport.heads import BinaryClassification, Head, MultiLabelClassification
from aftexport.heads.calibration import Scaling, confidences
from aftexport.heads.head import DecidingHead, Double


@dataclass(frozen=True)
class Sample:
    """The labelled documents of one head."""

    head: DecidingHead
    logits: Double  # [documents, width]
    tokens: NDArray[np.int64]  # the lengths [documents]
    # the index of the true label [documents]; for independent labels [documents, width], 1 for a
    # label that holds
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

        Two arrays ``[documents, columns]``: the score of every independent label and whether it
        holds, else the score of the answered label and whether it is right.
        """
        if self.has_independent_labels:
            return scores, self.truths.astype(np.float64)
        right = ~self.is_wrong()
        own = confidences(self.head, self.logits, scores)
        return own[:, None], right[:, None].astype(np.float64)


TREND_LEVEL = 0.01
"""The significance level of the likelihood-ratio test for a trend by length, for one head."""
MIN_EVENTS_PER_PARAMETER = 10
"""The least documents of the rarer outcome for each parameter (Peduzzi et al., 1996)."""
_MAX_LOG_TEMPERATURE = 10.0
"""The bound on the logarithm of the temperature at the average length."""
_MAX_SLOPE = 2.0
_Loss = Callable[[Double], tuple[float, Double]]
"""A function of parameters that returns the loss and its gradient."""


@dataclass(frozen=True)
class Fit:
    """A scaling, and the test for a trend by length."""

    scaling: Scaling
    # the probability of as large a gain in likelihood without a trend; None if the documents cannot
    # show a trend
    p_value: float | None
    loss_before: float  # the mean negative log likelihood of the scores without a calibration
    loss_after: float  # the same with the chosen scaling


def fit(sample: Sample) -> tuple[Fit, ...]:
    """Fit the scaling of a head, or one for each independent label."""
    # A trend by length is taken if the likelihood-ratio test rejects its absence at TREND_LEVEL,
    # divided by the number of labels.
    lengths = np.log2(sample.tokens)
    if not sample.has_independent_labels:
        events = len(sample)
        loss, scale = _temperature_loss(sample), _scale(sample.logits)
        return (_fit(loss, lengths, events, TREND_LEVEL, scale=scale, has_bias=False),)
    width = sample.head.width
    fits = []
    for label in range(width):
        holds = sample.truths[:, label].astype(np.float64)
        events = int(min(holds.sum(), len(holds) - holds.sum()))
        loss = _platt_loss(sample.logits[:, label], holds)
        scale, level = _scale(sample.logits[:, [label]]), TREND_LEVEL / width
        fits.append(_fit(loss, lengths, events, level, scale=scale, has_bias=True))
    return tuple(fits)


_LossAt = Callable[[Double, float], tuple[float, Double, float]]
"""A function of log temperatures ``[documents]`` and a bias.

It returns the loss and its derivatives by each log temperature and by the bias.
"""


def _scale(logits: Double) -> float:
    """Return the logarithm of the size of logits, at which the search for a temperature starts."""
    size = float((logits - logits.mean(0)).std())
    return (
        float(np.clip(np.log(size), -_MAX_LOG_TEMPERATURE, _MAX_LOG_TEMPERATURE)) if size else 0.0
    )


def _fit(
    loss: _LossAt, lengths: Double, events: int, level: float, *, scale: float, has_bias: bool
) -> Fit:
    """Fit one scaling, and choose whether it has a trend by length."""
    # lengths are binary logarithms; events is the number of documents of the rarer outcome.
    center = float(lengths.mean())
    spread = lengths - center
    count = len(lengths)

    def at(parameters: Double) -> tuple[float, Double]:
        middle, slope, bias = parameters
        value, by_temperature, by_bias = loss(middle + slope * spread, bias)
        gradient = [by_temperature.sum(), by_temperature @ spread, by_bias * has_bias]
        return value / count, np.array(gradient) / count

    before = at(np.zeros(3))[0]
    start = np.array([scale, 0.0, 0.0])
    constant, parameters = _minimized(at, start, has_slope=False, has_bias=has_bias)
    p_value = None
    after = constant
    if np.ptp(lengths) > 0 and events >= MIN_EVENTS_PER_PARAMETER * (2 + has_bias):
        trend, with_slope = _minimized(at, parameters, has_slope=True, has_bias=has_bias)
        p_value = float(chdtrc(1, max(0.0, 2 * count * (constant - trend))))
        if p_value < level:
            after, parameters = trend, with_slope
    middle, slope, bias = parameters.tolist()
    scaling = Scaling(log_temperature=middle - slope * center, slope=slope, bias=bias)
    return Fit(scaling, p_value, before, after)


def _minimized(
    loss: _Loss, start: Double, *, has_slope: bool, has_bias: bool
) -> tuple[float, Double]:
    """Return the smallest loss and its parameters; a parameter that is absent stays at 0."""
    bounds = [
        (-_MAX_LOG_TEMPERATURE, _MAX_LOG_TEMPERATURE),
        (-_MAX_SLOPE, _MAX_SLOPE) if has_slope else (0.0, 0.0),
        (None, None) if has_bias else (0.0, 0.0),
    ]
    found = minimize(
        loss,
        start,
        jac=True,
        method="SLSQP",
        bounds=bounds,
        options={"ftol": 1e-12},
    )
    return float(found.fun), np.asarray(found.x)


def _temperature_loss(sample: Sample) -> _LossAt:
    """Return the loss of a temperature, with one smoothing document over all labels."""
    logits = sample.logits
    if isinstance(sample.head, BinaryClassification):
        logits = np.concatenate([np.zeros_like(logits), logits], -1)
    count, width = logits.shape
    targets = np.full((count, width), 1 / (count + 1) / width)
    np.put_along_axis(
        targets, sample.truths[:, None], count / (count + 1) + 1 / (count + 1) / width, 1
    )

    def loss(log_temperatures: Double, bias: float) -> tuple[float, Double, float]:
        scaled = logits * np.exp(-log_temperatures)[:, None]
        shifted = scaled - scaled.max(-1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        value = -(targets * logs).sum()
        by_logit = np.exp(logs) - targets
        return float(value), -(by_logit * scaled).sum(-1), 0.0

    return loss


def _platt_loss(logits: Double, holds: Double) -> _LossAt:
    """Return the loss of a temperature and a bias, with Platt's targets."""
    targets = _platt_targets(holds)

    def loss(log_temperatures: Double, bias: float) -> tuple[float, Double, float]:
        scaled = logits * np.exp(-log_temperatures)
        shifted = scaled + bias
        value = (np.logaddexp(0, shifted) - targets * shifted).sum()
        by_logit = expit(shifted) - targets
        return float(value), -by_logit * scaled, float(by_logit.sum())

    return loss


def _platt_targets(holds: Double) -> NDArray[np.float64]:
    positive = holds.sum()
    negative = len(holds) - positive
    return np.asarray(np.where(holds == 1, (positive + 1) / (positive + 2), 1 / (negative + 2)))


LEVEL = 0.95
"""The probability of every interval and bound."""
_MAX_HALF_INTERVAL = 0.1
MIN_DOCUMENTS = math.ceil(1.96**2 * 0.25 / _MAX_HALF_INTERVAL**2)
"""The least documents of a fit or a band: a share of them is within 0.1 with 95 %, so 97."""
_FIT_DIVISOR = 3
"""One third of the documents is for the fit if a threshold is tested on the others."""


def documents_without_error(budget: float) -> int:
    """Return the least answered documents that can show an error rate within a budget."""
    # Without any error, n documents bound the rate by 1 - 0.05 ** (1 / n) with 95 %.
    return math.ceil(math.log(1 - LEVEL) / math.log1p(-budget))


def documents_for(budget: float | None) -> int:
    """Return the least documents for a calibration, with a threshold if there is a budget."""
    if budget is None:
        return MIN_DOCUMENTS
    tested = documents_without_error(budget)
    return max(tested + MIN_DOCUMENTS, (_FIT_DIVISOR * tested - 1) // (_FIT_DIVISOR - 1))


def fit_count(documents: int) -> int:
    """Return the number of documents for the fit if a threshold is tested on the others."""
    return max(MIN_DOCUMENTS, documents // _FIT_DIVISOR)


def check_truths(name: str, head: Head, truths: NDArray[np.int64], budget: float | None) -> None:
    """Check that a head has enough labelled documents, also of each label.

    Raises:
        UsageError: if there are too few; the message has the number that is needed.
    """
    needed = documents_for(budget)
    if len(truths) < needed:
        reason = "" if budget is None else f" with --error-budget {budget:g}"
        raise UsageError(
            f"A calibration of the head {name!r}{reason} needs at least {needed} labelled "
            f"documents, got {len(truths)}.",
            "Label more documents."
            if budget is None
            else "Label more documents, or allow a larger --error-budget.",
        )
    share = 1.0 if budget is None else fit_count(len(truths)) / len(truths)
    if truths.ndim == 2:
        _check_independent_labels(name, head, truths, 2 * MIN_EVENTS_PER_PARAMETER / share)
    else:
        counts = np.bincount(truths, minlength=len(head.names))
        for label, count in zip(head.names, counts.tolist(), strict=True):
            _check_label(name, "with", label, count, MIN_EVENTS_PER_PARAMETER / share)


def _check_independent_labels(
    name: str, head: Head, truths: NDArray[np.int64], needed: float
) -> None:
    for label, held in zip(head.names, truths.sum(0).tolist(), strict=True):
        _check_label(name, "with", label, held, needed)
        _check_label(name, "without", label, len(truths) - held, needed)


def _check_label(name: str, relation: str, label: str, count: int, needed: float) -> None:
    if count < needed:
        raise UsageError(
            f"The head {name!r} needs at least {math.ceil(needed)} documents {relation} the label "
            f"{label!r}, got {count}.",
            "Label more documents of this kind.",
        )
