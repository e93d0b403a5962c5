"""Constants that a forward takes from the type of its tensors, as in ``torch.finfo(x.dtype).eps``.

A capture or a reference computes in another type than the training. The constants belong to the
trained model, so they stay those of the type of its weights.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from aftexport.system.internals.torch_operators import TorchDispatchMode

_aten = torch.ops.aten
_OWN = ("aftexport", "torch")
"""Packages whose own computations need the limits of the type at hand."""
_EPS = 3
"""The position of the argument eps of these operators."""
_NORMS = (_aten.rms_norm.default, _aten._fused_rms_norm.default)
_LOCK = threading.RLock()


def trained_type(module: nn.Module) -> torch.dtype:
    """Return the floating-point type of a module's weights; float32 without any."""
    types = (tensor.dtype for tensor in module.parameters() if tensor.is_floating_point())
    return next(types, torch.float32)


@contextmanager
def trained_limits(module: nn.Module, trained: torch.dtype, current: torch.dtype) -> Iterator[None]:
    """Let the code of a model find the limits of its trained type, in this thread.

    Limits that the current type cannot hold stay those of the current type.

    The forward runs in ``current`` during the block.
    """
    own, thread = torch.finfo, threading.get_ident()
    limits = _limits(trained, current)

    def finfo(dtype: torch.dtype | None = None) -> Any:
        wanted = torch.get_default_dtype() if dtype is None else dtype
        caller = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        is_of_model = threading.get_ident() == thread and caller not in _OWN
        return limits if wanted == current and is_of_model else own(wanted)

    files = {type(part).__module__ for part in module.modules()}
    spaces = [vars(torch), *(vars(sys.modules[name]) for name in files if name in sys.modules)]
    with _LOCK:  # torch is shared by the whole process
        places = [(s, name) for s in spaces for name, value in s.items() if value is own]
        for space, name in places if trained != current else ():
            space[name] = finfo
        try:
            yield
        finally:
            for space, name in places:
                space[name] = own


def _limits(trained: torch.dtype, current: torch.dtype) -> Any:
    a, b = torch.finfo(trained), torch.finfo(current)
    tiny = max(a.tiny, b.tiny)
    return SimpleNamespace(
        bits=b.bits,
        dtype=b.dtype,
        eps=a.eps,
        resolution=a.resolution,
        max=min(a.max, b.max),
        min=max(a.min, b.min),
        tiny=tiny,
        smallest_normal=tiny,
    )


class TrainedConstants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which operators on float64 take the constants of the trained type."""

    def __init__(self, trained: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Norms of narrower types compute in float32.
        self._eps = torch.finfo(torch.promote_types(trained, torch.float32)).eps
        self._limits = torch.finfo(trained)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _NORMS and (args[_EPS] if len(args) > _EPS else named.pop("eps", None)) is None:
            args = (*args, *(named.pop("weight", None),) * (_EPS - len(args)))[:_EPS]
            return func(*args, self._eps, **named)
        if func is _aten.nan_to_num.default and args[0].dtype == torch.float64:
            given = dict(zip(("nan", "posinf", "neginf"), args[1:], strict=False)) | named
            largest, lowest = given.get("posinf"), given.get("neginf")
            given["posinf"] = self._limits.max if largest is None else largest
            given["neginf"] = self._limits.min if lowest is None else lowest
            return func(args[0], **given)
        return func(*args, **named)
