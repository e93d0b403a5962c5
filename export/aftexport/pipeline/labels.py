"""The names of a model's classes."""

from collections.abc import Sequence

from aftexport.bundle.golden import Array
from aftexport.errors import TraceError, UsageError
from aftexport.heads.exclusive_labels import check_count


def class_names(names: Sequence[str] | None, logits: Array) -> tuple[str, ...]:
    """Return a name for each class; without names ``class_0``, ``class_1`` and so on.

    Args:
        names: the names from the user or the model file; None for no names.
        logits: the logits of one case, which must be ``[batch, classes]``.

    Raises:
        TraceError: if the logits have another rank.
        UsageError: if there are fewer than two classes, or the names are not one distinct name
            for each class.
    """
    if logits.ndim != 2:
        raise TraceError(
            f"Expected logits [batch, classes], got shape {logits.shape}.",
            "Export a classifier. For other models, use torch.onnx.export and aftexport fuse.",
        )
    count = logits.shape[1]
    check_count(count)
    if names is None:
        return tuple(f"class_{i}" for i in range(count))
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"The labels must be a list of names, got {names!r}.", "Give one name for each class."
        )
    if not all(map(_is_unicode, names)):
        raise UsageError(
            "The labels must be UTF-8, got other bytes.", "Give the labels in a UTF-8 locale."
        )
    if len(names) != count or len(set(names)) != count or not all(names):
        raise UsageError(
            f"Expected {count} different labels, got {len(set(filter(None, names)))} in "
            f"{', '.join(map(repr, names))}.",
            "Give one name for each class.",
        )
    return tuple(names)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line that the locale cannot decode
        return False
    return True
