"""Reading ``torch.export`` archives (.pt2) without running what is in them.

``torch.export.load`` falls back to full unpickling, evaluates shape expressions
as Python, and loads compiled code and evaluates guards; an archive that would need any of it is
refused before torch sees it.
"""

import json
import os
import pickle
import re
import warnings
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
_EXPRESSION_TOKEN = re.compile(r"\s+|'[su]\d+'|\w+(?:\.\d+)?|[-+*/(),<>=&|~]")
_EXPRESSION_WORDS = frozenset(
    {"Symbol", "Integer", "Rational", "Add", "Mul", "Max", "Min", "Mod", "PythonMod"}
    | {"FloorDiv", "CeilDiv", "CleanDiv", "IntTrueDiv", "Eq", "Ne", "Lt", "Le", "Gt", "Ge"}
    | {"positive", "nonnegative", "integer", "True", "False"}
)
_SIZE = re.compile(r"L\['\w+'\]\.size\(\)\[\d+\]")
_LONGEST_EXPRESSION = 2000
_SAFE_FORM = "Export it again with torch.export.save, or give its state dict and --factory."


def is_program_archive(path: Path) -> bool:
    """Tells whether a file is a ``torch.export`` archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(n.partition("/")[2] == "archive_format" for n in archive.namelist())
    except (zipfile.BadZipFile, ValueError):
        return path.suffix == ".pt2"


def load_program(path: Path) -> ExportedProgram:
    """Loads a captured program.

    Raises:
        CheckpointError: where the archive is damaged, needs code to be run, or
            was captured by a torch that this one cannot read.
    """
    _check_archive(path)
    try:
        with _weights_only(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            path, "it holds pickled Python objects, which run code when loaded", _SAFE_FORM
        ) from error
    except Exception as error:  # whatever the archive leads torch to
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            path, f"torch.export cannot load it ({reason})", "Export it again with this torch."
        ) from error


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(set(names)) != len(names):
                raise CheckpointError(path, "it holds two files of one name", _SAFE_FORM)
            check_members(path, archive)
            for name in names:
                member = name.partition("/")[2]
                if not _HARMLESS_MEMBERS.fullmatch(member):
                    raise CheckpointError(
                        path, f"it holds {member}, which can run code when loaded", _SAFE_FORM
                    )
                if member.endswith(".json"):
                    _check_content(path, json.loads(archive.read(name)))
    except CheckpointError:
        raise
    except Exception as error:  # a changed byte reads as encryption, compression, anything
        raise CheckpointError(
            path, "truncated, damaged, or not a torch.export archive", "Copy or save it again."
        ) from error


def check_members(path: Path, archive: zipfile.ZipFile) -> None:
    """Checks that what torch is to read from an archive is as torch wrote it.

    Torch compresses nothing, so that what is read is no more than the file holds.

    Raises:
        CheckpointError: where a member is compressed, or not what its checksum says, which torch
            does not look at for weights.
    """
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                path,
                f"{member.filename} in it is compressed",
                "Save it again: torch compresses nothing.",
            )
    if (changed := archive.testzip()) is not None:
        raise CheckpointError(path, f"{changed} in it is damaged", "Copy or save it again.")


def _check_content(path: Path, content: Any) -> None:
    """Refuses whatever torch would evaluate or import: expressions, guards, structures."""
    stack = [content]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
            continue
        if not isinstance(item, dict):
            continue
        stack.extend(item.values())
        expression = item.get("expr_str", "")
        if not isinstance(expression, str) or not _is_arithmetic(expression):
            _refuse(path, "shape expression", expression)
        for guard in item.get("guards_code") or []:
            if not isinstance(guard, str) or not _is_arithmetic(_SIZE.sub("s0", guard)):
                _refuse(path, "guard expression", guard)
        for name in ("in_spec", "out_spec"):
            if (spec := item.get(name)) and not _is_plain_structure(json.loads(spec)[1]):
                _refuse(path, "structure of inputs", spec)


def _refuse(path: Path, what: str, text: object) -> None:
    raise CheckpointError(path, f"its {what} {str(text)[:80]!r} may be code", _SAFE_FORM)


def _is_plain_structure(spec: Any) -> bool:
    """Tells whether a structure is tuples, lists and dicts; others name a class to import."""
    if not isinstance(spec, dict):
        return False
    context = spec.get("context")
    keys = json.loads(context) if isinstance(context, str) else context
    return (
        spec.get("type") in (None, "builtins.tuple", "builtins.list", "builtins.dict")
        and (keys is None or (isinstance(keys, list) and all(isinstance(k, str) for k in keys)))
        and all(_is_plain_structure(child) for child in spec.get("children_spec", []))
    )


def _is_arithmetic(expression: str) -> bool:
    """Tells whether an expression is sums and products of symbols, and no code.

    Powers are none: a small one can take for ever to evaluate.
    """
    tokens = _EXPRESSION_TOKEN.findall(expression[:_LONGEST_EXPRESSION])
    words = [t for t in tokens if t[0].isalpha() or t[0] == "_"]
    return (
        "".join(tokens) == expression
        and "**" not in expression
        and all(w in _EXPRESSION_WORDS or re.fullmatch(r"[su]\d+", w) for w in words)
    )


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
