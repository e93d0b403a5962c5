"""How far above a value reading goes: near enough that a formula stays small, whatever the graph.

A formula is a tree, and a graph is none: what is used twice is read twice, and a chain of products
of activations has a formula that doubles with each. So the values above one that is read are looked
at level by level, a value's level being the longest way to it, until reads are many more than
values; what lies beyond is not looked into, and stands as a leaf. A value is the same leaf wherever
it is used.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping

import onnx_ir as ir

Above = Callable[[ir.Value, int], Iterable[tuple[ir.Value, int]]]
"""What reading a value at a level reads, and how many times."""

MAX_LEVELS = 64
"""Of values within one another; the mechanisms have 25, or one for each key of a window."""
MAX_VALUES = 2048
"""That are looked into for one formula."""
MAX_READS = 256
"""Of one formula, or ``READS_PER_VALUE`` for each of its values; the mechanisms take 170."""
READS_PER_VALUE = 8


def within_horizon(
    value: ir.Value, positions: Mapping[ir.Value, int], above: Above
) -> set[ir.Value]:
    """Return the values that reading ``value`` looks into, itself among them.

    Args:
        value: the value that is read.
        positions: the place in the graph of the node that each value comes from.
        above: a function from a value to the values that it is read from.
    """
    levels: dict[ir.Value, int] = {value: 0}
    times: dict[ir.Value, int] = {value: 1}
    order = itertools.count()
    # The last of the graph first: when a value comes, everything that reads it has come.
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
        for given, uses in from_above:
            if given not in positions:
                continue
            if given not in levels:
                levels[given], times[given] = 0, 0
                heapq.heappush(pending, (-positions[given], next(order), given))
            levels[given] = max(levels[given], level + 1)
            times[given] += uses * count
    return _nearest(costs)


def _nearest(costs: Mapping[int, tuple[int, list[ir.Value]]]) -> set[ir.Value]:
    """The values of the levels whose reads are few enough, the first level always."""
    found: set[ir.Value] = set()
    total = 0
    for level in sorted(costs):
        reads, members = costs[level]
        total += reads
        if level and total > max(MAX_READS, READS_PER_VALUE * (len(found) + len(members))):
            break
        found.update(members)
    return found
