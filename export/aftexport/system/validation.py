"""The strict models of JSON files, and plain messages for values that pydantic refuses."""

import re

from pydantic import BaseModel, ConfigDict, ValidationError

_PLAIN = (("a valid array", "a list"), ("a valid integer", "an integer"), ("a valid ", "a "))
"""Words of pydantic, with plain replacements."""
_MAX_SHOWN = 40
"""The maximum characters of a wrong value in an error."""


class StrictModel(BaseModel):
    """A part of a JSON file: lists become tuples, and no other conversion is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def problem(error: ValidationError) -> str:
    """Return the first problem: the field, the expected value and the given one."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "missing":
            return f"{place}: the field is missing"
        case "extra_forbidden":
            return f"{place}: the field is unknown"
        case "value_error":
            message = first["msg"].removeprefix("Value error, ")
            return f"{place}: {message}" if place else message
    expected = re.sub(r"^Input should (be |have )?", "", first["msg"])
    expected = re.sub(r"^\w+ (should have .+?),? not \d+$", r"\1", expected)
    expected = expected.removeprefix("should have ").partition(" after validation")[0]
    for words, plain_words in _PLAIN:
        expected = expected.replace(words, plain_words)
    return f"{place}: expected {expected}, got {_shown(first['input'])}"


def _shown(value: object) -> str:
    """Return a JSON value for an error, shortened if it is long."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return f"an object of {len(value)}"
        case list() | tuple():
            return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
