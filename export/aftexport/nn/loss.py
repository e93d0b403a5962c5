"""The loss for each task of a head."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aftexport.errors import UsageError
from aftexport.operators.numerics import valid_keys

Loss = Callable[[Tensor, Tensor], Tensor]
_CONTRAST = 20.0
"""The factor of cosines before their softmax, the inverse temperature."""


def _binary(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.squeeze(-1), targets.to(logits.dtype))


def _multi_label(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    # PyTorch would broadcast [B] against [B, 1] to [B, B].
    _check_shape("regression", targets, outputs.shape, "Give a row of values for each document.")
    return F.mse_loss(outputs, targets.to(outputs.dtype))


def _tokens(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _pairs(vectors: Tensor, targets: Tensor) -> Tensor:
    """Return the contrastive loss of documents; of tokens, their mean cosine distance."""
    if vectors.ndim > 2:
        return (1 - F.cosine_similarity(vectors, targets.to(vectors.dtype), -1)).mean()
    cosines = F.normalize(vectors, dim=-1) @ F.normalize(targets.to(vectors.dtype), dim=-1).T
    return F.cross_entropy(_CONTRAST * cosines, torch.arange(len(vectors), device=vectors.device))


_LOSSES: Mapping[str, Loss] = {
    "single_label_classification": F.cross_entropy,
    "multi_label_classification": _multi_label,
    "binary_classification": _binary,
    "regression": _squares,
    "token_classification": _tokens,
    "feature_extraction": _pairs,
}


def task_loss(
    problem_type: str, outputs: Tensor, targets: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """Return the mean loss of documents, or of their tokens.

    The loss of vectors of documents is the contrastive loss of pairs: the softmax of the cosines of
    a document's vector with the targets of all documents of the batch, times 20, must choose its
    own target (Henderson et al., "Efficient Natural Language Response Suggestion for Smart Reply",
    2017). A batch needs two or more pairs. The loss of vectors of tokens is one minus their cosine.

    Args:
        problem_type: the task, ``ClassifierConfig.problem_type``.
        outputs: ``[B, num_labels]``, or ``[B, T, num_labels]``, the output of the model.
        targets: the targets of the task:

            - single_label_classification: int64 ``[B]``, the index of the label.
            - multi_label_classification: ``[B, num_labels]`` of 0 and 1.
            - binary_classification: ``[B]`` of 0 and 1.
            - regression: ``[B, num_labels]``, the values in the scale of the output.
            - token_classification: int64 ``[B, T]``, the index of each token's label, or -100 for a
              token that does not count.
            - feature_extraction: vectors of the shape of the outputs, such as the model's outputs
              for documents of the same meaning.

        lengths: int64 ``[B]``, the number of tokens of each document: rows of padding do not count.
            None if every row counts. Outputs of documents need none.

    Raises:
        UsageError: if the task is unknown, or the targets have another shape.
    """
    if problem_type not in _LOSSES:
        known = ", ".join(_LOSSES)
        raise UsageError(
            f"Expected a problem_type of {known}, got {problem_type!r}.", "Choose one of them."
        )
    if problem_type == "token_classification":
        _check_shape(problem_type, targets, outputs.shape[:-1], "Give a label for each token.")
    elif problem_type == "feature_extraction":
        _check_shape(problem_type, targets, outputs.shape, "Give a vector for each output.")
    if lengths is not None and outputs.ndim > 2:
        own = valid_keys(lengths, outputs.shape[1])
        outputs, targets = outputs[own][None], targets[own][None]
    return _LOSSES[problem_type](outputs, targets)


def _check_shape(task: str, targets: Tensor, shape: torch.Size, remedy: str) -> None:
    if targets.shape != shape:
        raise UsageError(
            f"Expected targets of shape {list(shape)} for {task}, got {list(targets.shape)}.",
            remedy,
        )
