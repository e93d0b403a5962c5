"""Scores, decisions and names of every kind of head."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aftexport.errors import UsageError
from aftexport.heads import (
    HEADS,
    Answer,
    BinaryClassification,
    Head,
    MultiLabelClassification,
    Regression,
    SingleLabelClassification,
)
from aftexport.heads.answer import Field
from aftexport.heads.regression import Value
from aftexport.pipeline.head_choice import read_heads

LOGITS = st.floats(-700, 700, width=32)
MULTI_LABEL = MultiLabelClassification(labels=("a", "b", "c"), thresholds=(0.5, 0.25, 0.9))
BINARY = BinaryClassification(labels=("no", "yes"), threshold=0.8)
REGRESSION = Regression(
    values=(
        Value(name="age", unit="years", minimum=0.0, maximum=120.0, scale=12.5, offset=40.0),
        Value(name="mass"),
    )
)


def tensor(logits: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(logits, np.float64))


@given(arrays(np.float64, (4, 3), elements=LOGITS))
def test_scores_are_those_of_pytorch(logits: Any) -> None:
    exclusive = SingleLabelClassification(labels=("a", "b", "c"))
    np.testing.assert_allclose(exclusive.scores(logits), tensor(logits).softmax(-1), atol=1e-15)
    np.testing.assert_allclose(MULTI_LABEL.scores(logits), tensor(logits).sigmoid(), atol=1e-15)
    positive = BINARY.scores(logits[:, :1])
    np.testing.assert_allclose(positive[:, 1:], tensor(logits[:, :1]).sigmoid(), atol=1e-15)
    np.testing.assert_allclose(positive.sum(-1), 1)


def test_sigmoid_keeps_small_probabilities() -> None:
    scores = MULTI_LABEL.scores(np.array([-700.0, 0.0, 700.0]))
    assert scores[0] == pytest.approx(np.exp(-700), rel=1e-12)
    assert scores[1:].tolist() == [0.5, 1.0]


def test_label_holds_from_its_threshold() -> None:
    at = np.log(np.array([1.0, 1 / 3, 9.0]))
    assert MULTI_LABEL.answer(at + 1e-9).labels == ("a", "b", "c")
    assert MULTI_LABEL.answer(at - 1e-9).labels == ()
    assert MULTI_LABEL.answer(np.array([5.0, -5.0, 2.0])).labels == ("a",)


@pytest.mark.parametrize(("logit", "label"), [(1.38, "no"), (1.39, "yes"), (-9.0, "no")])
def test_binary_label_follows_threshold(logit: float, label: str) -> None:
    answer = BINARY.answer(np.array([logit]))
    assert answer.label == label
    assert answer.scores["yes"] == pytest.approx(1 / (1 + np.exp(-logit)))


def test_values_have_their_scale() -> None:
    assert REGRESSION.answer(np.array([0.4, -2.0])).values == {"age": 45.0, "mass": -2.0}
    output, expected = np.array([[0.5, 0.0]]), np.array([[0.0, 0.0]])
    assert REGRESSION.score_error(output, expected) == pytest.approx(6.25 / 40)
    assert REGRESSION.score_error(output[:, ::-1], expected) == 0.5


@pytest.mark.parametrize(
    ("head", "output", "expected", "flips", "margin"),
    [
        (SingleLabelClassification(labels=("a", "b")), [[3.0, 1.0]], [[3.0, 1.0]], 0, 2.0),
        (SingleLabelClassification(labels=("a", "b")), [[1.0, 1.5]], [[3.0, 1.0]], 1, -0.5),
        (BINARY, [[np.log(4) + 0.5], [0.0]], [[9.0], [-9.0]], 0, 0.5),
        (BINARY, [[np.log(4) - 0.5], [0.0]], [[9.0], [-9.0]], 1, -0.5),
        (MULTI_LABEL, [[1.0, 0.0, 0.0]], [[2.0, 1.0, 1.0]], 0, 1.0),
        (MULTI_LABEL, [[-1.0, -2.0, 9.0]], [[2.0, 1.0, 1.0]], 1, -6.802775422663781),
        (REGRESSION, [[1.0, 2.0]], [[5.0, 6.0]], 0, None),
    ],
)
def test_flips_and_margin(
    head: Any, output: Any, expected: Any, flips: int, margin: float | None
) -> None:
    counted, closest = head.flips(np.array(output), np.array(expected))
    assert counted == flips
    assert closest == (margin if margin is None else pytest.approx(margin))


@given(arrays(np.float64, (3, 3), elements=LOGITS), arrays(np.float64, (3, 3), elements=LOGITS))
def test_flips_are_other_answers(output: Any, expected: Any) -> None:
    for head in (SingleLabelClassification(labels=("a", "b", "c")), MULTI_LABEL):
        field = "label" if isinstance(head, SingleLabelClassification) else "labels"
        differ = [
            getattr(head.answer(one), field) != getattr(head.answer(other), field)
            for one, other in zip(output, expected, strict=True)
        ]
        flips, margin = head.flips(output, expected)
        assert flips == sum(differ)
        assert margin is not None
        assert margin <= 1e-9 or not flips


@pytest.mark.parametrize("task", [task for task in HEADS if task != "feature_extraction"])
def test_head_of_width_has_its_names(task: str) -> None:
    width = 1 if task == "binary_classification" else 3
    head = HEADS[task].of_width(width, None)
    assert (head.task, head.width, len(head.logit_names)) == (task, width, width)
    names = [f"name {i}" for i in range(len(head.names))]
    assert list(HEADS[task].of_width(width, names).names) == names
    for wrong in (names[1:], [*names, "more"], [names[0]] * len(names), "ab", [1] * len(names)):
        if len(names) > 1 or wrong != [names[0]]:
            with pytest.raises(UsageError, match="labels"):
                HEADS[task].of_width(width, wrong)  # type: ignore[arg-type]


def test_softmax_of_one_label_is_refused() -> None:
    with pytest.raises(UsageError, match=r"always 1\.0.*--task binary_classification"):
        SingleLabelClassification.of_width(1, ["a"])
    with pytest.raises(UsageError, match="one logit for binary_classification, got 2"):
        BinaryClassification.of_width(2, None)


def test_head_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({"logits": json.loads(REGRESSION.model_dump_json())}))
    assert read_heads(file) == {"logits": REGRESSION}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "JSON"),
        ("[]", "object"),
        ('{"logits": {"task": "ordinal"}}', "ordinal"),
        ('{"logits": {"labels": ["a", "b"]}}', "task"),
        (
            '{"logits": {"task": "regression", "values": [{"name": 1}]}}',
            r"name: expected .*, got 1",
        ),
        ('{"logits": {"task": "regression", "values": [{"name": "a", "colour": 1}]}}', "colour"),
        (
            '{"logits": {"task": "multi_label_classification", "labels": ["a"], '
            '"thresholds": [1.5]}}',
            r"thresholds.0: .* 1.5",
        ),
    ],
)
def test_bad_head_file_is_refused(content: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=named):
        read_heads(file)
    with pytest.raises(UsageError, match=r"absent\.json cannot be read"):
        read_heads(tmp_path / "absent.json")


def test_field_of_answer_needs_kind() -> None:
    with pytest.raises(TypeError, match=r"Ranks\.ranks: expected a type of aftexport\.heads"):
        type("Ranks", (Answer,), {"__annotations__": {"ranks": tuple[int, ...]}})


FITS: dict[Field, Callable[[Head, Any], bool]] = {
    "name": lambda head, value: value in head.names,
    "names": lambda head, value: set(value) <= set(head.names),
    "numbers": lambda head, value: tuple(value) == head.names,
    "token_names": lambda head, value: len(value) == 1 and value[0] in head.names,
    "token_numbers": lambda head, value: len(value) == 1 and 0 < value[0] <= 1,
    "spans": lambda head, value: len(value) == 1 and value[0]["end_token"] == 1,
    "vector": lambda head, value: len(value) == head.width,
    "vectors": lambda head, value: len(value) == 1 and len(value[0]) == head.width,
}
"""For each kind of field, whether a value is one for a document of one token."""


@pytest.mark.parametrize("task", HEADS)
def test_answer_has_fields_of_its_head(task: str) -> None:
    """Code that shows any head knows only the kinds of fields."""
    head = HEADS[task].of_width(1 if task == "binary_classification" else 3, None)
    logits = np.linspace(-1, 1, head.width)
    answer = head.answer(logits[None] if head.is_per_token else logits)
    dumped = answer.model_dump(exclude_unset=True)  # without the fields of a calibration
    assert dumped.keys() == head.fields.keys()
    for field, kind in head.fields.items():
        assert FITS[kind](head, dumped[field]), field
