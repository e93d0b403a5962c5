"""The ONNX operators of a mechanism: schema and portable body."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx

from aftexport.operators.schema import Attribute, OnnxOperator


@dataclass(frozen=True, kw_only=True)
class MechanismOperator(OnnxOperator):
    """An operator of a mechanism, whose files have the name ``stem``."""

    stem: str


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A mechanism and its causal twin, each an operator in ONNX; see ``OnnxOperator``."""

    op_type: str  # the name of the ONNX operator that is not causal
    stem: str  # the mechanism's file name, such as aft_local
    inputs: tuple[str, ...]  # lengths last
    shapes: tuple[str, ...]
    exponents: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    body: Callable[..., str]  # a function of the attributes and ``causal``
    doc: str
    kernel_attributes: tuple[Attribute, ...] = ()
    optional: tuple[str, ...] = ()  # inputs that only the operator that is not causal has
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
