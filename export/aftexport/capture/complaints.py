"""The complaints of torch.export, read from the text and the traceback of its errors."""

import re
import traceback

from aftexport.capture.shape_guards import axis_names, is_the_users, line_of
from aftexport.errors import first_line


def violation(complaint: str) -> str | None:
    """Return the first axis that torch.export cannot keep free; None if it names none."""
    match = re.search(r"^Constraints violated.*\n\s*- (.+)$", complaint, re.MULTILINE)
    if match is None:
        return None
    # The rest of the line concerns mark_dynamic, which the user did not call, or a log.
    text = re.split(r" If you're using|Specializations unexpectedly", match[1])[0].rstrip(". ")
    return re.sub(r"(\w+) = \1\b", r"\1", axis_names(text))


def failed_in_torch(error: BaseException) -> bool:
    """Return whether an assertion inside torch failed, e.g. on slices of incomparable sizes."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("torch.")
    return isinstance(error, AssertionError) and inside


def learned_length(complaint: str) -> int | None:
    """Return the longest document that torch.export names, for a model that slices tables."""
    bounds = [int(n) for n in re.findall(r"tokens = Dim\('tokens', max=(\d+)\)", complaint)]
    # torch treats a slice of the whole table as a separate branch, so the length that it names is
    # one beyond the bound. For a table [1, rows, D] it counts numbers, D per row.
    bounds += [
        int(whole) // int(each or 1) - int(more or 0) - 1
        for more, each, whole in re.findall(
            r"(?:\((\d+) \+ |\((\d+)\*)?L\['input_ids'\]\.size\(\)\[1\]\)? != (\d+)", complaint
        )
    ]
    return min(bounds, default=0) if min(bounds, default=0) > 1 else None


def cause(error: BaseException) -> str:
    """Return the type and text of the innermost cause, with the user's line that led to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    kind, words = type(error).__name__, first_line(error)
    text = kind if words == kind else f"{kind}: {words}".rstrip(".")
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_the_users(frame):
            return f"{text} ({line_of(frame, line)})"
    return text
