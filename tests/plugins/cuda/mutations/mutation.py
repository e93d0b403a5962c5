"""A fault, and short forms for lists of them."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """In ``file``, ``old`` becomes ``new``; the test of ``kernel`` must fail.

    ``file`` is one of plugins/cuda or, for a fault of the caller, of tests/plugins/cuda.
    """

    kernel: str
    file: str
    old: str
    new: str


def faults(kernel: str, file: str, *substitutions: tuple[str, str]) -> list[Mutation]:
    return [Mutation(kernel, file, old, new) for old, new in substitutions]


def without(text: str, removed: str = "__syncthreads();\n") -> tuple[str, str]:
    return text, text.replace(removed, "")
