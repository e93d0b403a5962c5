"""The names of a model's classes."""

from collections.abc import Sequence

from aftexport.bundle.golden import Array
from aftexport.errors import TraceError, UsageError
from aftexport.heads.exclusive_labels import check_count


def class_names(names: Sequence[str] | None, logits: Array) -> tuple[str, ...]:
    """Return a name for each class; ``class_0`` and so on where there are none.

    Args:
        names: the names that the user gave or the model file holds; None where there are none.
        logits: the logits of one case, which must be ``[batch, classes]``.

    Raises:
        TraceError: if the logits have another rank.
        UsageError: if there are fewer than two classes, or not one distinct name for each.
    """
    if logits.ndim != 2:
        raise TraceError(
            f"Expected logits [batch, classes], got shape {logits.shape}.",
            "Export a classifier; any other model by torch.onnx.export, and run aftexport fuse.",
        )
    count = logits.shape[1]
    check_count(count)
    if names is None:
        return tuple(f"class_{i}" for i in range(count))
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UsageError("The labels are not a list of names.", "Give one name for each class.")
    if not all(map(_is_unicode, names)):
        raise UsageError("The labels are not UTF-8.", "Give them in a locale of UTF-8.")
    if len(names) != count or len(set(names)) != count or not all(names):
        raise UsageError(
            f"There are {len(set(filter(None, names)))} different labels for {count} classes.",
            "Give one name for each class.",
        )
    return tuple(names)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that its locale has no letters for
        return False
    return True
