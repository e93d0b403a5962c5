"""The ONNX operators of a mechanism: schema and portable body."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx

from aftexport.operators.schema import Attribute, OnnxOperator


@dataclass(frozen=True, kw_only=True)
class MechanismOperator(OnnxOperator):
    """An operator of a mechanism.

    Attributes:
        stem: the mechanism's file name, for example ``aft_local``.
    """

    stem: str


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism and its causal twin, each an operator in ONNX.

    Attributes:
        op_type: the name of the ONNX operator that is not causal.
        stem: the mechanism's file name, for example ``aft_local``.
        inputs: the names of the inputs, ``lengths`` last.
        shapes: the shape of each input, as a word for each axis.
        exponents: the inputs to which an exponential is applied.
        attributes: the attributes of the torch op and of the ONNX operator.
        kernel_attributes: the attributes that only the ONNX operator has.
        optional: the inputs after ``lengths`` that a node may leave out; the causal operator has
            none of them.
        sizes, nonnegative: see ``OnnxOperator``.
        body: the portable ONNX body, as text; a function of the attributes and ``causal``.
        doc: the documentation of the ONNX operator.
    """

    op_type: str
    stem: str
    inputs: tuple[str, ...]
    shapes: tuple[str, ...]
    exponents: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    body: Callable[..., str]
    doc: str
    kernel_attributes: tuple[Attribute, ...] = ()
    optional: tuple[str, ...] = ()
    sizes: Callable[[Mapping[str, Any]], dict[str, int]] = lambda _: {}
    nonnegative: Callable[[Mapping[str, Any]], Mapping[str, int]] = lambda _: {}

    def register(self) -> tuple[MechanismOperator, MechanismOperator]:
        """Register both operators in onnx, and return them."""
        return self._register(causal=False), self._register(causal=True)

    def _register(self, *, causal: bool) -> MechanismOperator:
        twin = " Causal: only keys up to the query's own position count." if causal else ""
        kept = [i for i, name in enumerate(self.inputs) if not (causal and name in self.optional)]
        operator = MechanismOperator(
            op_type=f"Causal{self.op_type}" if causal else self.op_type,
            inputs=tuple(self.inputs[i] for i in kept),
            shapes=tuple(self.shapes[i] for i in kept),
            optional=() if causal else self.optional,
            sizes=self.sizes,
            nonnegative=self.nonnegative,
            exponents=self.exponents,
            attributes=self.attributes,
            kernel_attributes=self.kernel_attributes,
            body=partial(self.body, causal=causal),
            doc=self.doc + twin,
            stem=self.stem,
        )
        onnx.defs.register_schema(operator.schema())
        return operator
