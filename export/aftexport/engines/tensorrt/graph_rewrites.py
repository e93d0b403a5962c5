"""The graph that TensorRT's parser gets: every rewrite of a model, in order.

TensorRT's parser takes the plugin of a node that names the namespace and the version of one. It
takes the function of the node's name for other nodes. The simplifications leave results bit for
bit.

onnx-graphsurgeon 0.6 drops the metadata of nodes and values, and attributes of some types, and
copies every weight on export. So ``Network`` shows it large weights as references, and its model
keeps all that the library does not handle.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, NodeProto, TensorProto
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.logger import G_LOGGER

from aftexport.engines.plain_attention import write_attention
from aftexport.errors import EngineError
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, operator_name
from aftexport.operators.portable_bodies import inline_partial_calls, takes_form
from aftexport.operators.registry import operator_of

MAX_SMALL_BYTES = 1 << 20
"""The size of the largest weight that the graph holds itself."""
_REFERENCE = "aftexport:"
"""The start of the location of a weight in the model; no file has such a name."""
_LISTS = {AttributeProto.FLOATS: "floats", AttributeProto.INTS: "ints"}
_KEPT = {
    AttributeProto.FLOAT,
    AttributeProto.INT,
    AttributeProto.TENSOR,
    AttributeProto.GRAPH,
    *_LISTS,
}
"""The types of attributes whose every value the graph holds, if lists are not empty."""

_Path = tuple[str, ...]
"""The outputs of a node, after those of the nodes around it with the names of their attributes."""


class Network:
    """A model with its graph, which rewrites change.

    The model keeps the weights and the functions. Its nodes, inputs and outputs follow the
    graph after ``to_model`` only.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Take over a model; raise OnnxGraphSurgeonException if the graph is not valid."""
        self.model = model
        with quiet():
            self.graph = gs.import_onnx(_without_weights(model))

    def to_model(self) -> onnx.ModelProto:
        """Write the graph into the model, and return the model."""
        with quiet():
            exported = gs.export_onnx(self.graph)
        own, new = self.model.graph, exported.graph
        _restore_nodes(new, own)
        for name in ("input", "output", "value_info"):
            known = {value.name: value for value in getattr(own, name)}
            for value in getattr(new, name):
                if value.name in known:
                    _restore(value, known[value.name], "doc_string", "metadata_props")
        written = {value.name for value in own.value_info}  # other types are inferred
        values = [value for value in new.value_info if value.name in written]
        for name in ("node", "input", "output", "sparse_initializer"):
            replaced = getattr(own, name)
            del replaced[:]
            replaced.extend(getattr(new, name))
        del own.value_info[:]
        own.value_info.extend(values)
        _replace_weights(own.initializer, new.initializer)
        self.model.functions.extend(exported.functions)
        domains = {opset.domain for opset in self.model.opset_import}
        used = [opset for opset in exported.opset_import if opset.domain not in domains]
        self.model.opset_import.extend(used)
        return self.model


def quiet() -> AbstractContextManager[Any]:
    """Silence the logger of onnx-graphsurgeon, which writes to standard output."""
    silence: AbstractContextManager[Any] = G_LOGGER.suppress(G_LOGGER.CRITICAL)
    return silence


def to_proto(node: gs.Node) -> NodeProto:
    """Return a node of the graph as ONNX has it."""
    exported: NodeProto = OnnxExporter.export_node(node)
    return exported


def is_small(tensor: gs.Tensor) -> bool:
    """Return whether a tensor is not a weight outside the graph."""
    lazy = getattr(tensor, "_values", None)
    external = getattr(lazy, "tensor", None)
    if external is None or isinstance(external, onnx.SparseTensorProto):
        return True
    return bool(external.data_location != TensorProto.EXTERNAL)


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with references to large weights, without functions and foreign attributes."""
    graph = model.graph
    copy = onnx.ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        graph=onnx.GraphProto(
            name=graph.name,
            node=graph.node,
            input=graph.input,
            output=graph.output,
            value_info=graph.value_info,
            sparse_initializer=graph.sparse_initializer,
            initializer=map(_referring, graph.initializer),
        ),
    )
    for _, node in _nodes(copy.graph):
        held = [a for a in node.attribute if not _is_foreign(a)]
        if len(held) < len(node.attribute):
            node.ClearField("attribute")
            node.attribute.extend(held)
    return copy


def _referring(tensor: TensorProto) -> TensorProto:
    if tensor.ByteSize() <= MAX_SMALL_BYTES:
        return tensor
    location = onnx.StringStringEntryProto(key="location", value=_REFERENCE + tensor.name)
    return TensorProto(
        name=tensor.name,
        dims=tensor.dims,
        data_type=tensor.data_type,
        data_location=TensorProto.EXTERNAL,
        external_data=[location],
    )


def _referenced(tensor: TensorProto) -> str | None:
    """Return the name of the weight that a tensor refers to; None for a tensor of its own."""
    for entry in tensor.external_data:
        if entry.key == "location" and entry.value.startswith(_REFERENCE):
            return str(entry.value).removeprefix(_REFERENCE)
    return None


def _replace_weights(own: Any, new: Any) -> None:
    """Keep the weights of a model that are referred to, and replace the others."""
    names = {_referenced(tensor): tensor.name for tensor in new}
    for index in range(len(own) - 1, -1, -1):
        if own[index].name in names:
            own[index].name = names[own[index].name]
        else:
            del own[index]
    own.extend(t for t in new if _referenced(t) is None)


def _is_foreign(attribute: AttributeProto) -> bool:
    """Return whether onnx-graphsurgeon loses an attribute, or fails on export."""
    if attribute.type in _LISTS:
        return not getattr(attribute, _LISTS[attribute.type])
    if attribute.type in (AttributeProto.STRING, AttributeProto.STRINGS):
        texts = [attribute.s, *attribute.strings]
        is_list = attribute.type == AttributeProto.STRINGS
        return not (all(map(_is_text, texts)) and (attribute.strings or not is_list))
    return attribute.type not in _KEPT


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _nodes(graph: onnx.GraphProto, around: _Path = ()) -> Iterator[tuple[_Path, NodeProto]]:
    for node in graph.node:
        path = (*around, *node.output)
        yield path, node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nodes(attribute.g, (*path, attribute.name))


def _restore_nodes(new: onnx.GraphProto, own: onnx.GraphProto) -> None:
    """Give nodes with the outputs of an earlier one its metadata and its foreign attributes."""
    known = dict(_nodes(own))
    for path, node in _nodes(new):
        if (earlier := known.get(path)) is None:
            continue
        _restore(node, earlier, "doc_string", "overload", "metadata_props", "device_configurations")
        if node.op_type == earlier.op_type:
            node.attribute.extend(a for a in earlier.attribute if _is_foreign(a))


def _restore(new: Any, earlier: Any, *fields: str) -> None:
    """Copy text and lists of messages that an earlier node or value has."""
    for field in fields:
        content = getattr(earlier, field)
        if isinstance(content, str):
            if content:
                setattr(new, field, content)
        else:
            getattr(new, field).extend(content)


def prepare_graph(model: onnx.ModelProto, *, has_plugins: bool) -> onnx.ModelProto:
    """Rewrite a model for TensorRT, with its nodes sorted and without unused ones.

    The model may be changed. Weights in files are not read.
    """
    rewrites = PLUGIN_REWRITES if has_plugins else PORTABLE_REWRITES
    write_attention(model)
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
