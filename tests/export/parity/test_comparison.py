import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aftexport.bundle.golden import OPERATOR_OUTPUT, Case
from aftexport.heads import SingleLabelClassification
from aftexport.parity import TOLERANCES, Comparison, compare, worst
from aftexport.parity.comparison import Differences
from aftexport.system.files import write_json

IDS = {"input_ids": np.zeros((2, 3), np.int64)}


def compared(output: object, expected: object, subject: str = "model") -> Comparison:
    inputs = IDS if subject == "model" else {"query": np.zeros((2, 3, 1)), "lengths": [3, 1]}
    name = "logits" if subject == "model" else OPERATOR_OUTPUT
    (result,) = compare(
        Case("c", subject, inputs, {name: np.asarray(expected)}),  # type: ignore[arg-type]
        {name: np.asarray(output)},
        "fp32",
        heads={"logits": SingleLabelClassification(labels=("a", "b"))},
    )
    return result


def test_error_is_relative_only_above_one() -> None:
    assert compared([[1000.05, 0.0]], [[1000.0, 0.0]]).error == pytest.approx(5e-5)
    assert compared([[0.05, 0.0]], [[0.0, 0.0]]).error == pytest.approx(0.05)
    assert compared([[2.0, 1.0]], [[1.0, 2.0]]).label_flips == 1


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([[np.nan, 0.0]], [[1.0, 0.0]]),
        ([[np.inf, 0.0]], [[1.0, 0.0]]),
        ([[np.inf, 0.0]], [[np.inf, 0.0]]),
        ([[1.0, 0.0]], [[np.nan, 0.0]]),
        ([[np.nan, 0.0]], [[np.nan, 0.0]]),
        ([[1.0, 0.0, 0.0]], [[1.0, 0.0]]),
        ([1.0, 0.0], [[1.0, 0.0]]),
        ([[1.0, 0.0]] * 2, [[1.0, 0.0]]),
    ],
)
def test_incomparable_outputs_never_pass(output: object, expected: object) -> None:
    result = compared(output, expected)
    assert not result.passed
    fine = compared([[1.0]], [[1.0]])
    assert worst([fine, result]) is result
    assert worst([result, fine]) is result


def test_operator_has_no_head_of_its_name() -> None:
    """A model's output may have the name that every operator's output has."""
    output = np.zeros((1, 4, 8))
    case = Case("c", "AftSimple", {"query": output}, {OPERATOR_OUTPUT: output})
    heads = {OPERATOR_OUTPUT: SingleLabelClassification(labels=("a", "b"))}
    (result,) = compare(case, {OPERATOR_OUTPUT: output}, "fp32", heads=heads)
    assert result.score_error is None
    assert result.closest_margin is None


def test_measures_match_their_names() -> None:
    found = compared(np.float32([[1.5, 4.0], [0.0, 3.0]]), [[1.0, 4.0], [0.0, 2.0]])
    assert found.max_absolute == 1.0
    assert found.mean_absolute == pytest.approx(1.5 / 4)
    assert found.max_relative == 0.5
    assert found.mean_relative == pytest.approx(1 / 3)
    assert found.error == pytest.approx(1 / 4)
    assert found.cosine == pytest.approx((1.5 + 16 + 6) / np.sqrt((2.25 + 16 + 9) * 21))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ulps_use_type_of_output(dtype: type[np.floating]) -> None:
    one = np.ones((1, 2), dtype)
    after = np.nextafter(one, dtype(2))
    assert compared(np.nextafter(after, dtype(2)), np.ones((1, 2))).max_ulps == 2
    assert compared(one, np.ones((1, 2))).max_ulps == 0


def test_margin_is_of_closest_row() -> None:
    """The margin is that of the reference label."""
    near = compared([[5.0, 1.0], [2.0, 1.75]], [[5.0, 1.0], [2.0, 1.5]])
    assert (near.label_flips, near.closest_margin) == (0, 0.25)
    flipped = compared([[5.0, 1.0], [1.5, 2.0]], [[5.0, 1.0], [2.0, 1.5]])
    assert (flipped.label_flips, flipped.closest_margin) == (1, -0.5)
    assert compared([[1.0]], [[1.0]], "AftSimple").closest_margin is None


def test_scores_have_the_bound_of_logits() -> None:
    """A near tie of large logits: their relative error is small, that of the scores is not."""
    result = compared([[10000.5, 10000.0]], [[10000.0, 10000.0]])
    assert result.error < result.bound < 0.1 < result.score_error
    assert not result.passed
    assert worst([compared([[0.1, 0.0]], [[0.0, 0.0]]), result]).score_error is not None


@settings(deadline=None, max_examples=50)
@given(
    arrays.arrays(np.float32, (2, 5), elements=st.floats(-1e6, 1e6, width=32)),
    arrays.arrays(np.float32, (2, 5), elements=st.floats(-1e6, 1e6, width=32)),
)
def test_measures_agree_with_one_another(output: np.ndarray, expected: np.ndarray) -> None:
    found = Differences.between(output, expected)
    rounded = 1 + 1e-12
    assert 0 <= found.mean_absolute <= found.max_absolute * rounded
    assert found.mean_relative <= found.max_relative * rounded
    assert found.error <= found.max_absolute
    assert -1 - 1e-9 <= found.cosine <= 1 + 1e-9
    assert (found.max_absolute == 0) == bool((output == expected).all())
    assert (found.max_ulps == 0) == (found.max_absolute == 0)


@pytest.mark.parametrize("output", [0.0, 1e-9, float("inf")])
def test_a_comparison_survives_json(output: float, tmp_path: Path) -> None:
    before = compared([[output, 0.0]], [[0.0, 0.0]])
    write_json(tmp_path / "parity.json", before.to_dict())
    content = json.loads((tmp_path / "parity.json").read_text(), parse_constant=pytest.fail)
    assert content == before.to_dict()
    assert content["error"] == (before.error if np.isfinite(output) else "inf")


def test_operator_comparison_ignores_padding_rows() -> None:
    expected, output = np.zeros((2, 3, 1)), np.zeros((2, 3, 1))
    output[1, 1:] = np.nan
    assert compared(output, expected, "AftSimple").passed
    output[1, 0] = 9
    assert not compared(output, expected, "AftSimple").passed


def test_operator_compares_empty_sums() -> None:
    """Both logarithms of an empty sum are -inf; a model's output is never infinite."""
    both, one = np.array([[-np.inf, 1.0]]), np.array([[0.0, 1.0]])
    for subject, output, error in (
        ("SoftmaxAttention", both, 0.0),
        ("SoftmaxAttention", one, np.inf),
        ("model", both, np.inf),
    ):
        case = Case("c", subject, IDS, {"output": both})
        assert compare(case, {"output": output}, "fp32")[0].error == error


def test_every_bound_is_given_a_reason() -> None:
    for tolerance in TOLERANCES.values():
        assert 0 < tolerance.bound < 0.1
        assert tolerance.reason
