import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import tiny_models
import torch
from bundles import changed_manifest
from commands import assert_refused, run_here
from torch import Tensor, nn

from aftexport.bundle.bundle import PARITY_PAGE, Bundle
from aftexport.capture.capture import capture
from aftexport.checkpoint import Checkpoint, load
from aftexport.errors import BundleError, UsageError
from aftexport.heads.exclusive_labels import check_count, check_output, check_task
from aftexport.lowering.to_onnx import lower

SOFTMAX = "softmax over exclusive labels"
OTHER_TASKS = ["multi_label_classification", "regression", "Multi-Label"]


class Task(Enum):
    MULTI_LABEL = "multi_label_classification"


class Configured(nn.Module):
    """A model of another library, as a factory returns it."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.inner = tiny_models.Bag()
        self.inner.config = config  # type: ignore[assignment]


class OneLogit(tiny_models.Bag):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 1)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_labels_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match=rf"got {count}: scores are a {SOFTMAX}.*torch\.cat"):
        check_count(count)


def test_bundle_of_one_label_is_refused(bundle_copy: Path) -> None:
    changed_manifest(bundle_copy, {"labels": ["a"], "evidence": [0.0]})
    with pytest.raises(BundleError, match="at least 2 labels, got 1: scores are a softmax"):
        Bundle.open(bundle_copy)


@pytest.mark.parametrize("declared", [*OTHER_TASKS, Task.MULTI_LABEL])
@pytest.mark.parametrize("form", [dict, SimpleNamespace])
def test_other_task_of_module_is_refused(form: type, declared: object) -> None:
    module = Configured(form(problem_type=declared))
    with pytest.raises(UsageError, match=r"Bag.*expected .*single_label_classification, got"):
        check_task(Path("model.pt"), module)


@pytest.mark.parametrize("declared", [None, "single_label_classification", 7])
def test_same_task_is_taken(declared: object, tmp_path: Path) -> None:
    check_task(Path("model.pt"), Configured(SimpleNamespace(problem_type=declared)))
    (tmp_path / "config.json").write_text(json.dumps({"problem_type": declared}))
    check_task(tmp_path / "model.safetensors", tiny_models.Bag())


@pytest.mark.parametrize("declared", OTHER_TASKS)
@pytest.mark.parametrize("place", ["folder", "beside", "in the file", "in its config"])
def test_other_task_of_file_is_refused(place: str, declared: str, tmp_path: Path) -> None:
    config, file = {"problem_type": declared}, tmp_path / "model.pt"
    state = tiny_models.Bag().state_dict()
    if place in ("folder", "beside"):
        (tmp_path / "config.json").write_text(json.dumps(config))
        file = tmp_path / "model.safetensors"
        safetensors.torch.save_file(state, file)
    else:
        beside = config if place == "in the file" else {"config": config}
        torch.save({"model": state} | beside, file)
    with pytest.raises(UsageError, match=rf"got {declared}; every score") as refused:
        check_task(file, _load(place, file).module)
    assert refused.value.exit_code == 2


def _load(place: str, file: Path) -> Checkpoint:
    return load(file.parent) if place == "folder" else load(file, factory="tiny_models:Bag")


def test_export_describes_scores(
    bundle_folder: Path, exporting: tuple[object, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert SOFTMAX in exporting[0].out  # type: ignore[attr-defined]
    assert SOFTMAX in (bundle_folder / PARITY_PAGE).read_text("utf-8")
    assert SOFTMAX in run_here(["inspect", bundle_folder], capsys).out


def test_command_refuses_one_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(OneLogit().state_dict(), tmp_path / "model.pt")
    words = ["--factory", f"{__name__}:OneLogit", "--to", "onnx", "--no-verify"]
    assert_refused(run_here([tmp_path / "model.pt", *words], capsys), "got 1", "torch.cat")
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


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
    with pytest.raises(UsageError, match=f"Expected logits, got the result of {operator}"):
        check_output(lower(capture(Probabilities(end))))


def test_logarithms_of_a_softmax_are_logits() -> None:
    check_output(lower(capture(Probabilities(lambda logits: logits.log_softmax(-1)))))
