"""Checks of the names that a head gives to its numbers."""

from collections.abc import Sequence

from aftexport.errors import UsageError


def numbered(count: int, names: Sequence[str] | None, stem: str) -> tuple[str, ...]:
    """Return a name for each of ``count`` numbers: the given ones, or ``class_0`` and so on.

    Args:
        count: the number of names.
        names: the names from the user or the model file; None for numbered names.
        stem: the start of numbered names, such as ``class``.

    Raises:
        UsageError: if the names are not one distinct name for each.
    """
    if names is None:
        return tuple(f"{stem}_{i}" for i in range(count))
    remedy = f"Give one name for each {stem}."
    if not _are_names(names):
        raise UsageError(f"The labels must be a list of names, got {str(names)[:80]}.", remedy)
    if not all(map(_is_unicode, names)):
        raise UsageError(
            "The labels must be UTF-8, got other bytes.", "Give the labels in a UTF-8 locale."
        )
    if len(names) != count or len(set(names)) != count or not all(names):
        raise UsageError(
            f"Expected {count} different labels, got {len(set(filter(None, names)))} in "
            f"{', '.join(map(repr, names))}.",
            remedy,
        )
    return tuple(names)


def check_distinct(field: str, names: Sequence[str]) -> None:
    """Raise ValueError if two names of a field of the manifest are equal."""
    if len(set(names)) != len(names):
        raise ValueError(f"{field}: expected different names, got one of them twice")


def _are_names(names: object) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line that the locale cannot decode
        return False
    return True
