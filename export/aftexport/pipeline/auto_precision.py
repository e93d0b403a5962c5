"""Which precision each node can have: the cheapest that holds parity, and why.

Greedy: every node begins in the cheapest precision in which, alone, it keeps the model within the
tolerance; then, until the model is within with all of them together, the node that errs most by
itself goes to the next wider one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

import aftplugins
from aftexport.bundle.golden import Array, Case
from aftexport.bundle.manifest import NodePrecision
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import ParityError, UsageError
from aftexport.operators.domain import DOMAIN
from aftexport.operators.encoder import OPERATORS
from aftexport.parity.comparison import compare

CHEAPEST_FIRST = ("int8", "bf16", "fp32")
"""Of the products inside the encoder's kernels."""


@dataclass(frozen=True)
class Advice:
    """The choices, and what all of them together err.

    Attributes:
        nodes: in the order of the graph.
        tolerance: that it holds.
        error: of the model, over its cases.
    """

    nodes: tuple[NodePrecision, ...]
    tolerance: float
    error: float

    @property
    def coarsest(self) -> str:
        """The cheapest precision that a node has."""
        chosen = {node.precision for node in self.nodes}
        return next((p for p in CHEAPEST_FIRST if p in chosen), "fp32")


def advise(
    model: onnx.ModelProto,
    cases: Sequence[Case],
    tolerance: float,
    advance: Callable[[], None] = lambda: None,
) -> Advice:
    """Chooses the precision of every encoder node, and sets it.

    Args:
        model: exported in fp32; the ``precision`` of its nodes is changed in place.
        cases: with the outputs of PyTorch.
        tolerance: on ``Differences.error`` of the model's own cases.
        advance: called after each measurement; ``measurements`` says how many there are at most.

    Raises:
        UsageError: where the fused kernels, which alone round, are not here to be measured.
        ParityError: where the model is outside the tolerance even in fp32.
    """
    if why := aftplugins.missing("onnxruntime"):
        raise UsageError(f"--precision auto measures the fused kernels. {why}", "Build them first.")
    measure = _Measurement(model, [case for case in cases if case.subject == "model"])
    whole, wide = measure()
    if not whole <= tolerance:
        raise ParityError(
            f"Even in fp32 the model is off by {whole:.1e}, more than {tolerance:.1e}.",
            "Give a larger --tolerance.",
        )
    nodes = _nodes(model)
    alone: list[dict[str, float]] = []
    for node in nodes:
        errors = {"fp32": whole}
        for precision in CHEAPEST_FIRST[:-1]:
            _set(node, precision)
            error, outputs = measure()
            # Without the processor's instructions the kernel rounds nothing, and nothing is known.
            if not all(map(np.array_equal, outputs, wide)):
                errors[precision] = error
            advance()
        _set(node, "fp32")
        alone.append(errors)
    steps = [
        [p for p in CHEAPEST_FIRST if p in errors and errors[p] <= tolerance] for errors in alone
    ]
    chosen = [0] * len(nodes)
    for node, ladder in zip(nodes, steps, strict=True):
        _set(node, ladder[0])
    together, _ = measure()
    while not together <= tolerance:
        widest = max(
            (i for i, ladder in enumerate(steps) if chosen[i] + 1 < len(ladder)),
            key=lambda i: alone[i][steps[i][chosen[i]]],
        )
        chosen[widest] += 1
        _set(nodes[widest], steps[widest][chosen[widest]])
        together, _ = measure()
    found = tuple(
        NodePrecision.model_validate(
            {
                "node": node.name,
                "operator": node.op_type,
                "precision": ladder[rank],
                "errors": errors,
                "reason": _reason(errors, ladder, rank, tolerance),
            }
        )
        for node, errors, ladder, rank in zip(nodes, alone, steps, chosen, strict=True)
    )
    return Advice(found, tolerance, together)


def measurements(model: onnx.ModelProto) -> int:
    """How many measurements of a node alone there are."""
    return len(_nodes(model)) * (len(CHEAPEST_FIRST) - 1)


class _Measurement:
    """The model as it is now: its largest error, and what it puts out."""

    def __init__(self, model: onnx.ModelProto, cases: Sequence[Case]) -> None:
        self._model = model
        self._cases = cases

    def __call__(self) -> tuple[float, list[Array]]:
        engine = OnnxRuntimeEngine(self._model.SerializeToString())
        outputs = [engine.run(case.inputs)["logits"] for case in self._cases]
        found = zip(self._cases, outputs, strict=True)
        return max(compare(case, output, "fp32").error for case, output in found), outputs


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.domain == DOMAIN and n.op_type in OPERATORS]


def _set(node: onnx.NodeProto, precision: str) -> None:
    next(a for a in node.attribute if a.name == "precision").s = precision.encode()


def _reason(errors: dict[str, float], ladder: Sequence[str], rank: int, tolerance: float) -> str:
    refused = []
    for precision in CHEAPEST_FIRST[: CHEAPEST_FIRST.index(ladder[rank])]:
        if precision not in errors:
            refused.append(f"{precision} cannot be measured on this processor")
        elif precision in ladder:
            refused.append(f"{precision} is too much together with the other nodes")
        else:
            refused.append(f"{precision} alone errs {errors[precision]:.1e}")
    return "; ".join(refused) or f"the cheapest there is stays within {tolerance:.1e}"
