"""The task of a model is that which its configuration declares."""

import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import tiny_models
import torch
from torch import nn

from aftexport.checkpoint import load
from aftexport.errors import UsageError
from aftexport.heads.declared_task import Declaration, declared_beside

SPELLINGS = {
    "multi_label_classification": "multi_label_classification",
    "Multi-Label": "multi_label_classification",
    "regression": "regression",
    "multi_output_regression": None,
    "single_label_classification": "single_label_classification",
    "binary_classification": "binary_classification",
    "token_classification": "token_classification",
    "Token-Classification": "token_classification",
    "multi_label_token_classification": None,
    "feature-extraction": "feature_extraction",
    "span classification": None,
    "question_answering": None,
    "something else": "undeclared",
}
"""Each spelling with its task; None if it is refused."""


class Task(Enum):
    MULTI_LABEL = "multi_label_classification"


class Configured(nn.Module):
    """A model of another library, as a factory returns it."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.inner = tiny_models.Bag()
        self.inner.config = config  # type: ignore[assignment]


@pytest.mark.parametrize("form", [dict, SimpleNamespace])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_module_declares_its_task(spelling: str, form: type) -> None:
    module, task = Configured(form(problem_type=spelling)), SPELLINGS[spelling]
    if task is None:
        with pytest.raises(UsageError, match=rf"of Bag: expected a problem_type.*got {spelling}"):
            declared_beside(Path("model.pt"), module)
    else:
        declared = declared_beside(Path("model.pt"), module).task
        assert declared == (None if task == "undeclared" else task)


@pytest.mark.parametrize("declared", [None, 7, [], {}])
def test_other_values_declare_nothing(declared: object, tmp_path: Path) -> None:
    assert (
        declared_beside(Path("model.pt"), Configured({"problem_type": declared})) == Declaration()
    )
    (tmp_path / "config.json").write_text(json.dumps({"problem_type": declared}))
    assert declared_beside(tmp_path / "model.safetensors", tiny_models.Bag()) == Declaration()


def test_enum_declares_its_value() -> None:
    module = Configured(SimpleNamespace(problem_type=Task.MULTI_LABEL))
    assert declared_beside(Path("model.pt"), module).task == "multi_label_classification"


@pytest.mark.parametrize("place", ["beside", "in the file", "in its config"])
def test_file_declares_its_task(place: str, tmp_path: Path) -> None:
    config, file = {"problem_type": "regression"}, tmp_path / "model.pt"
    state = tiny_models.Bag().state_dict()
    if place == "beside":
        (tmp_path / "config.json").write_text(json.dumps(config))
        file = tmp_path / "model.safetensors"
        safetensors.torch.save_file(state, file)
    else:
        torch.save({"model": state} | (config if place == "in the file" else {"cfg": config}), file)
    assert load(file, factory="tiny_models:Bag").task == "regression"


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ({"0": "ham", "1": "spam", "2": "other"}, ("ham", "spam", "other")),
        ({2: "other", 0: "ham", 1: "spam"}, ("ham", "spam", "other")),
        ({"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, None),
        ({"0": "ham", "2": "spam"}, None),
        ({"0": "ham", "1": 7}, None),
        (["ham", "spam", "other"], None),
    ],
)
def test_names_of_transformers_are_read(names: object, labels: object, tmp_path: Path) -> None:
    config = SimpleNamespace(id2label=names, problem_type="multi_label_classification")
    declared = declared_beside(Path("model.pt"), Configured(config))
    assert declared == Declaration("multi_label_classification", labels)  # type: ignore[arg-type]
    if isinstance(names, list) or "0" in names:  # type: ignore[operator]
        (tmp_path / "config.json").write_text(json.dumps({"id2label": names}))
        safetensors.torch.save_file(tiny_models.Bag().state_dict(), tmp_path / "model.safetensors")
        assert load(tmp_path / "model.safetensors", factory="tiny_models:Bag").labels == labels


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForTokenClassification", "token_classification"),
        ("BertForSequenceClassification", None),
        ("BertModel", None),
        ("BertForQuestionAnswering", UsageError),
        (None, None),
    ],
)
def test_architecture_declares_its_task(architecture: object, task: Any, tmp_path: Path) -> None:
    """A class declares the task, in config.json or as that of a module."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    weights = tmp_path / "model.safetensors"
    module = type(str(architecture), (nn.Module,), {})()
    for path, part in ((weights, None), (Path("model.pt"), nn.Sequential(module))):
        if task is UsageError:
            with pytest.raises(UsageError, match=rf"expected a model of .*got {architecture}"):
                declared_beside(path, part)
        else:
            assert declared_beside(path, part).task == task


def test_problem_type_is_stronger_than_architecture(tmp_path: Path) -> None:
    config = {"architectures": ["BertForTokenClassification"], "problem_type": "regression"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert declared_beside(tmp_path / "model.safetensors", None).task == "regression"


def test_architecture_of_an_earlier_model_is_ignored() -> None:
    """A module with an own head keeps the configuration of its pretrained part."""
    module = Configured(SimpleNamespace(architectures=["BertForQuestionAnswering"]))
    assert declared_beside(Path("model.pt"), module) == Declaration()
