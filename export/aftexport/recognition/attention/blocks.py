"""Attention without an operator, in blocks of queries: its memory grows with the tokens.

A scan over blocks computes scores ``[..., block, S]`` instead of ``[..., T, S]``. What stands
between both products treats each row of the scores by itself, and so does what makes their masks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.lowering.graph_values import value_names
from aftexport.lowering.nodes import NewNodes
from aftexport.recognition.attention.structure import is_product_of_tokens
from aftexport.recognition.graph.shape_probe import ProbedGraph

BLOCK = 128
"""The maximum number of queries of a block: a product with it is as fast as a longer one."""
MAX_WHOLE_TOKENS = 4096
"""The maximum tokens for which attention keeps all its scores, 64 MiB for each head."""

_BY_ENTRY = frozenset({
    "Abs", "Add", "And", "Cast", "CastLike", "Div", "Dropout", "Equal", "Greater",
    "GreaterOrEqual", "Identity", "IsNaN", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul",
    "Neg", "Not", "Or", "Sub", "Tanh", "Where",
})  # fmt: skip
"""Operators that compute each entry from those at its place."""
_BY_ROW = ("ReduceMax", "ReduceSum", "Softmax")
"""Operators that may reduce or normalize the last axis."""


def scan_in_blocks(model: ir.Model, probed: ProbedGraph) -> int:
    """Put each attention of a graph that has standard operators into a scan, in place.

    Return their number. One whose nodes do not treat each row by itself stays.
    """
    count = 0
    taken = value_names(model.graph)
    for softmax in [node for node in model.graph if node.op_type == "Softmax"]:
        output = _output_of(softmax)
        rows = None if output is None else _rows_of(output, softmax, probed)
        if output is None or rows is None:
            continue
        new = NewNodes(model.graph, str(output.outputs[0].name), taken)
        result = _scan(output, rows, new, probed)
        new.replace(output, result)
        count += 1
    if count:
        RemoveUnusedNodesPass()(model)
    return count


def _output_of(softmax: ir.Node) -> ir.Node | None:
    """Return the product of the weights of a softmax and the values."""
    value = softmax.outputs[0]
    while True:
        readers = [user for user, _ in value.uses() if user.op_type != "IsNaN"]
        if len(readers) != 1 or value.is_graph_output():
            return None
        node = readers[0]
        if node.op_type == "MatMul":
            return node if node.inputs[0] is value else None
        if node.op_type not in _BY_ENTRY:
            return None
        value = node.outputs[0]


@dataclass
class _Rows:
    """The nodes of the rows of the scores, and the values that they are given."""

    product: ir.Node
    nodes: list[ir.Node] = field(default_factory=list)  # from the product to the weights
    scanned: list[ir.Value] = field(default_factory=list)  # with a row for each query
    states: list[ir.Value] = field(default_factory=list)
    constants: list[ir.Value] = field(default_factory=list)  # of one number


def _rows_of(output: ir.Node, softmax: ir.Node, probed: ProbedGraph) -> _Rows | None:
    """Return the rows of an attention; None if its nodes do not treat each row by itself."""
    products = [
        n for n in _above(softmax) if n.op_type == "MatMul" and is_product_of_tokens(n, probed)
    ]
    weights = output.inputs[0]
    if len(products) != 1 or weights is None:
        return None
    (product,) = products
    rows = _Rows(product)
    square = [shape[-2:] for shape in probed.shapes(product.outputs[0]) or ()]
    depending = _below(product, _above(output))
    pending: list[tuple[ir.Value, bool]] = [(weights, False)]
    while pending:
        value, is_done = pending.pop()
        node = value.producer()
        if is_done:
            assert node is not None
            if node not in rows.nodes:
                rows.nodes.append(node)
            continue
        shapes = probed.shapes(value)
        if shapes is None:
            return None
        is_square = [shape[-2:] for shape in shapes] == square
        if node is product:
            pending.append((value, True))
            continue
        if node is not None and node in depending:
            if not _is_by_row(node, shapes):
                return None
        elif node is None or not is_square or node.op_type not in _BY_ENTRY:
            _give(rows, value, shapes, [tokens for tokens, _ in square])
            continue
        pending.append((value, True))
        pending += [(v, False) for v in reversed(node.inputs) if v is not None]
    return rows


def _above(node: ir.Node) -> set[ir.Node]:
    """Return a node and those that its rows are computed by, up to the first products."""
    pending, seen = [node], set[ir.Node]()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op_type != "MatMul" or current is node:
            pending += [p for v in current.inputs if v is not None and (p := v.producer())]
    return seen


def _below(node: ir.Node, among: set[ir.Node]) -> set[ir.Node]:
    """Return the nodes among some that are computed from a node."""
    pending, seen = [node], set[ir.Node]()
    while pending:
        for user, _ in (use for output in pending.pop().outputs for use in output.uses()):
            if user in among and user not in seen:
                seen.add(user)
                pending.append(user)
    return seen


def _is_by_row(node: ir.Node, shapes: Iterable[tuple[int, ...]]) -> bool:
    if node.op_type not in _BY_ROW:
        return node.op_type in _BY_ENTRY
    rank = len(next(iter(shapes)))
    if node.op_type == "Softmax":
        return node.attributes.get_int("axis", -1) in (-1, rank - 1)
    axes = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] else None
    is_last = axes is not None and axes.numpy().tolist() in ([-1], [rank - 1])
    return is_last and node.attributes.get_int("keepdims", 1) == 1


def _give(rows: _Rows, value: ir.Value, shapes: list[tuple[int, ...]], tokens: list[int]) -> None:
    """Note a value that the rows are given."""
    if value.const_value is not None and value.const_value.size == 1:
        kind = rows.constants
    elif [shape[-2] if len(shape) > 1 else 0 for shape in shapes] == tokens:
        kind = rows.scanned
    else:
        kind = rows.states
    if value not in kind:
        kind.append(value)


def _scan(output: ir.Node, rows: _Rows, new: NewNodes, probed: ProbedGraph) -> ir.Value:
    """Return the result of an attention by a scan over blocks of its queries."""
    query, key = rows.product.inputs
    value = output.inputs[1]
    assert query is not None and key is not None and value is not None  # noqa: PT018, one product
    ints = new.constant
    tokens = new.add("Shape", query, start=-2, end=-1)
    size = new.add("Max", new.add("Min", tokens, ints([BLOCK])), ints([1]))
    blocks = new.add("Div", new.add("Sub", new.add("Add", tokens, size), ints([1])), size)
    missing = new.add("Sub", new.add("Mul", blocks, size), tokens)
    scanned, states = [query, *rows.scanned], [key, value, *rows.states]
    ranks = {v: len((probed.shapes(v) or [()])[0]) for v in (*scanned, *states)}
    split = [_split(v, blocks, size, missing, new) for v in scanned]
    rank = len((probed.shapes(output.outputs[0]) or [()])[0])
    node = ir.node(
        "Scan",
        [*states, *split],
        {
            "num_scan_inputs": len(split),
            "scan_input_axes": [ranks[v] - 2 for v in scanned],
            "scan_output_axes": [rank - 2],
            "body": _body(output, rows, states, scanned, probed),
        },
        num_outputs=len(states) + 1,
    )
    attended = new.append(node)[-1]
    lead = new.add("Shape", attended, end=-3)
    width = new.add("Shape", value, start=-1)
    shape = new.add("Concat", lead, new.add("Mul", blocks, size), width, axis=0)
    whole = new.add("Reshape", attended, shape, allowzero=1)
    return new.add("Slice", whole, ints([0]), tokens, ints([-2]))


def _split(
    value: ir.Value, blocks: ir.Value, size: ir.Value, missing: ir.Value, new: NewNodes
) -> ir.Value:
    """Return ``[..., T, W]`` as ``[..., blocks, size, W]``, with zeros after the last row."""
    lead, width = new.add("Shape", value, end=-2), new.add("Shape", value, start=-1)
    gap = new.add("Concat", lead, missing, width, axis=0)
    zeros = new.add("Expand", new.add("CastLike", new.constant(np.zeros(())), value), gap)
    whole = new.add("Concat", value, zeros, axis=-2)
    shape = new.add("Concat", lead, blocks, size, width, axis=0)
    return new.add("Reshape", whole, shape, allowzero=1)


def _body(
    output: ir.Node,
    rows: _Rows,
    states: list[ir.Value],
    scanned: list[ir.Value],
    probed: ProbedGraph,
) -> ir.Graph:
    """Return the attention of one block of queries."""
    # Keys, values and masks are states of the scan: its body then refers to no value outside.
    name = output.outputs[0].name
    inputs = [
        ir.val(f"{name}_given_{place}", type=_type_of(value, probed))
        for place, value in enumerate((*states, *scanned))
    ]
    whole, parts = (
        dict(zip(values, some, strict=True))
        for values, some in ((states, inputs[: len(states)]), (scanned, inputs[len(states) :]))
    )
    nodes = [
        ir.node("Constant", [], {"value": constant.const_value}) for constant in rows.constants
    ]
    made = dict(zip(rows.constants, (node.outputs[0] for node in nodes), strict=True))
    for node in (*rows.nodes, output):
        # Queries may be keys or values too, of which every block reads all.
        is_whole = [node is output and place == 1 for place in range(len(node.inputs))]
        if node is rows.product:
            is_whole = [False, True]
        given = [
            None if v is None else (whole if of_all else whole | parts | made)[v]
            for v, of_all in zip(node.inputs, is_whole, strict=True)
        ]
        copied = ir.Node(
            node.domain,
            node.op_type,
            given,
            node.attributes.values(),
            num_outputs=len(node.outputs),
        )
        made |= dict(zip(node.outputs, copied.outputs, strict=True))
        nodes.append(copied)
    kept = [ir.node("Identity", [value]) for value in inputs[: len(states)]]
    nodes += kept
    outputs = [*(node.outputs[0] for node in kept), made[output.outputs[0]]]
    for value, like in zip(outputs, [*states, output.outputs[0]], strict=True):
        value.type = _type_of(like, probed)
    for place, value in enumerate(value for node in nodes for value in node.outputs):
        value.name = f"{name}_row_{place}"
    return ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        name="attention_of_a_block",
        opset_imports={"": probed.opset},
    )


def _type_of(value: ir.Value, probed: ProbedGraph) -> ir.TensorType:
    return ir.TensorType(ir.DataType.from_numpy(probed.dtype(value)))
