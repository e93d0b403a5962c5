"""The methods that the CPU kernels choose for their products, by measurement on this machine."""

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aftplugins import library

METHOD_VARIABLE = "AFTEXPORT_METHOD"
"""A variable that forces a method for each reduced precision whose error bound it keeps.

Of several methods, separated by commas, each precision takes the one with the largest error.
"""
_TEXT_BYTES = 4096
_UNKNOWN_VALUE = -1


class MethodVariableError(ValueError):
    """An environment variable names an unknown method or instruction set."""


@dataclass(frozen=True)
class MethodChoice:
    """The choice of a method for products of one precision.

    Attributes:
        precision: the requested precision, a bound on the error.
        products: ``encoder_256`` for the operators of an encoder about 256 wide, or ``aft_full``.
        methods: methods in order of preference. AFT-full takes the first that its position
            biases allow, other operators always take the first.
        chosen_by: ``measurement``; ``variable`` if ``AFTEXPORT_METHOD`` names the method;
            ``precision`` if this machine has only one method within the precision's bound.
        rates: measured billions of multiply-adds a second on one thread, by method.
        kept: whether the rates are in the cache, and so the same for every process.
        instruction_set: the instruction set of the kernels.
        processor: the processor model that the rates are kept for.
    """

    precision: str
    products: str
    methods: tuple[str, ...]
    chosen_by: Literal["measurement", "variable", "precision"]
    rates: dict[str, float]
    kept: bool
    instruction_set: str
    processor: str


def choose(precision: str, width: int | None) -> MethodChoice | None:
    """Return the choice for a precision, as every session makes it; measure it if needed.

    Args:
        precision: ``fp32``, ``fp16``, ``bf16`` or ``int8``.
        width: the width of an encoder's operator; None for AFT-full.

    Returns:
        The choice; None if the kernels are not built or switched off.

    Raises:
        MethodVariableError: if ``AFTEXPORT_METHOD`` or ``AFTEXPORT_ISA`` has an unknown value.
        RuntimeError: if the kernels fail, also for an unknown precision.
    """
    path = library("onnxruntime")
    if path is None:
        return None
    return MethodChoice(precision=precision, **_describe(path, precision, width))


def _describe(path: Path, precision: str, width: int | None) -> dict[str, Any]:
    describe = ctypes.CDLL(str(path)).aftexport_describe_choice
    describe.restype = ctypes.c_int64
    describe.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64]
    length = _TEXT_BYTES
    while True:
        text = ctypes.create_string_buffer(length + 1)
        code = describe(precision.encode(), width or 0, text, len(text))
        if code == _UNKNOWN_VALUE:
            raise MethodVariableError(text.value.decode())
        if code < 0:
            raise RuntimeError(text.value.decode())
        if code <= length:
            break
        length = code  # of the whole text, of which only a part fitted
    fields: dict[str, Any] = json.loads(text.value)
    rates = {method: rate / 1000 for method, rate in fields["rates"].items()}
    return {**fields, "methods": tuple(fields["methods"]), "rates": rates}
