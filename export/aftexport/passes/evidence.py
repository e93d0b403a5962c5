"""What each token adds to the logit of the class that a document gets.

Where the head is linear and its input is a sum over the tokens, so is each logit:

    logits = scale * sum_t x[t] W + b = sum_t (scale * x[t] W) + b

whatever was done to the tokens before: masked, weighted by a softmax, or nothing. The summand of
the largest logit is put out beside the logits, exact for the last layer, and nothing of the model
is computed otherwise than before. It is the product of x[t] with the document's *direction*,
``scale * W`` of that class.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.contract import EVIDENCE
from aftexport.passes.token_flow import constants_of, is_reduction_over_tokens

DIRECTION = "evidence_direction"
"""Of a document, float32 ``[batch, D, 1]``."""

_IDS = "input_ids"
_LOGITS = "logits"
_PREFIX = "evidence_"


class NoEvidenceError(Exception):
    """What stands against it: the message."""


@dataclass(frozen=True)
class _Head:
    """``logits = pooled W + b``.

    Attributes:
        pooled: the value it takes, ``[batch, D]``.
        weight: the name of W, ``[D, classes]`` or, ``transposed``, ``[classes, D]``.
        offsets: b, ``[classes]``.
    """

    pooled: str
    weight: str
    transposed: bool
    offsets: NDArray[np.generic]


@dataclass(frozen=True)
class Summed:
    """What the head's input is the sum of.

    Attributes:
        tokens: the value, ``[batch, tokens, D]``.
        offsets: what the logit of each class has that comes of no token.
    """

    tokens: str
    offsets: tuple[float, ...]


def add_evidence(model: onnx.ModelProto) -> tuple[float, ...]:
    """Adds an output ``evidence``, float32 ``[batch, tokens]``, to a lowered graph, in place.

    Its sum over the tokens, and what is returned for the class of the largest logit, are that
    logit. Padding adds 0 where the model masks it.

    Args:
        model: see ``lowering.lower``: with the shapes of what is between, and bare operators.

    Returns:
        What the logit of each class has that comes of no token.

    Raises:
        NoEvidenceError: where the head is not linear, or does not take a sum over the tokens; the
            model is left as it is.
    """
    summed = add_direction(model)
    graph = model.graph
    graph.output.pop()
    graph.node.extend(products(summed.tokens))
    (batch_and_tokens,) = (_dims(value) for value in graph.input if value.name == _IDS)
    graph.output.append(
        onnx.helper.make_tensor_value_info(EVIDENCE, onnx.TensorProto.FLOAT, batch_and_tokens)
    )
    return summed.offsets


def add_direction(model: onnx.ModelProto) -> Summed:
    """Adds the output ``DIRECTION`` alone; see ``add_evidence``."""
    return _Finder(model).add()


def products(tokens: str) -> list[onnx.NodeProto]:
    """The nodes from ``tokens``, see ``Summed``, and the direction to the output ``evidence``."""
    make = onnx.helper.make_node
    wide, product, axis = (_PREFIX + step for step in ("tokens", "products", "last"))
    return [
        make("Cast", [tokens], [wide], to=onnx.TensorProto.FLOAT),
        make("MatMul", [wide, DIRECTION], [product]),
        make("Constant", [], [axis], value_ints=[-1]),
        make("Squeeze", [product, axis], [EVIDENCE]),
    ]


class _Finder:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = constants_of(model.graph)
        self.producers: dict[str, onnx.NodeProto] = {
            name: node for node in self.graph.node for name in node.output
        }
        described = (*self.graph.input, *self.graph.value_info, *self.graph.output)
        self.shapes = {value.name: _dims(value) for value in described}

    def add(self) -> Summed:
        head = self._head()
        total, factors = self._total_behind(head.pooled)
        if self.shapes.get(total.input[0], [])[:2] != self.shapes[_IDS]:
            raise NoEvidenceError(f"{total.op_type} ({total.output[0]}) is of other tokens")
        self.graph.node.extend(self._nodes(head, total, factors))
        self.graph.output.append(
            onnx.helper.make_tensor_value_info(DIRECTION, onnx.TensorProto.FLOAT, [None, None, 1])
        )
        return Summed(total.input[0], tuple(float(offset) for offset in head.offsets))

    def _head(self) -> _Head:
        node, offsets = self._made(_LOGITS), None
        if node.op_type == "Add":
            offsets = next((self.constants[n] for n in node.input if n in self.constants), None)
            inner = next((n for n in node.input if n not in self.constants), "")
            if offsets is None:
                raise NoEvidenceError("the head is not one linear layer")
            node = self._made(inner)
        settings = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        plain = settings.get("alpha", 1.0) == 1.0 and settings.get("beta", 1.0) == 1.0
        linear = node.op_type in ("Gemm", "MatMul") and plain and not settings.get("transA", 0)
        weight = self.constants.get(node.input[1]) if linear else None
        if weight is None or weight.ndim != 2:
            raise NoEvidenceError(f"the head ends in {node.op_type}, not in one linear layer")
        transposed = bool(settings.get("transB", 0))
        if len(node.input) > 2 and node.input[2]:
            if offsets is not None or node.input[2] not in self.constants:
                raise NoEvidenceError("the head is not one linear layer")
            offsets = self.constants[node.input[2]]
        classes = weight.shape[0 if transposed else 1]
        given = np.zeros(1) if offsets is None else offsets.ravel()
        if given.size not in (1, classes):
            raise NoEvidenceError("the head is not one linear layer")
        return _Head(node.input[0], node.input[1], transposed, np.broadcast_to(given, classes))

    def _total_behind(self, pooled: str) -> tuple[onnx.NodeProto, list[tuple[str, str]]]:
        """The sum or mean over the tokens; and what scales it for a document, the last first.

        A factor is the operator, Mul or Div, and the name of what it is done by.
        """
        factors: list[tuple[str, str]] = []
        while True:
            node = self._made(pooled)
            if is_reduction_over_tokens(node, self.constants):
                if len(self.shapes.get(pooled, ())) != 2:
                    raise NoEvidenceError(f"{node.op_type} ({pooled}) keeps an axis of tokens")
                return node, factors
            if node.op_type in ("Mul", "Div"):
                places = [1, 0] if node.op_type == "Mul" else [1]
                place = next((i for i in places if self._is_factor(node.input[i])), None)
                if place is None:
                    raise NoEvidenceError(f"{node.op_type} ({pooled}) is no scale of a document")
                factors.append((node.op_type, node.input[place]))
                pooled = node.input[1 - place]
            elif node.op_type in ("Cast", "Identity"):
                pooled = node.input[0]
            else:
                raise NoEvidenceError(
                    f"{node.op_type} ({pooled}) stands between the sum over the tokens and the head"
                )

    def _is_factor(self, name: str) -> bool:
        """Whether a value has one number for each document, or one for all."""
        shape = self.constants[name].shape if name in self.constants else self.shapes.get(name)
        return shape is not None and (len(shape) == 0 or shape[-1] == 1)

    def _made(self, name: str) -> onnx.NodeProto:
        if name not in self.producers:
            raise NoEvidenceError(f"{name} is no result of the tokens")
        return self.producers[name]

    def _nodes(
        self, head: _Head, total: onnx.NodeProto, factors: list[tuple[str, str]]
    ) -> Iterator[onnx.NodeProto]:
        """In float32: 16 bits have not what one token is of a long document."""
        make, wide = onnx.helper.make_node, onnx.TensorProto.FLOAT

        def named(step: str) -> str:
            return _PREFIX + step

        yield make("ArgMax", [_LOGITS], [named("class")], axis=1, keepdims=0)
        axis = 0 if head.transposed else 1
        yield make("Gather", [head.weight, named("class")], [named("row")], axis=axis)
        row = named("row")
        if not head.transposed:
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


def _dims(value: onnx.ValueInfoProto) -> list[str | int]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
