"""What values of a graph are computed from, each looked at once, however deep the graph is."""

from collections.abc import Callable, MutableMapping

import onnx_ir as ir


def any_above(
    value: ir.Value,
    known: MutableMapping[ir.Value, bool],
    decide: Callable[[ir.Value], bool | None],
) -> bool:
    """Whether ``decide`` holds for a value, or for any that it is computed from.

    Args:
        value: a value of a graph.
        known: the answers so far, which are added to.
        decide: None where the inputs of a value's node decide.
    """
    pending = [value]
    while pending:
        last = pending[-1]
        if last not in known:
            answer = decide(last)
            node = last.producer()
            given = [v for v in node.inputs if v is not None] if node is not None else []
            if answer is None and any(known.get(v) for v in given):
                answer = True
            unknown = [v for v in given if v not in known] if answer is None else []
            if unknown:
                pending += unknown
                continue
            known[last] = bool(answer)
        pending.pop()
    return known[value]
