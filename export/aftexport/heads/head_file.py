"""A file that describes the heads of a model, with names, thresholds and units."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from aftexport.errors import UsageError
from aftexport.heads import AnyHead, Head
from aftexport.system.validation import problem

_HEADS = TypeAdapter(dict[str, AnyHead])
_MAX_BYTES = 16 << 20
_EXAMPLE = (
    '{"logits": {"task": "multi_label_classification", "labels": ["a", "b"], '
    '"thresholds": [0.5, 0.7]}}'
)


def read_heads(path: Path) -> Mapping[str, Head]:
    """Read a JSON file of heads, as ``manifest.json`` has them.

    Args:
        path: a file with an object that has each head by the name of its output.

    Raises:
        UsageError: if it cannot be read, or a head is not valid; the error names the field.
    """
    example = f"Write it as {_EXAMPLE}."
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UsageError(
                f"{path}: expected at most {_MAX_BYTES} bytes of JSON, got {size}.", example
            )
        return _HEADS.validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).", "Check the path.") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {problem(error)}.", example) from error
