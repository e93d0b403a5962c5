"""A calibration in a manifest fits its heads, and is applied as it is written."""

import numpy as np
import pytest
from calibrations import calibration
from pydantic import ValidationError

from aftexport.heads import (
    BinaryClassification,
    Head,
    MultiLabelClassification,
    Regression,
    SingleLabelClassification,
)
from aftexport.heads.calibration import (
    Calibration,
    FittedScalings,
    Scaling,
    confidences,
)
from aftexport.heads.regression import Value

KIND = SingleLabelClassification(labels=("a", "b", "c"))
SPAM = BinaryClassification(labels=("ham", "spam"), threshold=0.3)
FLAGS = MultiLabelClassification(labels=("x", "y"), thresholds=(0.5, 0.2))


def test_temperature_depends_on_length() -> None:
    """The temperature is 2 at 16 tokens and twice as large for each fourfold length."""
    half = np.log(2) / 2
    found = calibration(Scaling(log_temperature=np.log(2) - 4 * half, slope=half))
    assert found.depends_on_length
    logits = np.tile([3.0, -1.0, 0.5], (5, 1))
    scaled = found.logits(logits, np.array([16, 64, 1024, 3, 10**6]))
    np.testing.assert_allclose(scaled, logits / np.array([[2], [4], [16], [2], [16]]), rtol=1e-12)


def test_platt_scales_each_label() -> None:
    scalings = (Scaling(log_temperature=np.log(4), bias=0.5), Scaling(log_temperature=0.0))
    found = calibration(*scalings, method="platt")
    assert not found.depends_on_length
    np.testing.assert_allclose(found.logits(np.array([2.0, -3.0]), 64), [1.0, -3.0])


@pytest.mark.parametrize(
    ("head", "logits", "decided", "confidence"),
    [
        (KIND, [2.0, 1.0, 0.0], 0, 1 / (1 + np.exp(-1) + np.exp(-2))),
        (SPAM, [-0.5], 1, 1 / (1 + np.exp(0.5))),
        (SPAM, [-2.0], 0, 1 / (1 + np.exp(-2.0))),
        (FLAGS, [3.0, -1.0], [1, 1], 1 / (1 + np.exp(1.0))),
        (FLAGS, [-3.0, -4.0], [0, 0], 1 / (1 + np.exp(-3.0))),
    ],
)
def test_confidence_is_of_decision(
    head: Head, logits: list[float], decided: object, confidence: float
) -> None:
    row = np.array(logits)
    assert head.decisions(row).tolist() == decided
    assert float(confidences(head, row, head.scores(row))) == pytest.approx(confidence)


@pytest.mark.parametrize(("above", "abstain"), [(None, None), (0.6, False), (0.7, True)])
def test_answer_gets_calibrated_scores(above: float | None, abstain: bool | None) -> None:
    row = np.array([4.0, 2.0, 0.0])
    found = calibration(Scaling(log_temperature=np.log(2)), above=above)
    plain = KIND.answer(row)
    answer = found.applied(KIND, plain, row, 100)
    assert (answer.label, answer.scores, answer.abstain) == (plain.label, plain.scores, abstain)
    wanted = dict(zip(KIND.labels, KIND.scores(row / 2).tolist(), strict=True))
    assert answer.calibrated == pytest.approx(wanted)
    assert plain.calibrated is plain.abstain is None


def test_threshold_has_scalings_of_its_own() -> None:
    row = np.array([4.0, 2.0, 0.0])
    found = calibration(Scaling(log_temperature=np.log(2)), above=0.7)
    assert found.threshold is not None

    def with_fit(*scalings: Scaling) -> Calibration:
        fit = FittedScalings(scalings=scalings, min_tokens=1, max_tokens=9, documents=3)
        assert found.threshold is not None
        threshold = found.threshold.model_copy(update={"fit": fit})
        return found.model_copy(update={"threshold": threshold})

    sure = with_fit(Scaling(log_temperature=0.0)).applied(KIND, KIND.answer(row), row, 100)
    unsure = found.applied(KIND, KIND.answer(row), row, 100)
    assert sure.calibrated == unsure.calibrated
    assert (sure.abstain, unsure.abstain) == (False, True)
    wide = with_fit(*[Scaling(log_temperature=0.0)] * 2)
    assert wide.problem_for(KIND) == "scalings: expected 1, got 2"


@pytest.mark.parametrize(
    ("head", "method", "count", "problem"),
    [
        (KIND, "temperature", 1, None),
        (SPAM, "temperature", 1, None),
        (FLAGS, "platt", 2, None),
        (FLAGS, "platt", 1, "scalings: expected 2, got 1"),
        (FLAGS, "temperature", 1, "expected the method platt"),
        (KIND, "temperature", 3, "scalings: expected 1, got 3"),
        (Regression(values=(Value(name="age"),)), "temperature", 1, "expected a head of labels"),
    ],
)
def test_calibration_must_fit_head(
    head: Head, method: str, count: int, problem: str | None
) -> None:
    found = calibration(*[Scaling(log_temperature=0.0)] * count, method=method)
    reason = found.problem_for(head)
    assert (reason is None) == (problem is None)
    assert problem is None or problem in str(reason)


def test_calibration_survives_json() -> None:
    found = calibration(Scaling(log_temperature=1 / 3, slope=0.1), above=1 - 2**-53)
    assert Calibration.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ValidationError, match="log_temperature"):
        Scaling(log_temperature=float("nan"))
