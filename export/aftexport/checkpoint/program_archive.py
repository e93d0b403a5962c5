"""Reading of ``torch.export`` archives (.pt2) without running code in them.

``torch.export.load`` falls back to full unpickling, evaluates shape expressions and guards as
Python, calls the targets of a graph, and loads compiled code. An archive that needs any of these is
refused before torch reads it.
"""

import io
import json
import logging
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.export import ExportedProgram

import aftexport.operators.torch_ops  # noqa: F401  registers the operators that programs call
from aftexport.checkpoint.program_content import SAFE_FORM, check_content
from aftexport.errors import CheckpointError
from aftexport.system.files import unstored_member
from aftexport.system.internals.torch_operators import PyTorchFileReader, record_sizes

_HARMLESS_MEMBERS = re.compile(
    r"models/[^/]+\.json|data/weights/(weight_\d+|[^/]+_weights_config\.json)"
    r"|data/constants/(tensor_\d+|[^/]+_constants_config\.json)"
    r"|data/(weights|constants|sample_inputs)/[^/]+\.pt"
    r"|archive_format|archive_version|byteorder|version"
    r"|extra/.+|\.data/.*|\.format_version|\.storage_alignment"
)
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")
_LOGGERS = ("torch.export", "torch.export.pt2_archive._package", "torch._export.serde.serialize")
_MAX_EXPANDED = 1 << 28
"""The maximum elements of a weight with fewer elements in the archive, such as an expanded one."""


def is_program_archive(path: Path) -> bool:
    """Return whether a file is a ``torch.export`` archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(n.partition("/")[2] == "archive_format" for n in archive.namelist())
    except (zipfile.BadZipFile, ValueError):
        return path.suffix == ".pt2"


def load_program(path: Path) -> ExportedProgram:
    """Load a captured program.

    Raises:
        CheckpointError: if the archive is damaged, would run code, or was captured by a version
            of torch that this one cannot read.
    """
    _check_archive(path)
    try:
        with _weights_only(), _unlogged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            path, "it holds pickled Python objects, which run code when loaded", SAFE_FORM
        ) from error
    except Exception as error:  # an archive can make torch raise any exception
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            path, f"torch.export cannot load it ({reason})", "Export it again with this torch."
        ) from error


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len({name.lower() for name in names}) != len(names):
                raise CheckpointError(path, "it holds two files with the same name", SAFE_FORM)
            check_members(path, archive, path)
            for name in names:
                member = name.partition("/")[2]
                if not _HARMLESS_MEMBERS.fullmatch(member):
                    raise CheckpointError(
                        path, f"it holds {member}, which can run code when loaded", SAFE_FORM
                    )
                _check_member(path, archive, name)
    except CheckpointError:
        raise
    except Exception as error:  # a changed byte can cause any exception
        raise CheckpointError(
            path, "truncated, damaged, or not a torch.export archive", "Copy or save it again."
        ) from error


def _check_member(path: Path, archive: zipfile.ZipFile, name: str) -> None:
    if name.endswith(".pt") and archive.getinfo(name).file_size:
        content = io.BytesIO(archive.read(name))
        with zipfile.ZipFile(content) as tensors:
            check_members(path, tensors, content)
    if name.endswith(".json"):
        decoded = json.loads(archive.read(name))
        check_content(path, decoded)
        if name.endswith("_config.json"):
            sizes = {i.filename.rpartition("/")[2]: i.file_size for i in archive.infolist()}
            for weight, meta in decoded["config"].items():
                _check_payload(path, weight, meta, sizes)


def _check_payload(path: Path, weight: str, meta: dict[str, Any], sizes: dict[str, int]) -> None:
    """Check that a weight is a tensor of the archive, with at most its number of elements."""
    if meta["use_pickle"] or not _PAYLOAD.fullmatch(meta["path_name"]):
        raise CheckpointError(path, f"its weight {weight[:80]!r} is pickled", SAFE_FORM)
    elements = math.prod(int(size["as_int"]) for size in meta["tensor_meta"]["sizes"])
    size = sizes[meta["path_name"]]
    if elements > (max(size, _MAX_EXPANDED) if size else 0):  # torch accepts a weight of 0 bytes
        raise CheckpointError(
            path,
            f"its weight {weight[:80]!r} declares {elements} elements, got {size} bytes",
            SAFE_FORM,
        )


def _size(file: Path | BinaryIO) -> int:
    return file.stat().st_size if isinstance(file, Path) else file.seek(0, io.SEEK_END)


def check_members(path: Path, archive: zipfile.ZipFile, file: Path | BinaryIO) -> None:
    """Check that the members of ``file``, at or within ``path``, are stored as torch writes them.

    Torch does not compress members, so reading needs at most the size of the file. A zip file may
    have two lists of its members, of which Python reads one and torch the other.

    Raises:
        CheckpointError: if a member is compressed, declares a size above that of the file, or does
            not match its checksum, which torch ignores for weights; or if torch reads another list
            of members.
    """
    if (reason := unstored_member(archive, _size(file))) is not None:
        raise CheckpointError(path, reason, "Save it again: torch does not compress.")
    if (changed := archive.testzip()) is not None:
        raise CheckpointError(path, f"{changed} in it is damaged", "Copy or save it again.")
    if not isinstance(file, Path):
        file.seek(0)  # torch reads from the current position
    reader = PyTorchFileReader(str(file) if isinstance(file, Path) else file)
    torch_sizes = record_sizes(reader)
    sizes = {m.filename.partition("/")[2]: m.file_size for m in archive.infolist()}
    texts = [name for name in sizes if name.endswith((".json", ".pkl", ".pt"))]
    top = archive.namelist()[0].partition("/")[0]
    if torch_sizes != sizes or any(
        reader.get_record(n) != archive.read(f"{top}/{n}") for n in texts
    ):
        raise CheckpointError(path, "it has two lists of its members", "Save it again.")


@contextmanager
def _unlogged() -> Iterator[None]:
    """Hide torch's logs about an archive, whose error holds the same information."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Restrict every torch.load in the block to tensors, regardless of its arguments."""
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
