"""A module in float64, the truth that other engines are compared with."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from aftexport.capture.complaints import cause
from aftexport.capture.forward_signature import with_plain_inputs


class ReferenceModule(nn.Module):
    """A module that runs in float64 where it can, and else in float32.

    The first run decides: as it is, with new tensors in float64; then with what its forward
    casts to float32 left in float64; then in float32.

    Args:
        module: changed in place.

    Attributes:
        precision: ``float64`` or ``float32``, once it has run.
        reason: why it is float32; empty where it is not.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = with_plain_inputs(module).double()
        self.precision = "float64"
        self.reason = ""
        self._modes: list[Callable[[], AbstractContextManager[Any]]] = []
        self._is_decided = False

    def forward(self, *inputs: Tensor) -> Any:
        """Runs the module once.

        Args:
            inputs: ``input_ids`` and, where it takes them, ``lengths``.
        """
        if self._is_decided:
            return self._run(*inputs)
        errors: list[Exception] = []
        for modes in ([float64_by_default], [float64_by_default, _WithoutFloat32]):
            self._modes = [*modes]
            try:
                outputs = self._run(*inputs)
            except Exception as error:  # a module of others raises anything
                errors.append(error)
            else:
                break
        else:
            self._modes = []
            self.module.float()  # they were float32 or narrower: nothing is lost
            outputs = self._run(*inputs)
            self.precision, self.reason = "float32", cause(errors[0])
        self._is_decided = True
        return outputs

    def _run(self, *inputs: Tensor) -> Any:
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode())
            return self.module(*inputs)


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Makes tensors that are given no type float64, in the whole process, as long as it runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _WithoutFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts float64 in the place of float32, among tensors and among types that are asked for.

    Narrower types stay: a forward that asks for one rounds on purpose.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.view.dtype:  # the bits of float32 are asked for
            return func(*args, **kwargs or {})
        written = {
            i
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        args = [a if i in written else tree_map(_widened, a) for i, a in enumerate(args)]
        return func(*args, **tree_map(_widened, kwargs or {}))


def _widened(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    is_narrow = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.double() if is_narrow else value
