"""Graphs whose formulas grow with each step: chains of products, sums and softmaxes."""

from collections.abc import Callable

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import helper, numpy_helper

WIDTH = 4
Chain = Callable[["Graph", str], str]
"""One step of a chain, from the name of a value to that of another."""


class Graph:
    """Nodes that are added one by one; the input is ``x [batch, tokens, WIDTH]``."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def op(self, op_type: str, *inputs: str, **attributes: object) -> str:
        name = f"{op_type.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, list(inputs), [name], **attributes))
        return name

    def constant(self, array: ArrayLike, dtype: type = np.float32) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def linear(self, x: str) -> str:
        weight = self.constant(self._random.standard_normal((WIDTH, WIDTH)) / WIDTH)
        return self.op("Add", self.op("MatMul", x, weight), self.constant(np.ones(WIDTH)))

    def transposed(self, x: str) -> str:
        return self.op("Transpose", x, perm=[0, 2, 1])

    def total(self, x: str, axis: int) -> str:
        return self.op("ReduceSum", x, self.constant([axis], np.int64))

    def aft_simple(self, x: str) -> str:
        """A mechanism of the operators."""
        query, key, value = (self.linear(x) for _ in range(3))
        mean = self.total(self.op("Mul", self.op("Softmax", key, axis=1), value), 1)
        return self.op("Mul", self.op("Sigmoid", query), mean)

    def model(self, output: str) -> onnx.ModelProto:
        inputs, outputs = (
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            for name, shape in (("x", ["batch", "tokens", WIDTH]), (output, None))
        )
        graph = helper.make_graph(self._nodes, "chain", [inputs], [outputs], self._constants)
        opset = helper.make_opsetid("", 18)
        return helper.make_model(graph, opset_imports=[opset], ir_version=9)


def model_of(chain: Chain, depth: int) -> onnx.ModelProto:
    """A mechanism, the chain of some steps, and the mechanism once more."""
    graph = Graph()
    value = graph.aft_simple("x")
    for _ in range(depth):
        value = chain(graph, value)
    return graph.model(graph.aft_simple(value))


def _product_of_sums(g: Graph, x: str) -> str:
    return g.op("Mul", g.op("Add", x, "x"), g.op("Sub", x, g.constant(0.5)))


def _square(g: Graph, x: str) -> str:
    return g.op("Add", g.op("Mul", x, x), x)


def _matrix_square(g: Graph, x: str) -> str:
    return g.op("MatMul", x, g.op("MatMul", g.transposed(x), x))


def _pseudo_inverse(g: Graph, x: str) -> str:
    """A step towards the inverse of a constant, as in Nyström attention."""
    x = g.op("MatMul", g.transposed(x), x)
    product = g.op("MatMul", x, x)
    inner = product
    for number in (7.0, 15.0, 13.0):
        inner = g.op("Sub", g.constant(number * np.eye(WIDTH)), inner)
        inner = g.op("MatMul", product, inner) if number != 13.0 else inner
    return g.op("MatMul", "x", g.op("MatMul", g.op("Mul", g.constant(0.25), x), inner))


def _softmax(g: Graph, x: str) -> str:
    return g.op("Softmax", g.op("Mul", x, g.op("Softmax", x, axis=1)), axis=2)


def _softmax_product(g: Graph, x: str) -> str:
    scores = g.op("MatMul", x, g.transposed(x))
    return g.op("MatMul", g.op("Softmax", scores, axis=2), x)


def _polynomial(g: Graph, x: str) -> str:
    return g.op("Add", g.op("Mul", x, "x"), g.constant(0.5))


def _quotient(g: Graph, x: str) -> str:
    return g.op("Div", x, g.op("Add", g.op("Mul", x, x), g.constant(1.0)))


def _residual(g: Graph, x: str) -> str:
    return g.op("Add", x, g.linear(g.op("Relu", g.linear(x))))


def _normed_residual(g: Graph, x: str) -> str:
    axis = g.constant([2], np.int64)
    centered = g.op("Sub", x, g.op("ReduceMean", x, axis))
    variance = g.op("ReduceMean", g.op("Mul", centered, centered), axis)
    normed = g.op("Div", centered, g.op("Sqrt", g.op("Add", variance, g.constant(1e-5))))
    return _residual(g, normed)


def _elementwise(g: Graph, x: str) -> str:
    return g.op("Tanh", g.op("Abs", g.op("Sigmoid", x)))


def _sliced(g: Graph, x: str) -> str:
    padded = g.op("Pad", g.op("Exp", x), g.constant([0, 1, 0, 0, 0, 0], np.int64))
    ends = [g.constant([n], np.int64) for n in (0, -1, 1)]
    return g.op("Log", g.op("Slice", padded, *ends))


def _first_column(g: Graph, x: str) -> str:
    """Column by column, as the rows of a triangular matrix are solved."""
    column = g.op("Slice", x, *(g.constant([n], np.int64) for n in (0, 1, 2)))
    return g.op("Add", x, g.op("Mul", column, x))


def _reshaped(g: Graph, x: str) -> str:
    halves = g.op("Reshape", x, g.constant([0, 0, 2, WIDTH // 2], np.int64))
    whole = g.op("Reshape", halves, g.constant([0, 0, WIDTH], np.int64))
    return g.op("Mul", whole, g.op("Tanh", whole))


def _chosen(g: Graph, x: str) -> str:
    return g.op("Where", g.op("Greater", x, g.constant(0.0)), x, g.op("Mul", x, g.op("Exp", x)))


def _wide_sum(g: Graph, x: str) -> str:
    scaled = (g.op("Mul", x, g.constant(n)) for n in np.linspace(0.1, 1.0, 12))
    return g.op("Sum", *(g.op("Exp", y) for y in scaled))


def _attention(g: Graph, x: str) -> str:
    """Linear attention of relu features, which is one of the operators."""
    features = g.op("Relu", x)
    pooled = g.op("MatMul", g.transposed(features), x)
    normalizer = g.op("MatMul", features, g.transposed(g.total(features, 1)))
    return g.op("Div", g.op("MatMul", features, pooled), g.op("Add", normalizer, g.constant(1e-6)))


CHAINS: dict[str, Chain] = {
    name.removeprefix("_"): step
    for name, step in list(globals().items())
    if name.startswith("_") and callable(step)
}
