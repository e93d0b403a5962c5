"""A model as a graph of onnx-graphsurgeon, and back without a loss.

onnx-graphsurgeon 0.6 drops the metadata of nodes and values, and attributes of some types, and
copies every weight on export. Here it sees large weights as references, and the model keeps all
that it does not handle.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, NodeProto, TensorProto
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.logger import G_LOGGER

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
