"""The graph that TensorRT's parser gets: every rewrite of a model, in order.

TensorRT's parser takes the plugin of a node that names the namespace and the version of one. It
takes the function of the node's name for other nodes. The simplifications leave results bit for
bit.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from aftexport.engines.tensorrt.graph.network import (
    MAX_SMALL_BYTES,
    Network,
    is_small,
    quiet,
    to_proto,
)
from aftexport.errors import EngineError
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, operator_name
from aftexport.operators.portable_bodies import inline_partial_calls, takes_form
from aftexport.operators.registry import operator_of


def prepare_graph(model: onnx.ModelProto, *, has_plugins: bool) -> onnx.ModelProto:
    """Rewrite a model for TensorRT, with its nodes sorted and without unused ones.

    Args:
        model: the model, which may be changed. Weights in files are not read.
        has_plugins: whether the plugin library is registered.

    Raises:
        EngineError: if the graph is not valid.
    """
    rewrites = PLUGIN_REWRITES if has_plugins else PORTABLE_REWRITES
    try:
        network = Network(inline_partial_calls(model))
        for rewrite in rewrites:
            rewrite(network)
        with quiet():
            network.graph.cleanup().toposort()
        for simplify in SIMPLIFICATIONS:
            simplify(network)
        with quiet():
            network.graph.cleanup()
        return network.to_model()
    except gs.OnnxGraphSurgeonException as error:
        raise EngineError(
            f"The graph cannot be prepared for TensorRT: {error}", "Export the model again."
        ) from error


_SUFFIX = "Portable"


def name_plugins(network: Network) -> None:
    """Give each node that a plugin takes its name and attributes; the others run by their bodies.

    The most common form of an operator has the operator's name. If a node of another form gets
    that name, the body of the common form must not have it: a parser without the plugin then
    refuses the model, and does not run the wrong body.
    """
    bodies = {f.name: f for f in network.model.functions if f.domain == DOMAIN}
    portable: list[gs.Node] = []
    other_forms: set[str] = set()
    for node in _own_nodes(network.graph):
        name = operator_name(node.op)
        if operator_of(node.op) is None or not takes_form("tensorrt", to_proto(node)):
            portable.append(node)
            continue
        if node.op != name:
            other_forms.add(name)
            node.op = name
        node.attrs.update(PLUGIN_ATTRIBUTES)
    for node in portable:
        _run_by_body(node)
        if node.op in other_forms:
            node.op += _SUFFIX
    for name in sorted(other_forms & bodies.keys()):
        bodies[name].name += _SUFFIX


def remove_plugins(network: Network) -> None:
    """Let every node run by its body, also where an engine of this process holds the plugins."""
    for node in _own_nodes(network.graph):
        _run_by_body(node)


def _own_nodes(graph: gs.Graph) -> list[gs.Node]:
    return [node for node in graph.nodes if node.domain == DOMAIN]


def _run_by_body(node: gs.Node) -> None:
    for name in PLUGIN_ATTRIBUTES:
        node.attrs.pop(name, None)


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


Rewrite = Callable[[Network], None]
"""A change of a graph in place."""


PLUGIN_REWRITES: tuple[Rewrite, ...] = (name_plugins,)
"""The rewrites of a graph whose operators run by plugins."""


PORTABLE_REWRITES: tuple[Rewrite, ...] = (remove_plugins,)
"""The rewrites of a graph whose operators run by their bodies."""


SIMPLIFICATIONS: tuple[Rewrite, ...] = (infer_types, remove_idle_casts, fold_constants)
"""The rewrites of every graph, after the others and in topological order."""
