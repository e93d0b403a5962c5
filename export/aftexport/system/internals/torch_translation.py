"""Parts of torch for the translation of a program to ONNX."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aftexport.system.internals.versions import Versions

VERSIONS = Versions("torch", "2.9", "2.15")

with VERSIONS.named():
    from torch._C import _dispatch_get_registrations_for_dispatch_key
    from torch._export import utils
    from torch.onnx._internal.exporter._errors import DispatchError
    from torch.onnx._internal.exporter._registration import ONNXRegistry
    from torch.onnx._internal.exporter._torchlib.ops.hop import call_op

ATTRIBUTES = (
    "ONNXRegistry.from_torchlib",
    "ONNXRegistry().functions",
    "utils._materialize_cpp_cia_ops",
)
"""Attributes of these parts that this module and others use."""

__all__ = ["DispatchError", "ONNXRegistry", "call_op", "list_composites_once"]

_KIND = "CompositeImplicitAutograd"
_LOCK = threading.RLock()


@contextmanager
def list_composites_once() -> Iterator[None]:
    """Let torch look up its composite operators once during the block, in all threads.

    torch looks up all of them for each of its 50 namespaces, which takes a tenth of the translation
    of a small model. During the block it does so again only if operators have been registered.
    """
    with _LOCK:  # the function is shared by the whole process
        with VERSIONS.named():
            look_up = utils._materialize_cpp_cia_ops
        utils._materialize_cpp_cia_ops = _look_up_new(look_up)
        try:
            yield
        finally:
            utils._materialize_cpp_cia_ops = look_up


def _look_up_new(look_up: Callable[[], None]) -> Callable[[], None]:
    """Return a function that looks up operators only if some have been registered since."""
    known: list[str] = []

    def look_up_new() -> None:
        registered = _dispatch_get_registrations_for_dispatch_key(_KIND)
        if registered != known:
            look_up()
            known[:] = registered

    return look_up_new
