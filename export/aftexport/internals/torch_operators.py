"""Parts of torch for operators, trees of tensors and files, all loaded by ``import torch``."""

from collections.abc import Callable
from typing import Any

import torch

from aftexport.internals.versions import Versions

VERSIONS = Versions("torch", "2.9", "2.15")

with VERSIONS.named():
    from torch._C import PyTorchFileReader
    from torch._ops import HigherOrderOperator, OpOverload
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    sym_sqrt: Callable[..., Any] = torch._sym_sqrt  # type: ignore[attr-defined]

ATTRIBUTES = ("OpOverload()._schema", "pytree.tree_leaves", "pytree.tree_map")
"""Attributes of these parts that other modules use."""

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "PyTorchFileReader",
    "TorchDispatchMode",
    "pytree",
    "sym_sqrt",
]
