"""The horizon of reading, which keeps the formula of a value small for any graph.

A formula is a tree, and a graph is not: a value that is used twice is read twice, so the formula of
a chain of products of activations doubles with each product. The values above the one that is read
are therefore visited level by level, where the level of a value is the longest path to it. Once
reads are many more than values, all values beyond are leaves. A value is the same leaf wherever it
is used.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

Above = Callable[[ir.Value, int], Iterable[tuple[ir.Value, int]]]
"""The values that reading a value at a level reads, and the number of times."""

MAX_LEVELS = 64
"""The most levels; the mechanisms have 25, or one for each key of a window."""
MAX_VALUES = 2048
"""The most values that one formula is read from."""
MAX_READS = 256
"""The most reads for one formula of few values; the mechanisms take 170."""
READS_PER_VALUE = 8


def within_horizon(
    value: ir.Value, positions: Mapping[ir.Value, int], above: Above
) -> set[ir.Value]:
    """Return the values that reading ``value`` looks into, including itself.

    Args:
        value: the value that is read.
        positions: the place in the graph of the node that each value comes from.
        above: a function from a value to the values that it is read from.
    """
    levels: dict[ir.Value, int] = {value: 0}
    times: dict[ir.Value, int] = {value: 1}
    order = itertools.count()
    # The last values of the graph first, so that all readers of a value come before it.
    pending = [(0, next(order), value)]
    costs: dict[int, tuple[int, list[ir.Value]]] = {}
    seen = 0
    while pending and seen < MAX_VALUES:
        _, _, last = heapq.heappop(pending)
        level, count = levels[last], times[last]
        if level > MAX_LEVELS or count > MAX_READS + READS_PER_VALUE * MAX_VALUES:
            continue
        seen += 1
        reads, members = costs.setdefault(level, (0, []))
        members.append(last)
        from_above = list(above(last, level))
        costs[level] = reads + count * sum(uses for _, uses in from_above), members
        for source, uses in from_above:
            if source not in positions:
                continue
            if source not in levels:
                levels[source], times[source] = 0, 0
                heapq.heappush(pending, (-positions[source], next(order), source))
            levels[source] = max(levels[source], level + 1)
            times[source] += uses * count
    return _nearest(costs)


def _nearest(costs: Mapping[int, tuple[int, list[ir.Value]]]) -> set[ir.Value]:
    """Return the values of the levels whose reads are few enough, and of the first level."""
    near: set[ir.Value] = set()
    total = 0
    for level in sorted(costs):
        reads, members = costs[level]
        total += reads
        if level and total > max(MAX_READS, READS_PER_VALUE * (len(near) + len(members))):
            break
        near.update(members)
    return near
