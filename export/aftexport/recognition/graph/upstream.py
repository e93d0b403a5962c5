"""A search through the values that a value is computed from, without recursion."""

from collections.abc import Callable, MutableMapping

import onnx_ir as ir


def any_above(
    value: ir.Value,
    known: MutableMapping[ir.Value, bool],
    decide: Callable[[ir.Value], bool | None],
) -> bool:
    """Return whether ``decide`` holds for a value or any value that it is computed from.

    Args:
        value: a value of a graph.
        known: the results so far; new results are added.
        decide: a predicate that returns None if the inputs of a value's node decide.
    """
    pending = [value]
    while pending:
        last = pending[-1]
        if last not in known:
            answer = decide(last)
            node = last.producer()
            inputs = [v for v in node.inputs if v is not None] if node is not None else []
            if answer is None and any(known.get(v) for v in inputs):
                answer = True
            unknown = [v for v in inputs if v not in known] if answer is None else []
            if unknown:
                pending += unknown
                continue
            known[last] = bool(answer)
        pending.pop()
    return known[value]
