"""Reading ``torch.export`` archives (.pt2) without running what is in them.

``torch.export.load`` falls back to full unpickling, evaluates shape expressions
as Python, and loads compiled code; an archive that would need any of it is
refused before torch sees it.
"""

import json
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

import aftexport.mechanisms  # noqa: F401  registers the operators that programs call
from aftexport.errors import CheckpointError

_HARMLESS_MEMBERS = re.compile(
    r"models/[^/]+\.json|data/weights/[^/]+|data/constants/(tensor_\d+|[^/]+\.json)"
    r"|data/sample_inputs/[^/]+\.pt|archive_format|archive_version|byteorder|version"
    r"|\.data/.*|\.format_version|\.storage_alignment"
)
_SHAPE_EXPRESSION = re.compile(
    r"(\s|\d+(\.\d+)?|[-+*/(),<>=&|~]"
    r"|[su]\d+\b|(Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|IntTrueDiv|Eq|Ne|True|False)\b)*"
)
_SAFE_FORM = "Export it again with torch.export.save, or give the module's state dict and --model."


def is_program_archive(path: Path) -> bool:
    """Tells whether a file is a ``torch.export`` archive."""
    if not zipfile.is_zipfile(path):
        return path.suffix == ".pt2"
    with zipfile.ZipFile(path) as archive:
        return any(name.partition("/")[2] == "archive_format" for name in archive.namelist())


def load_program(path: Path) -> ExportedProgram:
    """Loads a captured program.

    Raises:
        CheckpointError: where the archive is damaged, needs code to be run, or
            was captured by a torch that this one cannot read.
    """
    _check_archive(path)
    try:
        with _weights_only():
            return torch.export.load(path)
    except Exception as error:
        raise CheckpointError(
            path, f"torch.export cannot load it ({error})", "Export it again with this torch."
        ) from error


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                member = name.partition("/")[2]
                if not _HARMLESS_MEMBERS.fullmatch(member):
                    raise CheckpointError(
                        path, f"it holds {member}, which can run code when loaded", _SAFE_FORM
                    )
                if member.endswith(".json"):
                    _check_expressions(path, json.loads(archive.read(name)))
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise CheckpointError(
            path, "truncated, damaged, or not a torch.export archive", "Copy or save it again."
        ) from error


def _check_expressions(path: Path, content: Any) -> None:
    stack = [content]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            expression = item.get("expr_str")
            if isinstance(expression, str) and not _SHAPE_EXPRESSION.fullmatch(expression):
                raise CheckpointError(
                    path, f"its shape expression {expression[:80]!r} is no arithmetic", _SAFE_FORM
                )
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Holds every torch.load inside to tensors, whatever its caller asks for."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
