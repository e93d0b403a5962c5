"""A model of the transformers library without memory, whose building ends for any configuration."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules import module as hooks

from aftexport.checkpoint.weight_files import WeightFiles
from aftexport.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SPARE_NUMBERS = 1 << 26
"""Numbers that modules may compute beside the weights in the files, such as masks."""
_PARTS_PER_WEIGHT = 16
"""Modules and parameters for each weight in the files; models of the library have up to 5."""
_SPARE_PARTS = 1 << 12
_COPIES = 4
"""Parameters that a constructor may replace by shared ones, for each number in the files."""


class _TooLargeError(Exception):
    """A constructor makes more parts than a model of these weights has, as the message."""


def check_size(
    folder: Path, found: "type[PreTrainedModel]", config: "PreTrainedConfig", files: WeightFiles
) -> None:
    """Refuse a configuration of a far larger model than the weights, before memory is taken.

    Args:
        folder: the folder, for messages.
        found: the class of the model.
        config: the configuration.
        files: the weights.

    Raises:
        CheckpointError: if the class refuses the configuration, or the model is too large.
    """
    path = folder / "config.json"
    remedy = "Give the configuration of the training."
    try:
        with torch.device("meta"), _bounded(files):
            empty = found(config)
    except _TooLargeError as error:
        raise CheckpointError(path, str(error), remedy) from error
    except Exception as error:  # a configuration can make a constructor raise any exception
        reason = f"{found.__name__} refuses the configuration: {type(error).__name__}: "
        reason += first_line(error)
        raise CheckpointError(path, reason, remedy) from error
    size = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
    if size > 2 * files.count + _SPARE_NUMBERS:
        raise CheckpointError(path, _numbers(files, f"{size:,}"), remedy)


@contextmanager
def _bounded(files: WeightFiles) -> Iterator[None]:
    """Count the modules and parameters that this thread makes, and end a constructor of too many.

    Raises:
        _TooLargeError: if there are too many of them, or too many numbers in the parameters.
    """
    thread, parts, size = threading.get_ident(), 0, 0
    max_parts = _PARTS_PER_WEIGHT * len(files.shapes) + _SPARE_PARTS
    max_size = _COPIES * files.count + _SPARE_NUMBERS

    def count(_owner: nn.Module, _name: str, part: nn.Module | nn.Parameter | None) -> None:
        nonlocal parts, size
        if threading.get_ident() != thread:  # the hooks are those of the whole process
            return
        parts += 1
        size += part.numel() if isinstance(part, torch.Tensor) else 0
        if parts > max_parts:
            raise _TooLargeError(
                f"expected a model of the {len(files.shapes):,} weights in the files, got more "
                f"than {max_parts:,} modules and parameters"
            )
        if size > max_size:
            raise _TooLargeError(_numbers(files, f"more than {max_size:,}"))

    handles = (
        hooks.register_module_module_registration_hook(count),
        hooks.register_module_parameter_registration_hook(count),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _numbers(files: WeightFiles, size: str) -> str:
    return f"expected a model of the {files.count:,} numbers in the weights, got {size}"
