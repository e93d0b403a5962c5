"""The best peer of a row: the fastest contender that is not ours."""

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Facts = Mapping[str, Mapping[str, Any]]
PRECISIONS = ("fp32", "bf16", "int8")
"""From the finest to the coarsest."""


def best_peer(rows: Iterable[Row], contenders: Facts, precision: str = "fp32") -> Row | None:
    """Return the fastest row of a peer at a precision or a finer one, whatever its error.

    Args:
        rows: the rows of one model at one length.
        contenders: the properties of contenders, by name.
        precision: the coarsest precision of a peer.
    """
    allowed = PRECISIONS[: PRECISIONS.index(precision) + 1]
    peers = [
        row
        for row in rows
        if (facts := contenders[row["contender"]])["precision"] in allowed
        and not facts["is_ours"]
        and facts["is_same_function"]
    ]
    return min(peers, key=lambda row: row["seconds"], default=None)


def grouped(rows: Iterable[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    """Return rows by mechanism and length, then by contender."""
    groups: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["mechanism"], row["tokens"]), {})[row["contender"]] = row
    return groups
