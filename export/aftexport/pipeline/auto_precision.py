"""The choice of the cheapest precision of each node that keeps the model within tolerance.

The algorithm is greedy. Every node begins in the cheapest precision that keeps the model within
the tolerance if only this node is changed. While all choices together exceed the tolerance, the
node with the largest error of its own gets the next wider precision.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

import aftplugins
from aftexport.bundle.golden import Array, Case
from aftexport.bundle.manifest import NodePrecision
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.product_methods import forced_methods, usable_methods
from aftexport.errors import ParityError, UsageError
from aftexport.heads import Head
from aftexport.operators.domain import DOMAIN, operator_name
from aftexport.operators.encoder import OPERATORS
from aftexport.parity.comparison import compare

CHEAPEST_FIRST = ("int8", "bf16", "fp32")
"""The precisions of the products inside the encoder's kernels."""


@dataclass(frozen=True)
class Advice:
    """The precision of each node in the graph's order, and the model's error with all of them."""

    nodes: tuple[NodePrecision, ...]
    tolerance: float
    error: float

    @property
    def coarsest(self) -> str:
        """The cheapest precision of any node."""
        chosen = {node.precision for node in self.nodes}
        return next((p for p in CHEAPEST_FIRST if p in chosen), "fp32")


def advise(
    model: onnx.ModelProto,
    cases: Sequence[Case],
    tolerance: float,
    advance: Callable[[], None] = lambda: None,
    *,
    heads: Mapping[str, Head] | None = None,
) -> Advice:
    """Choose the precision of every encoder node, and set it.

    Raises:
        UsageError: if the fused kernels are not installed; only they round.
        ParityError: if the model is outside the tolerance even in fp32.
    """
    if why := aftplugins.missing("onnxruntime"):
        raise UsageError(
            f"--precision auto measures the fused kernels. {why}", "Build the kernels first."
        )
    measure = _Measurement(model, [case for case in cases if case.subject == "model"], heads)
    whole, wide = measure()
    if not whole <= tolerance:
        raise ParityError(
            f"Expected an error of at most {tolerance:.1e}, got {whole:.1e} even in fp32.",
            "Give a larger --tolerance.",
        )
    node_errors = [
        (node, _errors_of(node, measure, whole, wide, advance)) for node in _nodes(model)
    ]
    choices = [_Choice(node, errors, tolerance) for node, errors in node_errors]
    error = _choose(choices, measure, tolerance)
    return Advice(tuple(choice.record(tolerance) for choice in choices), tolerance, error)


def measurements(model: onnx.ModelProto) -> int:
    """Return the number of measurements with only one node changed."""
    return len(_nodes(model)) * (len(CHEAPEST_FIRST) - 1)


class _Measurement:
    """A measurement of the model's largest error and outputs, by the coarsest methods."""

    def __init__(
        self, model: onnx.ModelProto, cases: Sequence[Case], heads: Mapping[str, Head] | None
    ) -> None:
        self._model = model
        self._cases = cases
        self._heads = heads
        # Another machine may take the coarsest method of a precision. In its place, int16 would
        # show too small an error, and fp32 shows that this processor lacks the method.
        self._methods = [method for method in usable_methods("int8") if method != "int16"]

    def __call__(self) -> tuple[float, list[Array]]:
        with forced_methods(self._methods):
            engine = OnnxRuntimeEngine(self._model.SerializeToString())
        results, outputs = [], []
        for case in self._cases:
            given = engine.run(case.inputs)
            results += compare(case, given, "fp32", heads=self._heads)
            outputs += [given[name] for name in case.outputs]
        return max(result.largest_error for result in results), outputs


class _Choice:
    """The precision of one node, which can only become wider, and the model's error in each."""

    def __init__(self, node: onnx.NodeProto, errors: dict[str, float], tolerance: float) -> None:
        self._node = node
        self._ladder = [p for p in CHEAPEST_FIRST if p in errors and errors[p] <= tolerance]
        self._rank = 0
        self.errors = errors

    @property
    def precision(self) -> str:
        return self._ladder[self._rank]

    @property
    def can_widen(self) -> bool:
        return self._rank + 1 < len(self._ladder)

    def widen(self) -> None:
        """Give the node the next wider precision."""
        self._rank += 1
        self.apply()

    def apply(self) -> None:
        """Set the precision of the node in the model."""
        _set(self._node, self.precision)

    def record(self, tolerance: float) -> NodePrecision:
        """Return the choice for the manifest, with its reason."""
        return NodePrecision.model_validate(
            {
                "node": self._node.name,
                "operator": self._node.op_type,
                "precision": self.precision,
                "errors": self.errors,
                "reason": self._reason(tolerance),
            }
        )

    def _reason(self, tolerance: float) -> str:
        refused = []
        for precision in CHEAPEST_FIRST[: CHEAPEST_FIRST.index(self.precision)]:
            if precision not in self.errors:
                refused.append(f"{precision} cannot be measured on this processor")
            elif precision in self._ladder:
                refused.append(f"{precision} exceeds the tolerance together with the other nodes")
            else:
                error = self.errors[precision]
                refused.append(f"{precision} in this node gives an error of {error:.1e}")
        return "; ".join(refused) or f"the cheapest precision stays within {tolerance:.1e}"


def _errors_of(
    node: onnx.NodeProto,
    measure: _Measurement,
    whole: float,
    wide: Sequence[Array],
    advance: Callable[[], None],
) -> dict[str, float]:
    """Return the error of the model in each precision of ``node``, which ends in fp32."""
    errors = {"fp32": whole}
    for precision in CHEAPEST_FIRST[:-1]:
        _set(node, precision)
        error, outputs = measure()
        # Equal outputs mean that the processor lacks the coarsest method, so nothing was rounded.
        if not all(map(np.array_equal, outputs, wide)):
            errors[precision] = error
        advance()
    _set(node, "fp32")
    return errors


def _choose(choices: Sequence[_Choice], measure: _Measurement, tolerance: float) -> float:
    """Widen the choices until the model is within the tolerance; return its error."""
    for choice in choices:
        choice.apply()
    error, _ = measure()
    while not error <= tolerance:
        candidates = [choice for choice in choices if choice.can_widen]
        max(candidates, key=lambda choice: choice.errors[choice.precision]).widen()
        error, _ = measure()
    return error


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [
        n for n in model.graph.node if n.domain == DOMAIN and operator_name(n.op_type) in OPERATORS
    ]


def _set(node: onnx.NodeProto, precision: str) -> None:
    next(a for a in node.attribute if a.name == "precision").s = precision.encode()
