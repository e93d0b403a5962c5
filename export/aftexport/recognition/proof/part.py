"""The part of a graph between the value of a formula and the tensors at which the formula ends."""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.graph.upstream import any_above
from aftexport.recognition.read import layout

Array = NDArray[np.generic]


class ProofError(Exception):
    """A part of the graph cannot be run by itself; the message has the reason."""


@dataclass(frozen=True)
class Part:
    """A part of a graph that can be run: nodes, constants, inputs and the output."""

    nodes: Sequence[ir.Node]
    constants: Mapping[str, Array]
    inputs: Sequence[ir.Value]
    output: str


def part_of(
    value: ir.Value,
    ends: Iterable[ir.Value],
    probed: ProbedGraph,
    new_constants: Mapping[ir.Value, Array] | None = None,
    max_nodes: int = sys.maxsize,
) -> Part:
    """Return the part of the graph from ``ends`` to ``value``.

    Shapes and masks that are not computed from ``ends`` are inputs too. Of a mask and its negation,
    the mask is the input.

    Args:
        value: the output of the part.
        ends: the tensors at which the part begins.
        probed: the probed values of the graph, without those of new nodes.
        new_constants: the constants of new nodes.
        max_nodes: upper bound of the part's nodes.

    Raises:
        ProofError: for more than ``max_nodes``.
    """
    boundary = _Boundary(frozenset(ends), probed)
    constants: dict[str, Array] = {}
    nodes: dict[ir.Node, None] = {}
    inputs: dict[ir.Value, None] = {}
    pending, opened = [(value, False)], 0
    while pending:
        current, is_done = pending.pop()
        node = current.producer()
        if is_done:
            assert node is not None
            nodes[node] = None
            continue
        array = (new_constants or {}).get(current, probed.constant(current))
        if array is None and probed.number(current) is not None:
            # Computed in float64, it would differ from the number that the rewrite has.
            array = probed.fixed_value(current)
        if array is not None:
            constants[str(current.name)] = array
        elif node is None or boundary.is_input(current):
            inputs[current] = None
        elif node not in nodes:
            opened += 1
            if opened > max_nodes:
                raise ProofError(f"it is computed by more than {max_nodes} nodes")
            pending.append((current, True))
            pending += [(source, False) for source in reversed(node.inputs) if source is not None]
    return Part(list(nodes), constants, list(inputs), str(value.name))


class _Boundary:
    """The boundary between the values that a part computes and the values it is given."""

    def __init__(self, ends: Collection[ir.Value], probed: ProbedGraph) -> None:
        self._ends = ends
        self._probed = probed
        self._depending: dict[ir.Value, bool] = {}

    def is_input(self, value: ir.Value) -> bool:
        """Return whether a value is given: an end, or a shape or mask not computed from ends."""
        return (
            value in self._ends
            or value.producer() is None
            or (
                self._probed.has(value)
                and not self._probed.is_float(value)
                and not _is_of_masks(value, self._probed)
                and not any_above(value, self._depending, self._depends_on_ends)
            )
        )

    def _depends_on_ends(self, value: ir.Value) -> bool | None:
        node = value.producer()
        if value in self._ends or node is None or node.op_type in ("Shape", "Size"):
            return value in self._ends
        return None


def _is_of_masks(value: ir.Value, probed: ProbedGraph) -> bool:
    """Return whether a mask is computed from other masks, which a rewrite may read instead."""
    node = value.producer()
    return (
        node is not None
        and node.op_type in ("And", "Cast", "Identity", "Not", "Or", *layout.FORMULAS)
        and probed.is_boolean(value)
        and all(probed.is_boolean(of) for of in node.inputs[:1] if of is not None)
    )
