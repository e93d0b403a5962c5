"""Simplifications of a graph that leave its results bit for bit."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from aftexport.engines.tensorrt.graph.network import MAX_SMALL_BYTES, Network, is_small, quiet
from aftexport.errors import EngineError

_STANDARD = ("", "ai.onnx", None)
_RANDOM = {
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}
_MAX_ITEM_BYTES = 16
"""The size of the largest element of a tensor, a complex number."""


def infer_types(network: Network) -> None:
    """Add the type and the shape of each value as far as ONNX can infer them."""
    with quiet():
        model = gs.export_onnx(network.graph)
    model.functions.extend(network.model.functions)
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    known = {value.name: value.type for value in inferred.graph.value_info}
    for name, tensor in network.graph.tensors().items():
        if isinstance(tensor, gs.Variable) and tensor.dtype is None and name in known:
            kind = known[name].tensor_type
            tensor.dtype = kind.elem_type or None
            if kind.HasField("shape"):
                tensor.shape = [
                    d.dim_value if d.HasField("dim_value") else d.dim_param or None
                    for d in kind.shape.dim
                ]


def remove_idle_casts(network: Network) -> None:
    """Remove casts of tensors to the type that they have."""
    graph = network.graph
    results = {tensor.name for tensor in graph.outputs}
    for cast in graph.nodes:
        if cast.op != "Cast" or cast.domain not in _STANDARD:
            continue
        (source,), (result,) = cast.inputs, cast.outputs
        if element_of(source) != cast.attrs["to"] or result.name in results:
            continue
        for consumer in list(result.outputs):
            for place, tensor in enumerate(consumer.inputs):
                if tensor is result:
                    consumer.inputs[place] = source


def fold_constants(network: Network) -> None:
    """Compute small values that depend on constants only.

    Shapes and functions are left alone. Folding of shapes would also remove casts between integers
    and floats, which changes a product with a fraction. ONNX Runtime computes the values, so
    nothing is folded without it. It has no arrays in bfloat16.
    """
    try:
        # This module switches the telemetry off before the first session.
        from aftexport.engines.onnxruntime.package import onnxruntime
    except EngineError:
        return
    with quiet(), _quiet_sessions(onnxruntime):
        network.graph.fold_constants(
            fold_shapes=False,
            recurse_subgraphs=False,
            flatten_subgraphs=False,
            recurse_functions=False,
            size_threshold=MAX_SMALL_BYTES,
            should_exclude_node=lambda node: not _can_fold(node),
        )


@contextmanager
def _quiet_sessions(onnxruntime: Any) -> Iterator[None]:
    """Silence the sessions of onnx-graphsurgeon, which have the runtime's own severity."""
    onnxruntime.set_default_logger_severity(4)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(2)  # the runtime's default, which it does not tell


def element_of(tensor: gs.Tensor) -> int | None:
    """Return the ONNX type of a tensor; None if the graph does not say it."""
    kind = tensor.dtype
    if kind is None or isinstance(kind, int):
        return kind
    return int(onnx.helper.np_dtype_to_tensor_dtype(kind))


def _can_fold(node: gs.Node) -> bool:
    return bool(
        node.domain in _STANDARD
        and node.op not in _RANDOM
        and not list(node.subgraphs())
        and all(map(is_small, node.inputs))
        and all(map(_is_small_result, node.outputs))
        and all(element_of(tensor) != TensorProto.BFLOAT16 for tensor in node.inputs)
        and node.attrs.get("to") != TensorProto.BFLOAT16
    )


def _is_small_result(tensor: gs.Tensor) -> bool:
    """Return whether a value is known to be small: a node may repeat its input many times."""
    shape = tensor.shape
    if shape is None or not all(isinstance(size, int) for size in shape):
        return False
    return bool(math.prod(shape) * _MAX_ITEM_BYTES <= MAX_SMALL_BYTES)
