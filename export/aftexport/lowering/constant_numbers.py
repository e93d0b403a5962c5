"""Constants of integers in the translations for torch.onnx."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op


def constant(numbers: int | Sequence[int]) -> Any:
    """Return a number, or a tensor of one axis."""
    return op.Constant(value=ir.tensor(np.array(numbers, np.int64)))


def ints(*values: int) -> Any:
    """Return a tensor of one axis."""
    return constant(values)
