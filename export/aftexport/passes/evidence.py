"""The contribution of each token to the largest logit of a document.

If the head is linear and its input is a sum over the tokens, each logit is a sum over the tokens:

    logits = scale * sum_t x[t] W + b = sum_t (scale * x[t] W) + b

This holds for masked tokens and for tokens weighted by a softmax too. The graph returns the
summands of the largest logit beside the logits. They are exact for the last layer, and the
computation of the logits does not change. A summand is the product of x[t] with the document's
*direction*, ``scale * W`` of that class.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.contract import EVIDENCE, LOGITS
from aftexport.passes.graph_values import constants_of, dims_of, main_input_of
from aftexport.passes.token_reductions import is_reduction_over_tokens

DIRECTION = "evidence_direction"
"""The output with the direction of each document, float32 ``[batch, D, 1]``."""

_PREFIX = "evidence_"


class NoEvidence(Exception):  # noqa: N818 (an outcome, not an error)
    """The reason why a graph cannot return evidence, as its message."""


@dataclass(frozen=True)
class _Head:
    """A linear head, ``logits = pooled W + b``.

    Attributes:
        pooled: the name of its input, ``[batch, D]``.
        weight: the name of W, ``[D, classes]`` or, if ``is_transposed``, ``[classes, D]``.
        is_transposed: whether W is transposed.
        offsets: b, ``[classes]``.
    """

    pooled: str
    weight: str
    is_transposed: bool
    offsets: NDArray[np.generic]


@dataclass(frozen=True)
class Summed:
    """The summands of the head's input.

    Attributes:
        tokens: the name of the summed value, ``[batch, tokens, D]``.
        offsets: the part of each class's logit that does not depend on the tokens.
    """

    tokens: str
    offsets: tuple[float, ...]


def add_evidence(model: onnx.ModelProto, output: str = LOGITS) -> tuple[float, ...]:
    """Add an output ``evidence``, float32 ``[batch, tokens]``, to a lowered graph, in place.

    The sum of the evidence over the tokens, plus the returned offset of the largest logit's class,
    is that logit. Padding adds 0 if the model masks it.

    Args:
        model: the result of ``lowering.lower``, with the shapes of intermediate values and bare
            operators.
        output: the output whose largest number is explained, ``[batch, classes]``.

    Returns:
        The part of each class's logit that does not depend on the tokens.

    Raises:
        NoEvidence: if the head is not linear, or its input is not a sum over the tokens; the
            model stays unchanged.
    """
    summed = add_direction(model, output)
    graph = model.graph
    graph.output.pop()
    graph.node.extend(products(summed.tokens))
    axes = dims_of(graph)[main_input_of(graph)][:2]
    graph.output.append(onnx.helper.make_tensor_value_info(EVIDENCE, onnx.TensorProto.FLOAT, axes))
    return summed.offsets


def add_direction(model: onnx.ModelProto, output: str = LOGITS) -> Summed:
    """Add only the output ``DIRECTION``; see ``add_evidence``."""
    return _Finder(model, output).add()


def explained_output(model: onnx.ModelProto) -> str:
    """Return the name of the output that evidence explains, the first for documents.

    Raises:
        NoEvidence: if every output is for tokens.
    """
    for value in model.graph.output:
        if len(value.type.tensor_type.shape.dim) == 2:
            return str(value.name)
    raise NoEvidence("every output is for tokens")


def products(tokens: str) -> list[onnx.NodeProto]:
    """Return the nodes that compute the output ``evidence`` from the direction.

    Args:
        tokens: the name of the summed value, see ``Summed``.
    """
    make = onnx.helper.make_node
    wide, product, axis = (_PREFIX + step for step in ("tokens", "products", "last"))
    return [
        make("Cast", [tokens], [wide], to=onnx.TensorProto.FLOAT),
        make("MatMul", [wide, DIRECTION], [product]),
        make("Constant", [], [axis], value_ints=[-1]),
        make("Squeeze", [product, axis], [EVIDENCE]),
    ]


class _Finder:
    def __init__(self, model: onnx.ModelProto, output: str) -> None:
        self.output = output
        self.graph = model.graph
        self.constants = constants_of(model.graph)
        self.producers: dict[str, onnx.NodeProto] = {
            name: node for node in self.graph.node for name in node.output
        }
        self.shapes = dims_of(self.graph)

    def add(self) -> Summed:
        head = self._head()
        total, factors = self._total_behind(head.pooled)
        if self.shapes.get(total.input[0], [])[:2] != self.shapes[main_input_of(self.graph)][:2]:
            raise NoEvidence(f"{total.op_type} ({total.output[0]}) does not sum the input's tokens")
        self.graph.node.extend(self._nodes(head, total, factors))
        self.graph.output.append(
            onnx.helper.make_tensor_value_info(DIRECTION, onnx.TensorProto.FLOAT, [None, None, 1])
        )
        return Summed(total.input[0], tuple(float(offset) for offset in head.offsets))

    def _head(self) -> _Head:
        node, offsets = self._producer(self.output), None
        if node.op_type == "Add":
            offsets = next((self.constants[n] for n in node.input if n in self.constants), None)
            inner = next((n for n in node.input if n not in self.constants), "")
            if offsets is None:
                raise NoEvidence("the head is not one linear layer")
            node = self._producer(inner)
        settings = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        is_plain = settings.get("alpha", 1.0) == 1.0 and settings.get("beta", 1.0) == 1.0
        is_product = node.op_type in ("Gemm", "MatMul")
        is_linear = is_product and is_plain and not settings.get("transA", 0)
        weight = self.constants.get(node.input[1]) if is_linear else None
        if weight is None or weight.ndim != 2:
            raise NoEvidence(f"the head ends in {node.op_type}, not in one linear layer")
        is_transposed = bool(settings.get("transB", 0))
        if len(node.input) > 2 and node.input[2]:
            if offsets is not None or node.input[2] not in self.constants:
                raise NoEvidence("the head is not one linear layer")
            offsets = self.constants[node.input[2]]
        classes = weight.shape[0 if is_transposed else 1]
        bias = np.zeros(1) if offsets is None else offsets.ravel()
        if bias.size not in (1, classes):
            raise NoEvidence("the head is not one linear layer")
        return _Head(node.input[0], node.input[1], is_transposed, np.broadcast_to(bias, classes))

    def _total_behind(self, pooled: str) -> tuple[onnx.NodeProto, list[tuple[str, str]]]:
        """Return the sum or mean over the tokens, and its factors per document, the last one first.

        A factor is the operator, Mul or Div, and the name of its other operand.
        """
        factors: list[tuple[str, str]] = []
        while True:
            node = self._producer(pooled)
            if is_reduction_over_tokens(node, self.constants):
                if len(self.shapes.get(pooled, ())) != 2:
                    raise NoEvidence(f"{node.op_type} ({pooled}) keeps an axis of tokens")
                return node, factors
            if node.op_type in ("Mul", "Div"):
                places = [1, 0] if node.op_type == "Mul" else [1]
                place = next((i for i in places if self._is_factor(node.input[i])), None)
                if place is None:
                    raise NoEvidence(
                        f"{node.op_type} ({pooled}) does not scale by one number per document"
                    )
                factors.append((node.op_type, node.input[place]))
                pooled = node.input[1 - place]
            elif node.op_type in ("Cast", "Identity"):
                pooled = node.input[0]
            else:
                raise NoEvidence(
                    f"{node.op_type} ({pooled}) is between the sum over the tokens and the head"
                )

    def _is_factor(self, name: str) -> bool:
        """Return whether a value has one number for each document, or one for all."""
        shape = self.constants[name].shape if name in self.constants else self.shapes.get(name)
        return shape is not None and (len(shape) == 0 or shape[-1] == 1)

    def _producer(self, name: str) -> onnx.NodeProto:
        if name not in self.producers:
            raise NoEvidence(f"{name} is not computed from the tokens")
        return self.producers[name]

    def _nodes(
        self, head: _Head, total: onnx.NodeProto, factors: list[tuple[str, str]]
    ) -> Iterator[onnx.NodeProto]:
        """Yield the nodes of the direction, in float32.

        16 bits cannot represent the share of one token in a long document.
        """
        make, wide = onnx.helper.make_node, onnx.TensorProto.FLOAT

        def named(step: str) -> str:
            return _PREFIX + step

        yield make("ArgMax", [self.output], [named("class")], axis=1, keepdims=0)
        axis = 0 if head.is_transposed else 1
        yield make("Gather", [head.weight, named("class")], [named("row")], axis=axis)
        row = named("row")
        if not head.is_transposed:
            row = named("column")
            yield make("Transpose", [named("row")], [row], perm=[1, 0])
        value = named("weight")
        yield make("Cast", [row], [value], to=wide)
        if total.op_type == "ReduceMean":
            yield make("Shape", [total.input[0]], [named("count")], start=1, end=2)
            factors = [*factors, ("Div", named("count"))]
        for place, (operator, factor) in enumerate(factors):
            scaled = named(f"scaled_{place}")
            yield make("Cast", [factor], [named(f"factor_{place}")], to=wide)
            yield make(operator, [value, named(f"factor_{place}")], [scaled])
            value = scaled
        yield make("Constant", [], [named("axis")], value_ints=[-1])
        yield make("Unsqueeze", [value, named("axis")], [DIRECTION])
