"""A module in float64, the reference for the comparison of other engines."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from aftexport.capture.model_inputs import float_type, with_plain_inputs
from aftexport.capture.module_translations import choose_experts
from aftexport.capture.torch_messages import cause
from aftexport.system.internals.torch_operators import TorchDispatchMode, pytree

_aten = torch.ops.aten
_OWN = ("aftexport", "torch")
"""Packages whose own computations need the limits of the type at hand."""
_EPS = 3
"""The position of the argument eps of these operators."""
_NORMS = (_aten.rms_norm.default, _aten._fused_rms_norm.default)
_LOCK = threading.RLock()


# A capture or a reference computes in another type than the training. Constants that a forward
# takes from the type of its tensors, as torch.finfo(x.dtype).eps, stay those of the training.
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


class ReferenceModule(nn.Module):
    """A module that runs in float64 if possible, and else in float32.

    The first run chooses the first of these ways that succeeds: unchanged, with new tensors in
    float64; with the forward's casts to float32 replaced by float64; in float32.

    The first run sets ``precision``, ``float64`` or ``float32``, and ``reason``, the error that led
    to float32. If ``casts_to_float32``, the forward casts values of float64 to float32: such casts
    are part of the model, and its result then has errors of float32.
    """

    def __init__(self, module: nn.Module, inputs: Collection[str]) -> None:
        super().__init__()
        self._trained = float_type(module)
        self.module = with_plain_inputs(module, inputs).double()
        choose_experts(self.module, "eager")  # faster ones of transformers need narrower types
        self.precision = "float64"
        self.reason = ""
        self.casts_to_float32 = False
        self._modes: list[Callable[[], AbstractContextManager[Any]]] = []
        self._is_decided = False

    def forward(self, *inputs: Tensor) -> Any:
        """Run the module once."""
        if self._is_decided:
            return self._run(*inputs)
        errors: list[Exception] = []
        trained = (
            float64_by_default,
            partial(trained_limits, self.module, self._trained, torch.float64),
            partial(TrainedConstants, self._trained),
        )
        for modes in (trained, (*trained, _WithoutFloat32)):
            self._modes = [*modes]
            try:
                with _CastsToFloat32() as casts:
                    outputs = self._run(*inputs)
            except Exception as error:  # a module of a user can raise any exception
                errors.append(error)
            else:
                self.casts_to_float32 = casts.is_found
                break
        else:
            self._modes = []
            self.module.float()  # the weights were float32 or narrower: nothing is lost
            outputs = self._run(*inputs)
            self.precision, self.reason = "float32", cause(errors[0])
        self._is_decided = True
        return outputs

    @contextmanager
    def without_casts(self) -> Iterator[None]:
        """Replace the forward's casts to float32 by float64 during the block."""
        before = self._modes
        self._modes = [*before, _WithoutFloat32]
        try:
            yield
        finally:
            self._modes = before

    def _run(self, *inputs: Tensor) -> Any:
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode())
            return self.module(*inputs)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Make float64 the default type of new tensors, in the whole process, during the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _CastsToFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that notes whether a value of float64 becomes one of float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if not self.is_found:
            self.is_found = _has(result, torch.float32) and _has(args, torch.float64)
        return result


def _has(values: Any, dtype: torch.dtype) -> bool:
    leaves = pytree.tree_leaves(values)
    return any(isinstance(leaf, Tensor) and leaf.dtype == dtype for leaf in leaves)


class _WithoutFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that replaces float32 by float64, in tensors and in requested types.

    Narrower types stay: a forward that requests one rounds on purpose.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.view.dtype:  # the forward reads the bits of float32
            return func(*args, **kwargs or {})
        written = {
            i
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        args = [a if i in written else pytree.tree_map(_widened, a) for i, a in enumerate(args)]
        return func(*args, **pytree.tree_map(_widened, kwargs or {}))


def _widened(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    is_narrow = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.double() if is_narrow else value
