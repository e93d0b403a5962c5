"""Replacement of softmax attention in a graph by the nodes that GPU runtimes fuse.

    scores = MatMul(query * scale, key^T);  output = MatMul(Softmax(scores + mask), value)

All heads are ``[B, H, tokens, channels]``. TensorRT runs this pattern as one kernel of its own if
the query is scaled before the first product and the mask is added; see "Fused Attention" in its
documentation. The portable body has a Scan, whose steps run one after the other.

The rows of padding are finite but not specified, as those of the kernel for CPUs. No other row
depends on them.
"""

from collections.abc import Mapping
from typing import Any

import onnx
import onnx.inliner
from onnx import TensorProto, helper

from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.mechanisms.softmax_attention import SOFTMAX_ATTENTION
from aftexport.operators.portable_bodies import remove_unused
from aftexport.operators.schema import LOG_SUM_OUTPUT
from aftexport.system.onnx_files import without_weights

_MASKED: dict[int, float] = {
    TensorProto.FLOAT: -1e30,
    TensorProto.BFLOAT16: -1e30,
    TensorProto.FLOAT16: -32768.0,
}
"""The number added to the score of a masked key. Sums with it are finite: no row becomes NaN."""


def write_attention(model: onnx.ModelProto) -> bool:
    """Replace the nodes of softmax attention in the main graph; return whether any was.

    A node keeps its body if it gives ``log_sum``, or if the width of its heads is not known.
    """
    if not any(_is_plain(node) for node in model.graph.node):
        return False
    types, writer = _Types(model), _Writer()
    replaced: set[str] = set()
    for node in model.graph.node:
        if _is_plain(node) and types.know(node):
            replaced.add(node.op_type)
            _Layer(writer, types, node).write()
        else:
            writer.nodes.append(node)
    changed = onnx.GraphProto(node=writer.nodes)  # a copy: the old nodes are deleted
    del model.graph.node[:]
    model.graph.node.extend(changed.node)
    remove_unused(model, replaced)
    return bool(replaced)


def _is_attention(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and operator_name(node.op_type) == SOFTMAX_ATTENTION.op_type


def _is_plain(node: onnx.NodeProto) -> bool:
    return _is_attention(node) and LOG_SUM_OUTPUT not in SOFTMAX_ATTENTION.present_in(node)


def _inputs(node: onnx.NodeProto) -> dict[str, str]:
    """Return the values of the inputs that a node has, by the operator's names."""
    pairs = zip(SOFTMAX_ATTENTION.inputs, node.input, strict=False)
    return {name: value for name, value in pairs if value}


def _heads(attributes: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of heads of the query and of the key."""
    count = int(attributes["num_heads"])
    return count, int(attributes["kv_num_heads"]) or count


class _Writer:
    """New nodes. Equal ones are written once, so layers share their masks.

    ``lowering.nodes.NewNodes`` needs onnx-ir, which servers do not have.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.prefix = ""  # of the names of new values
        self._known: dict[tuple[object, ...], str] = {}

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Return the output of a standard node, which is new unless there is an equal one."""
        key = (op_type, inputs, repr(sorted(attributes.items())))
        if key not in self._known:
            name = f"{self.prefix}/attention_{len(self._known)}"
            self._known[key] = name
            self.nodes.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return self._known[key]

    def ints(self, *numbers: int) -> str:
        """Return a constant vector of int64."""
        return self.add("Constant", value_ints=list(numbers))

    def number(self, number: float, element: int = TensorProto.INT64) -> str:
        """Return a constant scalar."""
        return self.add("Constant", value=helper.make_tensor("", element, [], [number]))


class _Types:
    """The types of the values of a graph, as far as ONNX infers them."""

    def __init__(self, model: onnx.ModelProto) -> None:
        # ONNX infers no type through a CastLike of a function.
        bare = onnx.inliner.inline_local_functions(_with_stand_ins(model))
        graph = onnx.shape_inference.infer_shapes(bare, data_prop=True).graph
        values = (*graph.value_info, *graph.input)
        self._tokens: dict[str, str] = {}
        self._types = {value.name: value.type.tensor_type for value in values}
        self._types |= {
            tensor.name: helper.make_tensor_type_proto(tensor.data_type, tensor.dims).tensor_type
            for tensor in graph.initializer
        }

    def know(self, node: onnx.NodeProto) -> bool:
        """Return whether the element type and the channels of a node's tensors are known."""
        names = [v for n, v in _inputs(node).items() if n in ("query", "key", "value", "cos_cache")]
        return all(
            name in self._types and self.element(name) in _MASKED and self.size(name, -1) > 0
            for name in names
        )

    def element(self, name: str) -> int:
        """Return the element type of a value."""
        return int(self._types[name].elem_type)

    def size(self, name: str, axis: int) -> int:
        """Return the size of an axis, 0 if it is not known."""
        dims = self._types[name].shape.dim
        return int(dims[axis].dim_value) if dims else 0

    def tokens(self, name: str, writer: _Writer) -> str:
        """Return the size of axis 1, one value for all tensors whose axis has the same name."""
        dim = self._types[name].shape.dim[1]
        axis = dim.dim_param or str(dim.dim_value or name)
        if axis not in self._tokens:
            self._tokens[axis] = writer.add("Shape", name, start=1, end=2)
        return self._tokens[axis]


def _with_stand_ins(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model for the inference of shapes, without weights and softmax attention."""
    bare = without_weights(model)
    nodes = [
        new
        for node in bare.graph.node
        for new in (_stand_in(node) if _is_attention(node) else [node])
    ]
    changed = onnx.GraphProto(node=nodes)  # a copy: the old nodes are deleted
    del bare.graph.node[:]
    bare.graph.node.extend(changed.node)
    return bare


def _stand_in(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes with the output's type: ONNX infers no shape through the portable body."""
    writer, output = _Writer(), node.output[0]
    writer.prefix = output
    heads, groups = _heads(SOFTMAX_ATTENTION.attributes_of(node))
    query = writer.add("Reshape", node.input[0], writer.ints(0, 0, heads, -1))
    value = writer.add("Reshape", node.input[2], writer.ints(0, 0, groups, -1))
    row = writer.add("ReduceMax", query, writer.ints(3))
    column = writer.add("ReduceMax", value, writer.ints(1, 2))
    product = writer.add("Mul", row, column)
    shape = writer.ints(0, 0, -1)
    return [*writer.nodes, helper.make_node("Reshape", [product, shape], [output])]


class _Layer:
    """A node that is written as standard nodes."""

    def __init__(self, writer: _Writer, types: _Types, node: onnx.NodeProto) -> None:
        self._writer = writer
        self._add = writer.add
        self._types = types
        self._node = node
        self._inputs = _inputs(node)
        self._attributes = SOFTMAX_ATTENTION.attributes_of(node)
        self._heads, self._groups = _heads(self._attributes)
        self._element = types.element(self._inputs["query"])

    def write(self) -> None:
        """Append the nodes to the writer, without those that earlier layers have."""
        self._writer.prefix = self._node.output[0]
        query = self._rotated(self._split("query", self._heads), "query")
        key = self._repeated(self._rotated(self._split("key", self._groups), "key"))
        value = self._repeated(self._split("value", self._groups))
        rows = self._add("MatMul", self._weights(query, key), value)
        if "key_lengths" in self._inputs:
            # Without it, only queries that are padding see no key.
            sees_none = self._add("Less", self._largest_mask(), self._number(self._masked / 2))
            rows = self._add("Where", sees_none, self._number(0), rows)
        by_token = self._add("Transpose", rows, perm=[0, 2, 1, 3])
        shape = self._writer.ints(0, 0, self._heads * self._width("value", self._groups))
        # The name of the replaced node: engines report the path of each node by its name.
        last = helper.make_node("Reshape", [by_token, shape], self._node.output, self._node.name)
        self._writer.nodes.append(last)

    @property
    def _masked(self) -> float:
        return _MASKED[self._element]

    def _number(self, number: float) -> str:
        return self._writer.number(number, self._element)

    def _width(self, name: str, heads: int) -> int:
        """Return the channels of a head."""
        return self._types.size(self._inputs[name], -1) // heads

    def _split(self, name: str, heads: int) -> str:
        """Return heads ``[B, heads, tokens, channels]``."""
        shape = self._writer.ints(0, 0, heads, self._width(name, heads))
        by_token = self._add("Reshape", self._inputs[name], shape)
        return self._add("Transpose", by_token, perm=[0, 2, 1, 3])

    def _repeated(self, x: str) -> str:
        """Return the head of each query from heads that queries share."""
        times = self._heads // self._groups
        if times == 1:
            return x
        ints = self._writer.ints
        column = self._add("Unsqueeze", x, ints(2))
        copies = self._add("Expand", column, ints(1, 1, times, 1, 1))
        rest = self._add("Shape", x, start=2)
        shape = self._add("Concat", ints(0, self._heads), rest, axis=0)
        return self._add("Reshape", copies, shape)

    def _weights(self, query: str, key: str) -> str:
        """Return the softmax over the keys, ``[B, H, T, S]``."""
        width = self._width("query", self._heads)
        scale = float(self._attributes["scale"]) or width**-0.5
        scaled = self._add("Mul", query, self._number(scale))
        scores = self._add("MatMul", scaled, self._add("Transpose", key, perm=[0, 1, 3, 2]))
        if softcap := float(self._attributes["softcap"]):
            bounded = self._add("Tanh", self._add("Div", scores, self._number(softcap)))
            scores = self._add("Mul", bounded, self._number(softcap))
        masked = self._add("Add", scores, self._biased_mask())
        if "sink" not in self._inputs:
            return self._add("Softmax", masked, axis=-1)
        ints = self._writer.ints
        rows = self._add("Shape", scores, start=0, end=3)
        shape = self._add("Concat", rows, ints(1), axis=0)
        sink = self._add("Reshape", self._inputs["sink"], ints(1, -1, 1, 1))
        column = self._add("Expand", sink, shape)
        with_sink = self._add("Concat", masked, column, axis=-1)
        weights = self._add("Softmax", with_sink, axis=-1)
        return self._add("Slice", weights, ints(0), ints(-1), ints(3))

    def _biased_mask(self) -> str:
        """Return the sum of mask and bias by distance."""
        if "bias" not in self._inputs:
            return self._mask()
        bias = self._inputs["bias"]
        reach = self._add("Div", self._add("Shape", bias, start=1), self._writer.ints(2))
        not_below = self._add("Max", self._distance(), self._add("Neg", reach))
        index = self._add("Add", self._add("Min", not_below, reach), reach)
        return self._add("Add", self._mask(), self._add("Gather", bias, index, axis=1))

    def _mask(self) -> str:
        """Return 0 for the keys that a query sees, ``[B or 1, 1, T or 1, S]``."""
        left, right = (int(self._attributes[f"window_{side}"]) for side in ("left", "right"))
        conditions = []
        lengths = self._inputs.get("key_lengths", self._inputs["lengths"])
        # A causal query within the lengths is before all padding.
        if right or "key_lengths" in self._inputs:
            ends = self._add("Unsqueeze", lengths, self._writer.ints(1))
            valid = self._add("Less", self._positions("key"), ends)
            conditions.append(self._add("Unsqueeze", valid, self._writer.ints(1, 2)))
        if left >= 0:
            least = self._writer.number(-left)
            conditions.append(self._add("GreaterOrEqual", self._distance(), least))
        if right >= 0:
            most = self._writer.number(right)
            conditions.append(self._add("LessOrEqual", self._distance(), most))
        seen, *others = conditions
        for condition in others:
            seen = self._add("And", seen, condition)
        return self._add("Where", seen, self._number(0), self._number(self._masked))

    def _largest_mask(self) -> str:
        """Return the largest mask of a row, which is 0 if the query sees a key."""
        return self._add("ReduceMax", self._mask(), self._writer.ints(3))

    def _distance(self) -> str:
        """Return the distances of keys from queries, ``[T, S]``."""
        rows = self._add("Unsqueeze", self._positions("query"), self._writer.ints(1))
        return self._add("Sub", self._positions("key"), rows)

    def _positions(self, name: str) -> str:
        """Return the positions of queries or keys."""
        number = self._writer.number
        count = self._add("Squeeze", self._types.tokens(self._inputs[name], self._writer))
        places = self._add("Range", number(0), count, number(1))
        start = self._inputs.get("query_start") if name == "query" else None
        return places if start is None else self._add("Add", places, start)

    def _rotated(self, x: str, name: str) -> str:
        """Rotate heads by the positions of their tokens."""
        if "cos_cache" not in self._inputs:
            return x
        ints, half = self._writer.ints, self._types.size(self._inputs["cos_cache"], -1)
        pair = self._attributes["interleaved"]
        first, second = ((0, 2 * half), (1, 2 * half)) if pair else ((0, half), (half, 2 * half))
        a, b = (
            self._add("Slice", x, ints(start), ints(end), ints(3), ints(2 if pair else 1))
            for start, end in (first, second)
        )
        cos, sin = (self._cached(cache, name) for cache in ("cos_cache", "sin_cache"))
        turned = [
            self._add("Sub", self._add("Mul", a, cos), self._add("Mul", b, sin)),
            self._add("Add", self._add("Mul", b, cos), self._add("Mul", a, sin)),
        ]
        if pair:
            columns = [self._add("Unsqueeze", part, ints(4)) for part in turned]
            joined = self._add("Concat", *columns, axis=4)
            turned = [self._add("Reshape", joined, ints(0, 0, 0, 2 * half))]
        width = self._width(name, self._heads if name == "query" else self._groups)
        if 2 * half < width:
            turned.append(self._add("Slice", x, ints(2 * half), ints(width), ints(3)))
        return self._add("Concat", *turned, axis=-1) if len(turned) > 1 else turned[0]

    def _cached(self, cache: str, name: str) -> str:
        """Return the rows of a cache for queries or keys; only padding may be outside of it."""
        table = self._inputs[cache]
        count = self._add("Shape", table, start=0, end=1)
        last = self._add("Sub", count, self._writer.ints(1))
        rows = self._add("Min", self._positions(name), last)
        if "query_start" in self._inputs:
            rows = self._add("Max", rows, self._writer.ints(0))
        return self._add("Gather", table, rows, axis=0)
