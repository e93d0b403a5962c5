"""The recurrent nodes of ONNX as the function bodies of onnx itself, and graphs in another opset.

No released runtime loads opset 27. The bodies need older operators only, so that the file runs as
its own definition says. ONNX gives a new version to many operators only because they take further
types: a graph whose nodes mean the same in both is lowered to an opset that all runtimes load.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import TensorProto, helper

from aftexport.errors import UsageError, first_line
from aftexport.lowering.file_format import lower_format
from aftexport.operators.domain import DOMAIN, opset_of
from aftexport.operators.mechanisms.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.mechanisms.recurrent_linear_attention import RECURRENT_LINEAR_ATTENTION
from aftexport.recognition.standard_recurrence.node_values import (
    CAUSAL_CONV,
    FIRST_OPSET,
    LINEAR_ATTENTION,
    REMEDY,
    is_standard,
)
from aftexport.recognition.standard_recurrence.translation import check_foreign_nodes, check_sizes
from aftexport.system.contract import DEFAULT_OPSET

_DOMAIN = "ai.aftexport.expanded"
_STATE = 3
"""The place of the past state among the inputs of both operators."""


def runnable_form(model: ir.Model) -> onnx.ModelProto:
    """Return a graph as a file that released runtimes load: without the nodes, in an older opset.

    Raises:
        UsageError: if a node violates its definition, or has no form in an older opset.
    """
    file = ir.to_proto(model)
    if check_foreign_nodes(model):
        file = _with_shapes(file)
        _check_sizes(model, _shapes(file))
        file = expand(file)
    if opset_of(file) > NEWEST_OPSET:
        graph = ir.from_proto(file)
        lower_opset(graph)
        file = ir.to_proto(graph)
    lower_format(file)
    return file


def expand(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which the bodies replace the nodes; the model itself if it has none.

    The model must have the shapes of its values.

    Raises:
        UsageError: if the installed onnx knows no body for a node.
    """
    if not any(is_standard(node) for node in model.graph.node):
        return model
    expanded = onnx.ModelProto()
    expanded.CopyFrom(model)
    shapes = _shapes(model)
    for index, node in enumerate(n for n in expanded.graph.node if is_standard(n)):
        function = _body(node, shapes)
        function.domain, function.name = _DOMAIN, f"{node.op_type}_{index}"
        expanded.functions.append(function)
        node.domain, node.op_type = _DOMAIN, function.name
        del node.attribute[:]
    expanded.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    return onnx.inliner.inline_local_functions(expanded)


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with the inferred shapes of its values."""
    try:
        return onnx.shape_inference.infer_shapes(model)
    except onnx.shape_inference.InferenceError as error:
        raise UsageError(
            f"Expected nodes as ONNX defines them, got an error ({first_line(error)}).", REMEDY
        ) from error


def _shapes(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """Return the shapes of constants and of described values; None for a size of any number."""
    shapes: dict[str, list[int | None]] = {}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            shapes[value.name] = [dim.dim_value or None for dim in dims]
    return shapes | {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}


def _check_sizes(model: ir.Model, shapes: Mapping[str, Sequence[int | None]]) -> None:
    """Raise UsageError if known sizes of a standard node violate its definition."""
    zero = np.zeros((), np.float32)
    for node in model.graph:
        if not is_standard(node):
            continue
        named = [(i, str(v.name)) for i, v in enumerate(node.inputs) if v is not None]
        known = {
            name: shapes[name]
            for place, name in named
            if name in shapes and None not in _compared(node.op_type, place, shapes[name])
        }
        if len(known) == len({name for _, name in named}):
            run = {
                name: np.broadcast_to(zero, [1 if size is None else size for size in shape])
                for name, shape in known.items()
            }
            check_sizes(node, run)


def _compared(op_type: str, place: int, shape: Sequence[int | None]) -> Sequence[int | None]:
    """Return the sizes of an input that a definition compares: neither batch nor tokens."""
    if op_type == LINEAR_ATTENTION:
        return shape[1:] if place == _STATE else shape[2:]
    if place == 0:
        return shape[1:2]
    return shape[1:] if place == _STATE else shape


def _body(node: onnx.NodeProto, shapes: Mapping[str, Sequence[int | None]]) -> onnx.FunctionProto:
    try:
        schema = onnx.defs.get_schema(node.op_type, FIRST_OPSET)
        types = _types(node, shapes)
        body = schema.get_context_dependent_function  # type: ignore[attr-defined]  # not in stubs
        text: bytes = body(node.SerializeToString(), [t.SerializeToString() for t in types])
        function: onnx.FunctionProto = onnx.FunctionProto.FromString(text)
    except (RuntimeError, onnx.defs.SchemaError) as error:
        raise _no_body(node, first_line(error)) from error
    if not function.node:
        raise _no_body(node, "its inputs or attributes do not fit")
    del function.attribute[:]
    for inner in function.node:
        # Without a type, zeros would stay float32 where the graph is widened to float64.
        if inner.op_type == "ConstantOfShape" and not inner.attribute:
            zero = onnx.numpy_helper.from_array(np.zeros(1, np.float32))
            inner.attribute.append(onnx.helper.make_attribute("value", zero))
    return function


def _types(
    node: onnx.NodeProto, shapes: Mapping[str, Sequence[int | None]]
) -> list[onnx.TypeProto]:
    """Return the types of the inputs: a body depends on those that are there, and on channels."""
    known = dict(shapes)
    given = dict(enumerate(node.input))
    if node.op_type == CAUSAL_CONV and (weight := shapes.get(given.get(1, ""))):
        known[node.input[0]] = (None, weight[0], None)
    return [
        onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, known.get(name))
        if name
        else onnx.TypeProto()
        for name in node.input
    ]


def _no_body(node: onnx.NodeProto, reason: str) -> UsageError:
    return UsageError(
        f"Expected a body of onnx {onnx.__version__} for node {node.name or node.output[0]!r} "
        f"({node.op_type}), got none ({reason.rstrip('.')}).",
        "Correct the node, or install a newer onnx.",
    )


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with inferred shapes of its values, by standard nodes of the same shapes."""
    stand_in = onnx.ModelProto()
    stand_in.CopyFrom(model)
    nodes = [new for node in model.graph.node for new in _with_known_shape(node)]
    del stand_in.graph.node[:]
    stand_in.graph.node.extend(nodes)
    inferred = onnx.shape_inference.infer_shapes(stand_in, data_prop=True)
    del inferred.graph.node[:]
    inferred.graph.node.extend(model.graph.node)
    return inferred


def _with_known_shape(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    if node.domain == DOMAIN and node.op_type == CAUSAL_DEPTHWISE_CONV.op_type:
        yield helper.make_node("Identity", node.input[:1], node.output[:1])
    elif node.domain == DOMAIN and node.op_type == RECURRENT_LINEAR_ATTENTION.op_type:
        heads = {a.name: a.i for a in node.attribute if a.name.endswith("_num_heads")}
        group = heads["q_num_heads"] // heads["kv_num_heads"]
        yield helper.make_node("Concat", [node.input[2]] * group, node.output[:1], axis=2)
    else:
        yield node


NEWEST_OPSET = 26
"""The newest opset that ONNX Runtime 1.31 loads."""
_CHANGED = frozenset(("DFT", "GridSample", "GroupNormalization"))
"""Operators that compute something else in a later opset, under the same attributes and inputs."""


def lower_opset(model: ir.Model) -> None:
    """Give a graph of a newer opset than ``NEWEST_OPSET`` the lowest one that fits, in place.

    Raises:
        UsageError: if a node needs a newer opset, or the installed onnx does not know the opset.
    """
    opset = model.opset_imports.get("", 0)
    if opset <= NEWEST_OPSET:
        return
    check_known(opset)
    nodes = [node for node in model.graph.all_nodes() if node.domain in ("", "ai.onnx")]
    for target in range(DEFAULT_OPSET, NEWEST_OPSET + 1):
        if all(_means_the_same(node, opset, target) for node in nodes):
            model.opset_imports[""] = target
            return
    node = next(node for node in nodes if not _means_the_same(node, opset, NEWEST_OPSET))
    raise UsageError(
        f"Expected operators of opset {NEWEST_OPSET} or lower, got opset {opset} with the node "
        f"{node.name or node.outputs[0].name!r} ({node.op_type}), which has no older form.",
        f"Export the model with opset {NEWEST_OPSET} or lower.",
    )


def raise_opset(model: ir.Model, opset: int) -> None:
    """Give a graph a newer opset, in place.

    Raises:
        UsageError: if a node would mean something else, or the installed onnx lacks the opset.
    """
    check_known(opset)
    own = model.opset_imports.get("", 0)
    for node in model.graph.all_nodes():
        if node.domain in ("", "ai.onnx") and not _means_the_same(node, own, opset):
            raise UsageError(
                f"Expected operators with the same meaning in opset {opset}, got the node "
                f"{node.name or node.outputs[0].name!r} ({node.op_type}) of opset {own}.",
                f"Leave --opset {opset} out.",
            )
    model.opset_imports[""] = max(own, opset)


def check_known(opset: int) -> None:
    """Raise UsageError if the installed onnx does not know an opset."""
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise UsageError(
            f"onnx {onnx.__version__} knows opsets up to {newest}, got {opset}.",
            "Install a newer onnx: pip install --upgrade onnx.",
        )


def _means_the_same(node: ir.Node, opset: int, target: int) -> bool:
    """Return whether a node is valid in another opset and computes the same there."""
    try:
        own, other = (onnx.defs.get_schema(node.op_type, n) for n in (opset, target))
    except onnx.defs.SchemaError:
        return _is_new(node, opset, target)
    if own.since_version == other.since_version:
        return True
    if node.op_type in _CHANGED:
        return False
    defaults_kept = all(
        own.attributes[name].default_value == attribute.default_value
        for name, attribute in other.attributes.items()
        if name not in node.attributes and name in own.attributes
    )
    return (
        defaults_kept
        and all(name in other.attributes for name in node.attributes)
        and len(node.inputs) <= other.max_input
        and len(node.outputs) <= other.max_output
    )


def _is_new(node: ir.Node, opset: int, target: int) -> bool:
    """Return whether an operator is only known in the newer opset, which is the target."""
    return target > opset and onnx.defs.has(node.op_type)
