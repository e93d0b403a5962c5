"""Outputs of a graph that are linear in a sum over the tokens of a document."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.passes.graph_values import constants_of, dims_of, main_input_of
from aftexport.passes.token_reductions import is_reduction_over_tokens


class NoEvidence(Exception):  # noqa: N818 (an outcome, not an error)
    """The reason why a graph cannot return evidence, as its message."""


@dataclass(frozen=True)
class Factor:
    """A factor per document between the sum and the head.

    Attributes:
        operator: ``Mul`` or ``Div``.
        name: the name of the operator's other operand.
        rank: the number of axes of that operand.
    """

    operator: str
    name: str
    rank: int


@dataclass(frozen=True)
class LinearHead:
    """A linear head, ``logits = pooled W + b``.

    Attributes:
        output: the name of the logits.
        pooled: the name of its input, ``[batch, D]``.
        weight: the name of W, ``[D, classes]`` or, if ``is_transposed``, ``[classes, D]``.
        is_transposed: whether W is transposed.
        offsets: b, ``[classes]``.
    """

    output: str
    pooled: str
    weight: str
    is_transposed: bool
    offsets: NDArray[np.generic]


@dataclass(frozen=True)
class TokenSum:
    """A sum or mean over the tokens of a document, scaled by one number per document.

    Attributes:
        tokens: the name of the summed value, ``[batch, tokens, D]``.
        result: the name of the sum or mean.
        is_mean: whether it is a mean.
        factors: the factors after it, the last one first.
    """

    tokens: str
    result: str
    is_mean: bool
    factors: tuple[Factor, ...]


class SummedHeads:
    """The search for linear heads of sums over the tokens.

    Args:
        model: a lowered graph with the shapes of intermediate values and bare operators.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._constants = constants_of(model.graph)
        self._producers: dict[str, onnx.NodeProto] = {
            name: node for node in self._graph.node for name in node.output
        }
        self._shapes = dims_of(self._graph)

    @property
    def documents(self) -> Sequence[str]:
        """The outputs per document."""
        return [value.name for value in self._graph.output if len(self._shapes[value.name]) == 2]

    def find(self, output: str) -> tuple[LinearHead, TokenSum]:
        """Return the head of an output ``[batch, classes]``, and the sum that it is linear in.

        Raises:
            NoEvidence: if the output has no such head.
        """
        head = self._head(output)
        total = self._total_behind(head.pooled)
        if self._shapes.get(total.tokens, [])[:2] != self._shapes[main_input_of(self._graph)][:2]:
            operator = self._producers[total.result].op_type
            raise NoEvidence(f"{operator} ({total.result}) does not sum the input's tokens")
        return head, total

    def _head(self, output: str) -> LinearHead:
        node, offsets = self._producer(output), None
        if node.op_type == "Add":
            constants = self._constants
            offsets = next((constants[n] for n in node.input if n in constants), None)
            inner = next((n for n in node.input if n not in constants), "")
            if offsets is None:
                raise NoEvidence("the head is not one linear layer")
            node = self._producer(inner)
        settings = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        is_plain = settings.get("alpha", 1.0) == 1.0 and settings.get("beta", 1.0) == 1.0
        is_product = node.op_type in ("Gemm", "MatMul")
        is_linear = is_product and is_plain and not settings.get("transA", 0)
        weight = self._constants.get(node.input[1]) if is_linear else None
        if weight is None or weight.ndim != 2:
            raise NoEvidence(f"the head ends in {node.op_type}, not in one linear layer")
        is_transposed = bool(settings.get("transB", 0))
        if len(node.input) > 2 and node.input[2]:
            if offsets is not None or node.input[2] not in self._constants:
                raise NoEvidence("the head is not one linear layer")
            offsets = self._constants[node.input[2]]
        classes = weight.shape[0 if is_transposed else 1]
        bias = np.zeros(1) if offsets is None else offsets.ravel()
        if bias.size not in (1, classes):
            raise NoEvidence("the head is not one linear layer")
        offsets = np.broadcast_to(bias, classes)
        return LinearHead(output, node.input[0], node.input[1], is_transposed, offsets)

    def _total_behind(self, pooled: str) -> TokenSum:
        factors: list[Factor] = []
        while True:
            node = self._producer(pooled)
            if is_reduction_over_tokens(node, self._constants):
                if len(self._shapes.get(pooled, ())) != 2:
                    raise NoEvidence(f"{node.op_type} ({pooled}) keeps an axis of tokens")
                is_mean = node.op_type == "ReduceMean"
                return TokenSum(node.input[0], pooled, is_mean, tuple(factors))
            if node.op_type in ("Mul", "Div"):
                places = [1, 0] if node.op_type == "Mul" else [1]
                place = next((i for i in places if self._is_factor(node.input[i])), None)
                if place is None:
                    raise NoEvidence(
                        f"{node.op_type} ({pooled}) does not scale by one number per document"
                    )
                name = node.input[place]
                factors.append(Factor(node.op_type, name, len(self._shape(name) or ())))
                pooled = node.input[1 - place]
            elif node.op_type in ("Cast", "Identity"):
                pooled = node.input[0]
            else:
                raise NoEvidence(
                    f"{node.op_type} ({pooled}) is between the sum over the tokens and the head"
                )

    def _is_factor(self, name: str) -> bool:
        """Return whether a value has one number for each document, or one for all."""
        shape = self._shape(name)
        return shape is not None and (len(shape) == 0 or shape[-1] == 1)

    def _shape(self, name: str) -> Sequence[str | int] | None:
        if name in self._constants:
            return self._constants[name].shape
        return self._shapes.get(name)

    def _producer(self, name: str) -> onnx.NodeProto:
        if name not in self._producers:
            raise NoEvidence(f"{name} is not computed from the tokens")
        return self._producers[name]
