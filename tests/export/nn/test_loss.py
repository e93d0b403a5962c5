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
TOKEN_LABELS = torch.arange(24).reshape(4, 6) % 3
PAIRS = torch.linspace(-2, 3, 32).reshape(4, 8).sin()
TARGETS = {
    "single_label_classification": LABELS,
    "multi_label_classification": HOLDS,
    "binary_classification": HOLDS[:, 0],
    "regression": VALUES,
    "token_classification": TOKEN_LABELS,
    "feature_extraction": PAIRS,
}


def outputs_of(task: str) -> Tensor:
    """Return the outputs ``[4, num_labels]`` of a classifier for the task, with gradients."""
    torch.manual_seed(3)
    settings: dict[str, Any] = {"mechanism": "aft_simple", "vocab_size": 24, "dim": 8, "depth": 1}
    width = 1 if task == "binary_classification" else 3
    num_labels = None if task == "feature_extraction" else width
    config = ClassifierConfig(**settings, num_labels=num_labels, problem_type=task)
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
    if task == "token_classification":
        return nn.CrossEntropyLoss()(outputs.transpose(1, 2), TOKEN_LABELS)
    if task == "feature_extraction":
        cosines = nn.CosineSimilarity(-1)(outputs[:, None], PAIRS[None])
        return nn.CrossEntropyLoss()(20 * cosines, torch.arange(4))
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


def test_tokens_of_padding_do_not_count() -> None:
    outputs, lengths = outputs_of("token_classification"), torch.tensor([6, 1, 4, 2])
    own = torch.arange(6) < lengths[:, None]
    expected = nn.CrossEntropyLoss()(outputs[own], TOKEN_LABELS[own])
    padded = TOKEN_LABELS.masked_fill(~own, -100)
    torch.testing.assert_close(task_loss("token_classification", outputs, padded), expected)
    by_lengths = task_loss("token_classification", outputs, TOKEN_LABELS, lengths)
    torch.testing.assert_close(by_lengths, expected)
    with pytest.raises(UsageError, match=r"\[4, 6\] for token_classification, got \[6, 4\]"):
        task_loss("token_classification", outputs, TOKEN_LABELS.T)


def test_vectors_of_tokens_have_cosine_loss() -> None:
    outputs, targets = outputs_of("token_classification"), VALUES[:, None].expand(4, 6, 3)
    lengths = torch.tensor([6, 1, 4, 2])
    cosines = [nn.CosineSimilarity(-1)(o[:n], t[:n]) for o, t, n in
               zip(outputs, targets, lengths, strict=True)]  # fmt: skip
    loss = task_loss("feature_extraction", outputs, targets, lengths)
    torch.testing.assert_close(loss, 1 - torch.cat(cosines).mean())
    with pytest.raises(UsageError, match="a vector for each output"):
        task_loss("feature_extraction", outputs, targets[:, :1])
