"""Cuts of documents that are longer than those in the probed runs.

A slice of the first 1,000 tokens takes all tokens of every probed run. The shapes of its result
and of an uncut tensor are then equal, and a comparison of both in those runs finds no difference.
"""

from collections.abc import Collection, Iterable

import onnx_ir as ir

from aftexport.recognition.patterns.pattern import NearMissFound
from aftexport.recognition.proof.part import Part


class Cuts:
    """The nodes above each value that may cut long documents."""

    def __init__(self, model: ir.Model, doubtful: Collection[ir.Node]) -> None:
        """Find those nodes, once for the whole graph.

        Args:
            model: the graph, in the order of execution.
            doubtful: the nodes that may cut.
        """
        self._doubtful = doubtful
        self._above: dict[ir.Value, frozenset[ir.Node]] = {}
        for node in model.graph if doubtful else ():
            if node.op_type in ("Shape", "Size"):
                continue
            above = frozenset[ir.Node]().union(*(self._cuts_of(v) for v in node.inputs))
            above |= {node} if node in doubtful else set()
            self._above |= dict.fromkeys(node.outputs, above)

    def check(self, part: Part, ends: Iterable[ir.Value]) -> None:
        """Raise NearMissFound if a part cuts, or reads both tensors that are cut and others.

        Args:
            part: the nodes that a rewrite replaces.
            ends: the tensors that the part reads.
        """
        cuts = {node for node in part.nodes if node in self._doubtful}
        sets = {self._cuts_of(end) for end in ends}
        if len(sets) > 1:
            cuts |= frozenset.union(*sets) - frozenset.intersection(*sets)
        for node in cuts:
            raise NearMissFound(
                f"{node.outputs[0].name} may take a part of documents longer than were tried"
            )

    def _cuts_of(self, value: ir.Value | None) -> frozenset[ir.Node]:
        return self._above.get(value, frozenset()) if value is not None else frozenset()
