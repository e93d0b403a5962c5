"""The normalization of features as nodes of a model, for servers that do not normalize."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from aftexport.bundle.features import Features
from aftexport.system.contract import FEATURES

_NORMALIZED = f"{FEATURES}_normalized"


def add_normalization(model: onnx.ModelProto, features: Features) -> None:
    """Let a model normalize its input: ``(x - mean) / scale`` in float32, as the server does."""
    steps = [("Sub", "mean", features.mean), ("Div", "scale", features.scale)]
    given = [(kind, name, numbers) for kind, name, numbers in steps if numbers is not None]
    if not given:
        return
    _rename_uses(model.graph, FEATURES, _NORMALIZED)
    value = FEATURES
    for place, (kind, name, numbers) in enumerate(given):
        constant = numpy_helper.from_array(np.array(numbers, np.float32), f"{FEATURES}_{name}")
        result = _NORMALIZED if place == len(given) - 1 else f"{FEATURES}_{kind}"
        model.graph.initializer.append(constant)
        model.graph.node.insert(place, helper.make_node(kind, [value, constant.name], [result]))
        value = result


def _rename_uses(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a value where nodes read it, also in the graphs of their attributes."""
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        inner: Sequence[onnx.GraphProto] = [
            graph for one in node.attribute for graph in (one.g, *one.graphs)
        ]
        for one in inner:
            _rename_uses(one, old, new)
