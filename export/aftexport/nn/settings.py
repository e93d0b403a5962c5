"""Checks of the values of a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from aftexport.errors import UsageError

_MAX_COUNT = 1 << 26
"""Limit of every count: the byte count of a matrix of two such counts fits into 64 bits."""


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError if a value is not one of the choices."""
    if value not in choices:
        known = ", ".join(choices)
        raise UsageError(
            f"{name} must be one of {known}, got {value!r}.", f"Choose one of {known}."
        )


def check_count(name: str, value: object, *, is_optional: bool = False) -> None:
    """Raise UsageError if a value is not a whole number from 1 to 67,108,864."""
    if is_optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        expected = "a positive whole number" + (" or null" if is_optional else "")
        raise UsageError(f"{name} must be {expected}, got {value!r}.", f"Give {expected}.")
    if value > _MAX_COUNT:
        raise UsageError(
            f"{name} must be at most {_MAX_COUNT}, got {value}.", f"Give at most {_MAX_COUNT}."
        )


def check_entries(kind: type[Any], values: Mapping[str, Any], required: Sequence[str]) -> None:
    """Raise UsageError if entries are missing, or are not fields of a dataclass."""
    known = {f.name for f in fields(kind)}
    if unknown := sorted(str(name) for name in set(values) - known):
        raise UsageError(
            f"Expected known configuration entries, got {', '.join(unknown)}.",
            f"Choose from {', '.join(sorted(known))}.",
        )
    if missing := sorted(set(required) - set(values)):
        raise UsageError(f"The configuration lacks {', '.join(missing)}.", "Add the entries.")
