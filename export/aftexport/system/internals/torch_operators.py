"""Parts of torch for operators, trees of tensors and files, all loaded by ``import torch``."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from aftexport.system.internals.versions import Versions

VERSIONS = Versions("torch", "2.9", "2.15")

with VERSIONS.named():
    from torch._C import PyTorchFileReader
    from torch._ops import HigherOrderOperator, OpOverload
    from torch.fx import _symbolic_trace
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    sym_sqrt: Callable[..., Any] = torch._sym_sqrt  # type: ignore[attr-defined]

ATTRIBUTES = (
    "OpOverload()._schema",
    "PyTorchFileReader.get_all_records",
    "PyTorchFileReader.get_record",
    "pytree.tree_leaves",
    "pytree.tree_map",
)
"""Attributes of these parts that this module and others use."""

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "PyTorchFileReader",
    "TorchDispatchMode",
    "pytree",
    "record_sizes",
    "sym_sqrt",
    "tracing_questions",
]


def tracing_questions() -> tuple[FunctionType, ...]:
    """Return the functions whose answer is another one while torch.export runs a forward."""
    own = (torch.compiler.is_compiling, torch.compiler.is_exporting)
    names = ("is_fx_tracing", "is_fx_symbolic_tracing")
    known = (getattr(_symbolic_trace, name, None) for name in names)
    return tuple(f for f in (*own, *known) if isinstance(f, FunctionType))


def record_sizes(reader: PyTorchFileReader) -> dict[str, int]:
    """Return the size in bytes of each record of a file of torch."""
    names = reader.get_all_records()
    if hasattr(reader, "get_record_size"):
        return {name: reader.get_record_size(name) for name in names}
    return {name: len(reader.get_record(name)) for name in names}  # torch 2.9
