"""Lengths that count every token, for operators whose nodes had none."""

import onnx_ir as ir

from aftexport.lowering.nodes import NewNodes


class FullLengths:
    """The lengths int64 ``[B]`` of documents without padding, one value for each tensor of tokens.

    Args:
        new: the place of the nodes.
        known: the lengths by tensor, shared by the nodes of a graph.
    """

    def __init__(self, new: NewNodes, known: dict[ir.Value, ir.Value]) -> None:
        self._new = new
        self._known = known

    def of(self, tokens: ir.Value) -> ir.Value:
        """Return the lengths of a tensor ``[B, T, ...]``."""
        if tokens not in self._known:
            count = self._new.add("Shape", tokens, start=1, end=2)
            batch = self._new.add("Shape", tokens, start=0, end=1)
            self._known[tokens] = self._new.add("Expand", count, batch)
        return self._known[tokens]


def are_full(lengths: ir.Value | None, tokens: ir.Value) -> bool:
    """Return whether lengths are those of ``FullLengths`` for a tensor ``[B, T, ...]``."""
    node = None if lengths is None else lengths.producer()
    if node is None or node.op_type != "Expand":
        return False
    sources = [None if value is None else value.producer() for value in node.inputs]
    return all(
        source is not None
        and source.op_type == "Shape"
        and source.inputs[0] is tokens
        and _ends(source) == ends
        for source, ends in zip(sources, ((1, 2), (0, 1)), strict=True)
    )


def _ends(node: ir.Node) -> tuple[int, int | None]:
    end = node.attributes.get("end")
    return node.attributes.get_int("start", 0), None if end is None else end.as_int()
