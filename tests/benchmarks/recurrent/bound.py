"""The least time of a row's work on its machine."""

from collections.abc import Mapping
from typing import Any


def bound_of(row: Mapping[str, Any]) -> tuple[float, str]:
    """Return the least seconds of a row's work, and the part of the machine that binds."""
    parts = {"memory": row["memory_seconds"], "multiply-adds": row["multiply_add_seconds"]}
    name = max(parts, key=parts.__getitem__)
    return parts[name], name
