"""The memory and the products of a run, predicted from the graph at the length of a document."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.system.contract import MAX_TOKENS
from aftexport.system.onnx_files import without_weights

_FIRST_TOKENS = 32
_LENGTH_RATIO = 4
"""Ratio of the lengths at which the graph is evaluated."""
_MAX_KNOWN = 64
"""Maximum number of elements of a tensor whose values are computed: shapes, bounds and sizes."""
_MARGIN = 1.6
"""Factor for the blocks of the runtime's arena, which are larger than the tensors in them."""
_WIDENED = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
"""Types that the runtime computes in float32 on a CPU."""
_MAX_PANEL = 32
"""Floats of two of the widest vectors: SoftmaxAttention pads the values of a head to a multiple."""
_VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
"""Operators whose output is in the memory of their first input."""
_COMPUTED = {
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "Constant",
    "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Gather", "Greater", "GreaterOrEqual",
    "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pad", "Pow",
    "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Sign",
    "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip
"""Operators in computations of shapes."""
_Array = NDArray[Any]


@dataclass(frozen=True)
class PeakMemory:
    """The predicted memory of the tensors of a run, without the weights."""

    # lengths of a document, and the bytes of each, in growing order
    points: Sequence[tuple[int, int]]
    token_bytes: int = 0  # the least for each token, of a model that runs in chunks

    def bytes_of(self, tokens: int, documents: int = 1) -> int:
        """Return the bytes of a run of documents, each padded to ``tokens``.

        Between two points, the logarithm of the bytes is linear in that of the length. For sums of
        powers of the length with positive factors, this is never too little.
        """
        above = bisect_left(self.points, tokens, key=itemgetter(0))
        above = min(max(above, 1), len(self.points) - 1)
        (short, few), (long, many) = self.points[max(above - 1, 0)], self.points[above]
        power = math.log(many / few) / math.log(long / short) if long > short else 0.0
        size = float(few * (tokens / short) ** power)
        # Below the first point, the memory of that point.
        return documents * max(self.points[0][1], math.ceil(size), tokens * self.token_bytes)

    def fits(self, budget: int, documents: int, tokens: int) -> bool:
        """Return whether a run of documents, each padded to ``tokens``, fits the budget."""
        return self.bytes_of(tokens, documents) <= budget

    def longest(self, budget: int, max_tokens: int = MAX_TOKENS) -> int:
        """Return the maximum length of a document whose run fits, at least 1."""
        return max(1, bisect_left(range(max_tokens + 1), budget + 1, key=self.bytes_of) - 1)


def predict_memory(
    path: Path, max_tokens: int | None = None, *, fused: bool, token_bytes: int = 0
) -> PeakMemory:
    """Predict the memory of the runs of a model for one document, by the shapes of all tensors.

    A tensor is in memory from the node that computes it to the last one that reads it. A dimension
    that depends on values counts as the length of the document. A kernel of our operators counts
    its outputs twice, as its workspace, or its packed keys and values. Peaks of ONNX Runtime on
    the CPU, each in an empty arena, were between 0.35 of the prediction and all of it.
    """
    model, weights = _without_weights(onnx.load(path, load_external_data=False))
    kept = [(f.domain, f.name) for f in model.functions if fused and f.domain == DOMAIN]
    # The inliner removes the functions that it inlines.
    model = onnx.inliner.inline_selected_functions(model, kept, exclude=True)
    # Longer documents than the longest might not fit its tables of positions.
    longest = min(max_tokens or MAX_TOKENS, MAX_TOKENS)
    lengths = [min(_FIRST_TOKENS, longest)]
    while lengths[-1] < longest:
        lengths.append(min(lengths[-1] * _LENGTH_RATIO, longest))
    points = [(n, math.ceil(_MARGIN * _Run(model, weights, n).peak())) for n in lengths]
    return PeakMemory(points, token_bytes)


def product_shares(model: onnx.ModelProto, tokens: int) -> dict[str, float]:
    """Return the share of each precision in the multiply-adds of a document, the largest first.

    A kernel of our operators counts the products of its body.
    """
    run = _Run(*_without_weights(model), tokens)
    run.peak()
    total = max(1, run.products.total())
    return {name: count / total for name, count in run.products.most_common() if count}


@dataclass(frozen=True)
class _Scope:
    """What is known of the values of a graph."""

    types: dict[str, onnx.TypeProto] = field(default_factory=dict)
    # content of small ones that depend on no input
    values: dict[str, _Array] = field(default_factory=dict)


class _Run:
    """The run of a model on one document of a certain length."""

    def __init__(
        self, model: onnx.ModelProto, weights: Mapping[str, onnx.TypeProto], tokens: int
    ) -> None:
        self._model = model
        self._weights = weights
        self._tokens = tokens
        self._precision = "fp32"  # of the kernel whose body is visited
        self.products = Counter[str]()  # multiply-adds by precision

    def peak(self) -> int:
        """Return the maximum bytes of the tensors that are in memory at a time."""
        graph = self._model.graph
        weights = {*self._weights, *(tensor.name for tensor in graph.initializer)}
        inputs = {
            value.name: self._concrete(value.type, first=1)
            for value in graph.input
            if value.name not in weights
        }
        return self._graph_peak(graph, _Scope({**self._weights, **inputs}), list(inputs))

    def _graph_peak(self, graph: onnx.GraphProto, scope: _Scope, inputs: Sequence[str]) -> int:
        """Return the peak of a graph, without the values of outer graphs and the weights."""
        for tensor in graph.initializer:
            kind = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
            scope.types[tensor.name] = kind
            if math.prod(tensor.dims) <= _MAX_KNOWN:
                scope.values[tensor.name] = onnx.numpy_helper.to_array(tensor)
        buffers, last = {name: name for name in inputs}, dict[str, int]()
        for number, node in enumerate(graph.node):
            if node.op_type in _VIEWS and node.input[0] in buffers:
                buffers[node.output[0]] = buffers[node.input[0]]
            else:
                buffers |= {name: name for name in node.output if name}
            for name in _reads(node):
                if name in buffers:
                    last[buffers[name]] = number
        # The caller holds the inputs until the end.
        kept = {*inputs, *(buffers[one.name] for one in graph.output if one.name in buffers)}
        live = {name: _bytes_of(scope.types[name]) for name in inputs}
        peak = sum(live.values())
        for number, node in enumerate(graph.node):
            inner = self._advance(node, scope)
            live |= {
                name: _bytes_of(scope.types[name])
                for name in node.output
                if buffers.get(name) == name
            }
            peak = max(peak, sum(live.values()) + inner + _workspace(node, scope.types))
            for name in {
                buffers[name] for name in (*_reads(node), *node.output) if name in buffers
            }:
                if last.get(name, -1) <= number and name not in kept:
                    live.pop(name, None)
        return peak

    def _advance(self, node: onnx.NodeProto, scope: _Scope) -> int:
        """Note the types and values of a node's outputs; return the peak of its subgraphs."""
        inner, found = 0, dict[str, onnx.TypeProto]()
        if node.domain == DOMAIN:
            found = self._body_types(node, scope)
        elif graphs := _subgraphs(node):
            for graph in graphs:
                peak, types = self._subgraph(node, graph, scope)
                inner = max(inner, peak)
                found = {**types, **found}
        else:
            found = self._inferred(node, scope)
        largest = max(
            (scope.types[name] for name in _reads(node) if name in scope.types),
            key=_bytes_of,
            default=onnx.TypeProto(),
        )
        for name in filter(None, node.output):
            # An operator without rules: as large as the largest tensor that it reads.
            scope.types[name] = self._concrete(found.get(name, largest))
        self.products[self._precision] += _multiply_adds(node, scope.types)
        self._compute(node, scope)
        return inner

    def _subgraph(
        self, node: onnx.NodeProto, graph: onnx.GraphProto, scope: _Scope
    ) -> tuple[int, dict[str, onnx.TypeProto]]:
        """Return the peak of a branch or a body, and the types of the node's outputs by it."""
        numbers = {one.name: one.i for one in node.attribute}
        axes = {one.name: list(one.ints) for one in node.attribute}
        inner = _Scope(dict(scope.types), dict(scope.values))
        states = len(node.input)
        if node.op_type == "Scan":
            states -= numbers["num_scan_inputs"]
        for place, (value, name) in enumerate(zip(graph.input, node.input, strict=False)):
            shape = list(_shape(scope.types[name])) if name in scope.types else []
            if place >= states and shape:
                del shape[(axes.get("scan_input_axes") or [0] * len(shape))[place - states]]
            kind = value.type.tensor_type.elem_type
            inner.types[value.name] = onnx.helper.make_tensor_type_proto(kind, shape)
        before = self.products.copy()
        peak = self._graph_peak(graph, inner, [value.name for value in graph.input])
        outputs = [inner.types[value.name] for value in graph.output]
        if node.op_type == "If":
            return peak, dict(zip(node.output, outputs, strict=False))
        if node.op_type == "Loop":
            outputs, states = outputs[1:], states - 2
            steps = int(scope.values.get(node.input[0], np.array(self._tokens)))
        else:
            scanned = _shape(scope.types[node.input[states]]) or (self._tokens,)
            steps = scanned[(axes.get("scan_input_axes") or [0])[0]]
        self.products = before + Counter(
            {name: steps * (n - before[name]) for name, n in self.products.items()}
        )
        for place in range(states, len(outputs)):
            kind = outputs[place].tensor_type.elem_type
            shape = [steps, *_shape(outputs[place])]
            outputs[place] = onnx.helper.make_tensor_type_proto(kind, shape)
        return peak, dict(zip(node.output, outputs, strict=False))

    def _body_types(self, node: onnx.NodeProto, scope: _Scope) -> dict[str, onnx.TypeProto]:
        """Return the types of the outputs of a kernel, by the function that it replaces."""
        bare = onnx.NodeProto()
        bare.CopyFrom(node)
        inlined = onnx.inliner.inline_local_functions(self._single(bare, scope))
        inner = _Scope(dict(scope.types), dict(scope.values))
        chosen = (one.s.decode() for one in node.attribute if one.name == "precision")
        self._precision = next(chosen, "fp32")
        self._graph_peak(inlined.graph, inner, ())
        self._precision = "fp32"
        return {name: inner.types[name] for name in node.output if name in inner.types}

    def _inferred(self, node: onnx.NodeProto, scope: _Scope) -> dict[str, onnx.TypeProto]:
        """Return the types of a node's outputs by the rules of its operator."""
        found = onnx.shape_inference.infer_shapes(self._single(node, scope), data_prop=True)
        return {
            one.name: one.type
            for one in found.graph.output
            if one.type.tensor_type.HasField("shape") or not one.type.HasField("tensor_type")
        }

    def _single(self, node: onnx.NodeProto, scope: _Scope) -> onnx.ModelProto:
        """Return a model of one node, with what is known of its inputs."""
        names = {name for name in _reads(node) if name in scope.types}
        graph = onnx.GraphProto(name="node", node=[node])
        graph.input.extend(onnx.ValueInfoProto(name=n, type=scope.types[n]) for n in sorted(names))
        graph.initializer.extend(
            onnx.numpy_helper.from_array(scope.values[name], name)
            for name in sorted(names & scope.values.keys())
        )
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
        single = onnx.ModelProto(ir_version=self._model.ir_version, graph=graph)
        single.opset_import.extend(self._model.opset_import)
        if node.domain == DOMAIN:
            single.functions.extend(self._model.functions)
        return single

    def _compute(self, node: onnx.NodeProto, scope: _Scope) -> None:
        """Compute the outputs of a node that only depend on the length, if they are small."""
        read = [name for name in node.input if name]
        if node.op_type in ("Shape", "Size") and read[0] in scope.types:
            shape = _shape(scope.types[read[0]])
            values = {read[0]: np.broadcast_to(np.int8(0), shape)}
        elif node.op_type in _COMPUTED and all(name in scope.values for name in read):
            values = {name: scope.values[name] for name in read}
        else:
            return
        if node.domain or any(math.prod(_shape(scope.types[n])) > _MAX_KNOWN for n in node.output):
            return
        function = onnx.helper.make_function(
            "local", "node", read, list(node.output), [node], self._model.opset_import
        )
        try:
            outputs = ReferenceEvaluator(function).run(None, values, {})
        except Exception:  # any, as NumPy has them for sizes that follow from a guessed dimension
            return
        for name, output in zip(node.output, outputs, strict=True):
            array = np.asarray(output)
            scope.values[name] = array
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            scope.types[name] = onnx.helper.make_tensor_type_proto(kind, array.shape)

    def _concrete(self, given: onnx.TypeProto, first: int | None = None) -> onnx.TypeProto:
        """Return a type whose unknown dimensions are the length, the first one ``first``."""
        found = onnx.TypeProto()
        found.CopyFrom(given)
        for place, dim in enumerate(found.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                dim.dim_value = self._tokens if place or first is None else first
        return found


def _without_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TypeProto]]:
    """Return a model without its large or external initializers, and the types of these."""
    bare, count = without_weights(model, _MAX_KNOWN), len(model.graph.input)
    weights = {value.name: value.type for value in bare.graph.input[count:]}
    del bare.graph.input[count:]
    return bare, weights


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [one.g for one in node.attribute if one.type == onnx.AttributeProto.GRAPH]


def _reads(node: onnx.NodeProto) -> set[str]:
    """Return the values that a node reads, those of its subgraphs included."""
    names = {name for name in node.input if name}
    for graph in _subgraphs(node):
        own = {value.name for value in graph.input}
        for inner in graph.node:
            names |= _reads(inner) - own
            own |= set(inner.output)
        names |= {value.name for value in graph.output} - own
    return names


def _shape(given: onnx.TypeProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in given.tensor_type.shape.dim)


def _bytes_of(given: onnx.TypeProto) -> int:
    """Return the bytes of a tensor; 0 for values that are not tensors."""
    if not given.tensor_type.elem_type:
        return 0
    kind = given.tensor_type.elem_type
    item = 4 if kind in _WIDENED else onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
    return item * math.prod(_shape(given))


def _workspace(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> int:
    """Return the bytes that a kernel of the runtime takes beside its inputs and outputs."""
    read = [name for name in node.input if name]
    output = _bytes_of(types[node.output[0]])
    match node.op_type:
        case _ if node.domain == DOMAIN:
            if operator_name(node.op_type) == "SoftmaxAttention":
                return _packed_keys(node, types)
            return sum(_bytes_of(types[name]) for name in node.output if name)
        case "Where":  # both choices are spread over the condition before they are merged
            chosen = [(_shape(types[read[0]]), _shape(types[name])) for name in read[1:]]
            items = output // max(1, math.prod(_shape(types[node.output[0]])))
            return items * sum(_spread_items(*pair) for pair in chosen)
        case "Softmax" | "LogSoftmax" | "Hardmax":  # over an inner axis, between two transpositions
            axis = next((one.i for one in node.attribute if one.name == "axis"), -1)
            return 0 if axis in (-1, len(_shape(types[read[0]])) - 1) else 2 * output
        case "Einsum":
            return output + sum(_bytes_of(types[name]) for name in read)
        case "Attention" | "MultiHeadAttention":  # the scores of all heads, twice
            numbers = {one.name: one.i for one in node.attribute}
            query, key = (_shape(types[name]) for name in (read[0], read[min(1, len(read) - 1)]))
            heads = query[1] if len(query) == 4 else 0
            heads = heads or numbers.get("q_num_heads", 0) or numbers.get("num_heads", 1)
            return 8 * query[0] * heads * query[-2] * key[-2]
        case "Conv" | "ConvTranspose":  # the windows of the input, side by side
            return _bytes_of(types[read[0]]) * math.prod(_shape(types[read[1]])[2:])
        case "LSTM" | "GRU" | "RNN":  # the gates of all tokens
            return 4 * sum(_bytes_of(types[name]) for name in node.output if name)
        case _:
            return 0


def _multiply_adds(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> int:
    """Return the multiply-adds of a standard operator for products; 0 for others."""
    if node.domain or node.op_type not in ("MatMul", "Gemm", "Einsum", "Conv"):
        return 0
    shapes = [_shape(types[name]) if name in types else () for name in node.input if name]
    if not all(shapes):  # the rank is unknown
        return 0
    output = math.prod(_shape(types[node.output[0]]))
    match node.op_type:
        case "MatMul":
            return output * shapes[0][-1]
        case "Gemm":
            is_turned = any(one.name == "transA" and one.i for one in node.attribute)
            return output * shapes[0][0 if is_turned else 1]
        case "Conv":
            return output * math.prod(shapes[1][1:])
        case _:
            equation = next(one.s.decode() for one in node.attribute if one.name == "equation")
            terms, _, result = equation.replace(" ", "").replace("...", "").partition("->")
            pairs = zip(terms.split(","), shapes, strict=True)
            sizes = {
                axis: n
                for term, shape in pairs
                for axis, n in zip(term[::-1], shape[::-1], strict=False)
            }
            return output * math.prod(n for axis, n in sizes.items() if axis not in result)


def _packed_keys(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> int:
    """Return the bytes of the keys and values that SoftmaxAttention packs, in float32."""
    numbers = {one.name: one.i for one in node.attribute}
    heads = int(numbers.get("kv_num_heads", 0) or numbers["num_heads"])
    key, value = (_shape(types[name]) for name in node.input[1:3])
    return 4 * key[0] * key[1] * packed_width(heads, key[2], value[2])


def packed_width(kv_heads: int, key: int, value: int) -> int:
    """Return the numbers that SoftmaxAttention packs of a token's key and value, of all heads."""
    return key + kv_heads * math.ceil(value / kv_heads / _MAX_PANEL) * _MAX_PANEL


def _spread_items(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the elements of two shapes that are broadcast to each other."""
    pairs = zip_longest(reversed(one), reversed(other), fillvalue=1)
    return math.prod(max(pair) for pair in pairs)
