"""JSON files of models, read up to a maximum size."""

import json
from pathlib import Path
from typing import Any

from aftexport.errors import CheckpointError

MAX_JSON_BYTES = 1 << 24
"""The maximum size of a file. The tokenizer's settings of a model can take more than 1 MB."""
MAX_SETTINGS_BYTES = 1 << 20
"""The maximum size of a file with a few settings."""


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the content of a JSON file.

    Args:
        path: the file.
        max_bytes: the maximum size of the file.

    Raises:
        CheckpointError: if the file is larger, or not valid JSON.
        OSError: if the file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CheckpointError(
            path,
            f"expected at most {max_bytes} bytes of JSON, got more",
            "Give the file as the library saved it.",
        )
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not valid JSON ({error})", "Fix the file.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object; see ``read_json``.

    Raises:
        CheckpointError: if the file cannot be used, or holds another value.
        OSError: if the file cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise CheckpointError(path, f"expected a JSON object, got {kind}", "Fix the file.")
    return content
