"""Outputs of a graph that are linear in a sum over the tokens of a document."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.lowering.graph_values import axes_of, constants_of, main_input_of
from aftexport.lowering.token_reductions import is_reduction_over_tokens


class NoEvidence(Exception):  # noqa: N818 (an outcome, not an error)
    """The reason why a graph cannot return evidence, as its message."""


@dataclass(frozen=True)
class Factor:
    """A factor per document between the sum and the head.

    Attributes:
        operator: ``Mul`` or ``Div``.
        operand: the operator's other operand.
        rank: the number of its axes.
    """

    operator: str
    operand: ir.Value
    rank: int


@dataclass(frozen=True)
class LinearHead:
    """A linear head, ``logits = pooled W + b``.

    Attributes:
        output: the logits.
        pooled: its input, ``[batch, D]``.
        weight: W, ``[D, classes]`` or, if ``is_transposed``, ``[classes, D]``.
        is_transposed: whether W is transposed.
        offsets: b, ``[classes]``.
    """

    output: ir.Value
    pooled: ir.Value
    weight: ir.Value
    is_transposed: bool
    offsets: NDArray[np.generic]


@dataclass(frozen=True)
class TokenSum:
    """A sum or mean over the tokens of a document, scaled by one number per document.

    Attributes:
        tokens: the summed value, ``[batch, tokens, D]``.
        result: the sum or mean.
        is_mean: whether it is a mean.
        factors: the factors after it, the last one first.
    """

    tokens: ir.Value
    result: ir.Value
    is_mean: bool
    factors: tuple[Factor, ...]


class SummedHeads:
    """The search for linear heads of sums over the tokens.

    Args:
        graph: a lowered graph with the shapes of intermediate values and bare operators.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._outputs = {str(value.name): value for value in graph.outputs}
        self._document = axes_of(main_input_of(graph))[:2]
        self._constants = constants_of(graph)

    @property
    def documents(self) -> Sequence[str]:
        """The names of the outputs per document."""
        return [name for name, value in self._outputs.items() if len(axes_of(value)) == 2]

    def find(self, output: str) -> tuple[LinearHead, TokenSum]:
        """Return the head of an output ``[batch, classes]``, and the sum that it is linear in.

        Raises:
            NoEvidence: if the output has no such head.
        """
        if output not in self._outputs:
            raise NoEvidence(f"{output} is not computed from the tokens")
        head = self._head(self._outputs[output])
        total = self._total_behind(head.pooled)
        if axes_of(total.tokens)[:2] != self._document:
            operator = _producer(total.result).op_type
            raise NoEvidence(f"{operator} ({total.result.name}) does not sum the input's tokens")
        return head, total

    def _head(self, output: ir.Value) -> LinearHead:
        node, offsets = _producer(output), None
        if node.op_type == "Add":
            offsets = next((a for v in node.inputs if (a := self._constant(v)) is not None), None)
            inner = next((v for v in node.inputs if self._constant(v) is None), None)
            if offsets is None:
                raise NoEvidence("the head is not one linear layer")
            node = _producer(inner)
        settings = {name: a.value for name, a in node.attributes.items()}
        is_plain = settings.get("alpha", 1.0) == 1.0 and settings.get("beta", 1.0) == 1.0
        is_product = node.op_type in ("Gemm", "MatMul")
        not_linear = NoEvidence(f"the head ends in {node.op_type}, not in one linear layer")
        if not (is_product and is_plain) or settings.get("transA", 0):
            raise not_linear
        pooled, weight, *bias = node.inputs
        numbers = self._constant(weight)
        if pooled is None or weight is None or numbers is None or numbers.ndim != 2:
            raise not_linear
        is_transposed = bool(settings.get("transB", 0))
        if bias and bias[0] is not None:
            if offsets is not None or self._constant(bias[0]) is None:
                raise NoEvidence("the head is not one linear layer")
            offsets = self._constant(bias[0])
        classes = numbers.shape[0 if is_transposed else 1]
        flat = np.zeros(1) if offsets is None else offsets.ravel()
        if flat.size not in (1, classes):
            raise NoEvidence("the head is not one linear layer")
        return LinearHead(output, pooled, weight, is_transposed, np.broadcast_to(flat, classes))

    def _total_behind(self, pooled: ir.Value) -> TokenSum:
        factors: list[Factor] = []
        while True:
            node = _producer(pooled)
            operands = [value for value in node.inputs if value is not None]
            if is_reduction_over_tokens(node, self._constants):
                if len(axes_of(pooled)) != 2:
                    raise NoEvidence(f"{node.op_type} ({pooled.name}) keeps an axis of tokens")
                is_mean = node.op_type == "ReduceMean"
                return TokenSum(operands[0], pooled, is_mean, tuple(factors))
            if node.op_type in ("Mul", "Div"):
                places = [1, 0] if node.op_type == "Mul" else [1]
                place = next((i for i in places if self._is_factor(operands[i])), None)
                if place is None:
                    raise NoEvidence(
                        f"{node.op_type} ({pooled.name}) does not scale by one number per document"
                    )
                operand = operands[place]
                factors.append(Factor(node.op_type, operand, len(self._shape(operand) or ())))
                pooled = operands[1 - place]
            elif node.op_type in ("Cast", "Identity"):
                pooled = operands[0]
            else:
                last = f"{node.op_type} ({pooled.name})"
                raise NoEvidence(f"{last} is between the sum over the tokens and the head")

    def _is_factor(self, value: ir.Value) -> bool:
        """Return whether a value has one number for each document, or one for all."""
        shape = self._shape(value)
        return shape is not None and (len(shape) == 0 or shape[-1] == 1)

    def _shape(self, value: ir.Value) -> Sequence[str | int] | None:
        numbers = self._constant(value)
        if numbers is not None:
            return numbers.shape
        return None if value.shape is None else axes_of(value)

    def _constant(self, value: ir.Value | None) -> NDArray[np.generic] | None:
        return None if value is None else self._constants.get(str(value.name))


def _producer(value: ir.Value | None) -> ir.Node:
    node = None if value is None else value.producer()
    if node is None:
        name = "" if value is None else value.name
        raise NoEvidence(f"{name} is not computed from the tokens")
    return node
