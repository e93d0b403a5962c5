"""The loss of each task is torch's loss for it, on targets of the documented shapes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aftexport.errors import UsageError
from aftexport.heads import HEADS
from aftexport.nn import ClassifierConfig, DocumentClassifier, task_loss

IDS = torch.arange(24).reshape(4, 6)
LABELS = torch.tensor([2, 0, 1, 2])
HOLDS = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
VALUES = torch.tensor([[40.0, -1.5, 0.25], [3.0, 2.0, 1.0], [0.0, 9.0, -7.0], [5.0, 5.0, 5.0]])
TARGETS = {
    "single_label_classification": LABELS,
    "multi_label_classification": HOLDS,
    "binary_classification": HOLDS[:, 0],
    "regression": VALUES,
}


def outputs_of(task: str) -> Tensor:
    """Return the outputs ``[4, num_labels]`` of a classifier for the task, with gradients."""
    torch.manual_seed(3)
    settings: dict[str, Any] = {"mechanism": "aft_simple", "vocab_size": 24, "dim": 8, "depth": 1}
    width = 1 if task == "binary_classification" else 3
    config = ClassifierConfig(**settings, num_labels=width, problem_type=task)
    outputs: Tensor = DocumentClassifier(config)(IDS, torch.full((4,), 6))
    return outputs


def torch_loss(task: str, outputs: Tensor) -> Tensor:
    """Compute the loss by torch's own criterion for the task."""
    if task == "single_label_classification":
        return nn.CrossEntropyLoss()(outputs, LABELS)
    if task == "multi_label_classification":
        return nn.BCEWithLogitsLoss()(outputs, HOLDS.float())
    if task == "binary_classification":
        return nn.BCEWithLogitsLoss()(outputs, HOLDS[:, :1].float())
    return nn.MSELoss()(outputs, VALUES)


def test_every_task_has_loss() -> None:
    assert TARGETS.keys() == HEADS.keys()


@pytest.mark.parametrize("task", TARGETS)
def test_loss_is_that_of_torch(task: str) -> None:
    outputs = outputs_of(task)
    loss = task_loss(task, outputs, TARGETS[task])
    expected = torch_loss(task, outputs)
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(x, outputs, retain_graph=True) for x in (loss, expected))
    assert theirs[0].abs().max() > 0
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("task", TARGETS)
def test_targets_take_type_of_outputs(task: str) -> None:
    outputs = outputs_of(task).double()
    loss = task_loss(task, outputs, TARGETS[task])
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, torch_loss(task, outputs.float()).double())


def test_flat_regression_targets_are_refused() -> None:
    outputs = outputs_of("regression")[:, :1]
    with pytest.raises(UsageError, match=r"shape \[4, 1\] for regression, got \[4\]\. .*row"):
        task_loss("regression", outputs, VALUES[:, 0])


def test_unknown_task_error_lists_tasks() -> None:
    with pytest.raises(UsageError, match=r"single_label_classification, .*got 'ranking'"):
        task_loss("ranking", outputs_of("regression"), VALUES)
