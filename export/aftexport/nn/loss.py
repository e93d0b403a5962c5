"""The loss for each task of a head."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from aftexport.errors import UsageError

Loss = Callable[[Tensor, Tensor], Tensor]


def _binary(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.squeeze(-1), targets.to(logits.dtype))


def _multi_label(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.shape != outputs.shape:  # PyTorch would broadcast [B] against [B, 1] to [B, B]
        raise UsageError(
            f"Expected targets of shape {list(outputs.shape)} for regression, got "
            f"{list(targets.shape)}.",
            "Give a row of values for each document.",
        )
    return F.mse_loss(outputs, targets.to(outputs.dtype))


_LOSSES: Mapping[str, Loss] = {
    "single_label_classification": F.cross_entropy,
    "multi_label_classification": _multi_label,
    "binary_classification": _binary,
    "regression": _squares,
}


def task_loss(problem_type: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of documents.

    Args:
        problem_type: the task, ``ClassifierConfig.problem_type``.
        logits: ``[B, num_labels]``, the output of the model.
        targets: int64 ``[B]``, the index of the label, for single_label_classification; ``[B]`` of
            0 and 1 for binary_classification; ``[B, num_labels]`` of 0 and 1 for
            multi_label_classification; ``[B, num_labels]``, the values in the scale of the output,
            for regression.

    Raises:
        UsageError: if the task is unknown, or the targets of a regression have another shape.
    """
    if problem_type not in _LOSSES:
        known = ", ".join(_LOSSES)
        raise UsageError(
            f"Expected a problem_type of {known}, got {problem_type!r}.", "Choose one of them."
        )
    return _LOSSES[problem_type](logits, targets)
