"""The choice of the logits that a model explains, as an input of an ONNX Runtime session.

In a file, the choice is a constant. The runtime would warn of a file that declares an initializer
as an input too, and other runtimes would require the input.
"""

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.system.contract import EXPLAINED, largest


def take_choice(model: onnx.ModelProto) -> bool:
    """Turn the constant ``EXPLAINED`` of a model into an input; return whether it has one."""
    graph = model.graph
    place = next((i for i, t in enumerate(graph.initializer) if t.name == EXPLAINED), None)
    if place is None:
        return False
    del graph.initializer[place]
    # Without names of axes: the runtime may reuse the memory of values with equal names.
    axes = [None, None]
    graph.input.append(onnx.helper.make_tensor_value_info(EXPLAINED, onnx.TensorProto.INT64, axes))
    return True


def padded_choices(choices: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the input for the choices of several documents, or for one choice for all of them."""
    width = max(1, *map(len, choices))
    padded = np.full((len(choices), width), largest(0))
    for row, choice in zip(padded, choices, strict=True):
        row[: len(choice)] = choice
    return padded
