"""The head of a model is declared, never guessed."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from commands import assert_refused, run_here
from sampling import any_case
from torch import Tensor, nn

import aftexport
from aftexport.bundle.bundle import PARITY, PARITY_PAGE, Bundle
from aftexport.capture.capture import capture
from aftexport.errors import TraceError, UsageError
from aftexport.heads import HEADS, Regression, SingleLabelClassification
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.pipeline.export import export
from aftexport.pipeline.head_choice import HeadOptions, check_outputs, choose_heads

EXCLUSIVE = SingleLabelClassification(labels=("a", "b", "c"))


class OneLogit(tiny_models.Bag):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 1)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_logits_of_several_labels_exclude_each_other(width: int) -> None:
    logits = np.zeros((3, width))

    def choose(task: str | None) -> str:
        return choose_heads({"logits": logits}, HeadOptions(task=task))["logits"].task

    if width > 1:
        assert choose(None) == "single_label_classification"
    else:
        with pytest.raises(UsageError, match=r"a declared task[^$]*--task regression"):
            choose(None)
        assert choose("binary_classification") == "binary_classification"
    assert choose("multi_label_classification") == "multi_label_classification"
    assert choose("regression") == "regression"


@pytest.mark.parametrize("shape", [(3,), (3, 4, 2, 1)])
def test_other_ranks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TraceError, match=r"\[batch, width\]"):
        choose_heads({"logits": np.zeros(shape)}, HeadOptions())


@pytest.mark.parametrize(
    ("output", "width", "named"),
    [
        ("logits", 2, "2 logits of 'logits', got one for 3"),
        ("scores", 3, "output 'scores', got 'logits'"),
    ],
)
def test_head_file_must_fit(output: str, width: int, named: str, tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text(json.dumps({"logits": json.loads(EXCLUSIVE.model_dump_json())}))
    options = HeadOptions(head_file=file)
    assert choose_heads({"logits": np.zeros((1, 3))}, options) == {"logits": EXCLUSIVE}
    with pytest.raises(UsageError, match=named):
        choose_heads({output: np.zeros((1, width))}, options)


def test_command_refuses_undeclared_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(OneLogit().state_dict(), tmp_path / "model.pt")
    words = [tmp_path / "model.pt", "--factory", f"{__name__}:OneLogit", "--to", "onnx"]
    refused = run_here([*words, "--no-verify"], capsys)
    assert_refused(refused, "1 logit", "--task binary_classification", "--task regression")
    unknown = run_here([*words, "--task", "ordinal"], capsys)
    assert_refused(unknown, "--task must be one of", "ordinal")
    both = run_here([*words, "--task", "regression", "--heads", tmp_path / "h.json"], capsys)
    assert_refused(both, "--heads describes task and labels")
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("task", HEADS)
def test_checkpoint_keeps_its_task(task: str, tmp_path: Path) -> None:
    """The bundle, its report and its parity check have the task of the training."""
    width = 1 if task == "binary_classification" else 3
    torch.manual_seed(3)
    settings = tiny_models.CONFIG | {"problem_type": task, "depth": 1}
    is_vector = task == "feature_extraction"
    config = ClassifierConfig(**settings | {"num_labels": None if is_vector else width})
    names: list[str] | None = ["no", "yes"] if width == 1 else ["x", "y", "z"]
    if is_vector:
        names, width = None, config.dim
    aftexport.save(tmp_path / "model.pt", model=DocumentClassifier(config).eval(), labels=names)
    bundle = export(tmp_path / "model.pt")
    assert bundle.manifest.heads["logits"] == HEADS[task].of_width(width, names)
    assert Bundle.open(bundle.path).manifest == bundle.manifest
    assert bundle.manifest.heads["logits"].meaning in (bundle.path / PARITY_PAGE).read_text("utf-8")
    cases = json.loads((bundle.path / PARITY).read_text("utf-8"))["cases"]
    errors = [case["score_error"] for case in cases if case["subject"] == "model"]
    assert errors
    assert all(0 <= error < 1e-4 for error in errors)


def test_save_refuses_names_that_do_not_fit(tmp_path: Path) -> None:
    settings = tiny_models.CONFIG | {"num_labels": 1, "problem_type": "binary_classification"}
    model = DocumentClassifier(ClassifierConfig(**settings))
    with pytest.raises(UsageError, match="2 different labels, got 1"):
        aftexport.save(tmp_path / "model.pt", model=model, labels=["yes"])
    assert not list(tmp_path.iterdir())


class Probabilities(tiny_models.Bag):
    """Ends in what turns logits into probabilities.

    Args:
        end: takes logits ``[batch, labels]``.
    """

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.end = end

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.end(super().forward(input_ids))


@pytest.mark.parametrize(
    ("end", "operator"),
    [
        (torch.sigmoid, "Sigmoid"),
        (lambda logits: logits.softmax(-1), "Softmax"),
        (lambda logits: logits.softmax(1).reshape(-1, 3), "Softmax"),
    ],
)
def test_probabilities_are_refused(end: Callable[[Tensor], Tensor], operator: str) -> None:
    model = lower(capture(Probabilities(end)))
    with pytest.raises(
        UsageError, match=f"Expected logits for 'logits', got the result of {operator}"
    ):
        check_outputs(model, {"logits": EXCLUSIVE})
    # A regression may have values between 0 and 1.
    check_outputs(model, {"logits": Regression.of_width(3, None)})


def test_logarithms_of_a_softmax_are_logits() -> None:
    model = lower(capture(Probabilities(lambda logits: logits.log_softmax(-1))))
    check_outputs(model, {"logits": EXCLUSIVE})


def test_vectors_do_not_take_labels_of_file() -> None:
    """The labels of an earlier model stay in the configuration of its encoder."""
    options = HeadOptions(task="feature_extraction", own_labels=("a", "b", "c"))
    assert choose_heads({"logits": np.zeros((1, 3))}, options)["logits"].width == 3
    options = HeadOptions(task="feature_extraction", labels=("a", "b", "c"))
    with pytest.raises(UsageError, match="no labels for feature_extraction"):
        choose_heads({"logits": np.zeros((1, 3))}, options)
