"""Trained weights into a module: all of them, and nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aftexport.errors import CheckpointError


def load_weights(path: Path, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state dict that was read from ``path``.

    Raises:
        CheckpointError: where weights are missing, unexpected, of another shape,
            no dense real tensors, or not finite; each is named.
    """
    expected = module.state_dict()
    given = {str(name): value for name, value in state.items()}
    problems = []
    if missing := sorted(set(expected) - set(given)):
        problems.append(f"missing weights: {_names(missing)}")
    if unexpected := sorted(set(given) - set(expected)):
        problems.append(f"unexpected weights: {_names(unexpected)}")
    shared = sorted(set(given) & set(expected))
    if strange := [name for name in shared if not _is_plain(given[name])]:
        problems.append(f"no dense real tensors: {_names(strange)}")
    wrong = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in shared
        if name not in strange and given[name].shape != expected[name].shape
    ]
    if wrong:
        problems.append(f"wrong shapes: {_names(wrong)}")
    if problems:
        raise CheckpointError(
            path,
            f"the weights do not fit the module; {'; '.join(problems)}",
            "Give the configuration or the factory that the weights were trained with.",
        )
    weights = {name: given[name].to(tensor.dtype) for name, tensor in expected.items()}
    if bad := [n for n, t in weights.items() if not bool(t.isfinite().all())]:
        raise CheckpointError(
            path,
            f"NaN, infinity, or a number beyond float32 in {_names(bad)}",
            "Give a checkpoint from before the training diverged.",
        )
    module.load_state_dict(weights, assign=True)


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_complex()
        and not value.is_quantized
        and value.device.type == "cpu"
    )


def _names(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
