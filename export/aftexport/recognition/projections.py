"""Transposes around operators, folded into the 1x1 convolutions beside them.

An operator reads ``[B, T, C]``, and a convolution writes ``[B, C, H, W]``. Its rows for one operand
become a matrix product of the transposed image, which all operands share. The convolution after an
operator becomes a product with the transposed result, which runtimes compute without a copy.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.lowering import nodes as matching
from aftexport.lowering.nodes import NewNodes
from aftexport.operators.domain import DOMAIN
from aftexport.recognition.graph.convolution_rows import (
    LAYOUTS,
    SEQUENCE_RANK,
    ConvolutionRows,
    can_leave,
    channel_dims,
    channels_of,
    convolution_rows,
    has_sizes_of,
    is_pointwise,
    rank_of,
    redirect_sizes,
    slice_rows,
)
from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.patterns.pattern import NearMissFound

TRANSPOSES_COST = "the transposes cost more than the operator saves"

_OPERANDS = 3
"""Query, key and value come first among the inputs of an operator."""
_TOKENS_FIRST = [0, 2, 1]
_CHEAP_FEATURES = ("identity", "relu")
_WIDE_HEAD = 256
"""The channels of a head from which the operator is faster than two matrix products.

In narrower heads with transposes that stay, the original took 0.92 to 1.05 times as long as the
operator: 16, 32 and 64 channels in 4 or 8 heads, 1,024 and 4,096 pixels, fp32, one thread of a
shared Intel Xeon, medians of processor time of 12 runs in turn, one process for each shape. A
depthwise convolution came first, or the keys had a softmax.
"""


class CostlyTransposes(NearMissFound):
    """The operator would be slower than the nodes that it replaces."""

    def __init__(self) -> None:
        super().__init__(TRANSPOSES_COST)


def fold_transposes(model: ir.Model, probed: ProbedGraph) -> None:
    """Fold the transposes around the operators of a graph, in place."""
    operators = [node for node in model.graph if node.domain == DOMAIN]
    if not operators:
        return
    left: dict[ir.Node, None] = {}
    for operator in operators:
        folder = _Folder(model.graph, probed, operator)
        left |= dict.fromkeys(folder.fold_operands())
        folder.fold_output()
    _clean(model)
    for convolution in left:
        if convolution.graph is not None:
            _split_by_slices(model.graph, convolution, probed)
    _clean(model)


def transposes_cost_more(
    nodes: Iterable[ir.Node], replaced: set[ir.Node], probed: ProbedGraph
) -> bool:
    """Return whether an operator saves less than the transposes that cannot be folded.

    Linear attention without costly features is two matrix products in the original too, and the
    operator is faster than those only in wide heads. It saves the division by a normalizer, which
    takes about as long as two transposes.
    """
    nodes = [*nodes]
    (operator,) = (node for node in nodes if node.domain == DOMAIN)
    features = operator.attributes.get_string("feature_map", "")
    if operator.op_type != "NormalizedLinearAttention" or features not in _CHEAP_FEATURES:
        return False
    found = {
        source: convolution_rows(source, probed)
        for value in operator.inputs[:_OPERANDS]
        if (source := _transposed(value)) is not None
    }
    path = {node for rows in found.values() if rows is not None for node in rows.path} | {*nodes}
    kept = [
        source
        for source, rows in found.items()
        if rows is None or not can_leave(rows.convolution, path, replaced, probed)
    ]
    heads = operator.attributes.get_int("num_heads", 1)
    channels = [channels_of(source, probed) for source in kept]
    is_narrow = any(count is not None and count < heads * _WIDE_HEAD for count in channels)
    is_product = operator.attributes.get_string("normalizer", "") == "none"
    return is_narrow and len(kept) > (0 if is_product else 2)


def _clean(model: ir.Model) -> None:
    model.graph.sort()
    RemoveUnusedNodesPass()(model)


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """Return the tensor ``[B, C, T]`` that a value is the transpose of."""
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and _is_transpose(node) else None


def _is_transpose(node: ir.Node) -> bool:
    # Without perm, a Transpose reverses all dims.
    return node.op_type == "Transpose" and [*node.attributes.get_ints("perm", [])] == _TOKENS_FIRST


class _Folder:
    """The changes around one operator."""

    def __init__(self, graph: ir.Graph, probed: ProbedGraph, operator: ir.Node) -> None:
        self._graph = graph
        self._probed = probed
        self._operator = operator
        self._new = NewNodes(graph, str(operator.outputs[0].name))
        self._sources = {
            value: source
            for value in operator.inputs[:_OPERANDS]
            if value is not None and (source := _transposed(value)) is not None
        }
        self._tokens: dict[ir.Value, ir.Value] = {}

    def fold_operands(self) -> list[ir.Node]:
        """Fold the transposes of operands; return the convolutions that they no longer read."""
        found: dict[ir.Value, ConvolutionRows] = {}
        for value, source in self._sources.items():
            if (rows := convolution_rows(source, self._probed)) is not None:
                found[value] = rows
        path = {node for rows in found.values() for node in rows.path}
        path |= {node for value in found if (node := value.producer()) is not None}
        left = [
            convolution
            for convolution in dict.fromkeys(rows.convolution for rows in found.values())
            if redirect_sizes(self._graph, convolution, path, self._probed)
        ]
        for value, rows in found.items():
            if rows.convolution in left:
                value.replace_all_uses_with(self._write_tokens(rows))
        self._insert()
        return left

    def fold_output(self) -> None:
        """Make the convolution after the operator a product with the transposed result."""
        transpose = matching.only_user(self._operator.outputs[0], "Transpose")
        if transpose is None or not _is_transpose(transpose):
            return
        value = transpose.outputs[0]
        while (reader := _only_reader(value)) is not None and reader.op_type in LAYOUTS:
            value = reader.outputs[0]
        if reader is None or not is_pointwise(reader, self._probed):
            return
        weight, bias = _weights(reader, None)
        if channel_dims(value, weight.shape[1], self._probed) != weight.shape[1:]:
            return
        output = reader.outputs[0]
        image = next((i for i in self._images() if has_sizes_of(i, output, self._probed)), None)
        if image is not None:
            flat = transpose.outputs[0]
            whole = _as_image(self._new, weight, bias, flat, image, self._probed)
            self._insert()
            matching.take_place(output, whole)

    def _insert(self) -> None:
        self._graph.extend(self._new.nodes)
        self._new.nodes.clear()

    def _write_tokens(self, rows: ConvolutionRows) -> ir.Value:
        """Return rows of a convolution as a tensor ``[B, T, C]``."""
        weight, bias = _weights(rows.convolution, rows.rows)
        if rows.image not in self._tokens:
            self._tokens[rows.image] = self._tokens_of(rows.image, weight.shape[1])
        value = self._new.add("MatMul", self._tokens[rows.image], self._new.constant(weight.T))
        if bias is not None:
            value = self._new.add("Add", value, self._new.constant(bias))
        for node in reversed(rows.maps):
            inputs = [value, *(self._copy_number(other) for other in node.inputs[1:])]
            copy = ir.Node("", node.op_type, inputs, [*node.attributes.values()])
            (value,) = self._new.append(copy)
        return value

    def _copy_number(self, value: ir.Value | None) -> ir.Value | None:
        """Return a constant of one number, without dims that the tensor may lack."""
        array = self._probed.fixed_value(value)
        return None if array is None else self._new.constant(array.reshape(()))

    def _tokens_of(self, image: ir.Value, channels: int) -> ir.Value:
        """Return an image ``[B, C, ...]`` as ``[B, T, C]``."""
        for value in self._same_order(image, channels):
            if (source := _transposed(value)) is not None:
                return source  # the image is made of tokens
        rank = rank_of(image, self._probed)
        tokens = self._new.add("Transpose", image, perm=[0, *range(2, rank), 1])
        if rank == SEQUENCE_RANK:
            return tokens
        return self._new.add("Reshape", tokens, self._new.constant([0, -1, channels]))

    def _same_order(self, value: ir.Value, channels: int) -> Iterator[ir.Value]:
        """Yield a value, and those of which it is another layout with the same channels."""
        while True:
            yield value
            node = value.producer()
            source = node.inputs[0] if node is not None and node.op_type in LAYOUTS else None
            if source is None or not self._probed.has(source):
                return
            if channel_dims(source, channels, self._probed) is None:
                return
            value = source

    def _images(self) -> Iterator[ir.Value]:
        """Yield the images that the operands are made of."""
        yield from self._tokens
        for source in self._sources.values():
            if self._probed.has(source):
                yield source
            node = source.producer()
            above = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
            if above is not None and self._probed.has(above):
                yield above


def _only_reader(value: ir.Value) -> ir.Node | None:
    users = [user for user, _ in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def _weights(
    convolution: ir.Node, rows: Iterable[int] | None
) -> tuple[NDArray[np.generic], NDArray[np.generic] | None]:
    """Return the weight ``[C, C_in]`` and the bias of some rows of a convolution, None for all."""
    weight, bias = (
        matching.constant(value) if value is not None else None
        for value in (*convolution.inputs[1:], None)[:2]
    )
    assert weight is not None
    chosen = slice(None) if rows is None else np.array([*rows])
    taken = np.ascontiguousarray(weight.reshape(weight.shape[:2])[chosen])
    return taken, bias[chosen] if bias is not None else None


def _split_by_slices(graph: ir.Graph, convolution: ir.Node, probed: ProbedGraph) -> None:
    """Replace a convolution by a product for each slice of its channels, if it has only slices."""
    slices = {
        output: slice_rows(user, output, probed)
        for user, _ in convolution.outputs[0].uses()
        for output in user.outputs
        if output.uses()
    }
    image = convolution.inputs[0]
    assert image is not None
    known = {output: rows for output, rows in slices.items() if rows is not None}
    if len(known) < len(slices):
        return
    for output, rows in known.items():
        weight, bias = _weights(convolution, rows)
        new = NewNodes(graph, str(output.name))
        flat = new.add("Reshape", image, new.constant([0, weight.shape[1], -1]))
        whole = _as_image(new, weight, bias, flat, image, probed)
        graph.extend(new.nodes)
        matching.take_place(output, whole)


def _as_image(
    new: NewNodes,
    weight: NDArray[np.generic],
    bias: NDArray[np.generic] | None,
    flat: ir.Value,
    image: ir.Value,
    probed: ProbedGraph,
) -> ir.Value:
    """Return a weight times ``[B, C, T]`` and plus a bias, in the dims of an image."""
    product = new.add("MatMul", new.constant(weight), flat)
    if bias is not None:
        product = new.add("Add", product, new.constant(bias[:, None]))
    if rank_of(image, probed) == SEQUENCE_RANK:
        return product
    sizes = new.add("Shape", image, start=2)
    front = new.constant([0, weight.shape[0]])
    return new.add("Reshape", product, new.add("Concat", front, sizes, axis=0))
