"""Checks of the plan for documents in chunks against the graphs in ``chunked.zip``."""

import re
import struct
import zipfile
from pathlib import Path

from aftexport.bundle.bundle_files import EXPORT_AGAIN
from aftexport.bundle.chunked_plan import ChunkedPlan
from aftexport.errors import BundleError

DAMAGED = (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, struct.error)
"""The exceptions of zipfile for damaged archives."""


def check_plan(path: Path, archive: Path, plan: ChunkedPlan) -> None:
    """Check that an archive has the graphs of a plan.

    Args:
        path: the bundle.
        archive: the archive in the bundle.
        plan: the plan in the bundle's manifest.

    Raises:
        BundleError: if the archive has other graphs; names the field of the manifest.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            names = {name.removesuffix(".onnx") for name in opened.namelist() if "+" not in name}
    except DAMAGED as error:
        raise BundleError(path, f"{archive.name}: {error}", EXPORT_AGAIN) from error
    stages = len({name.partition(".")[0] for name in names if re.fullmatch(r"\d+\.\w+", name)})
    if stages != len(plan.stages):
        raise BundleError(
            path,
            f"manifest.json: chunked.stages: expected {stages} stage{'s' * (stages != 1)}, as "
            f"{archive.name} has, got {len(plan.stages)}",
            EXPORT_AGAIN,
        )
    described = [
        ("pooled", bool(plan.pooled), "pool"),
        ("pooled", bool(plan.pooled), "head"),
        ("tokens", bool(plan.tokens), "tokens"),
        ("evidence", plan.evidence, "explain"),
    ]
    for field, is_described, graph in described:
        if is_described != (graph in names):
            some, none = ("true", "false") if field == "evidence" else ("a value", "none")
            reason = (
                f"expected {some}, as {archive.name} has {graph}.onnx, got {none}"
                if graph in names
                else f"expected {none}, as {archive.name} has no {graph}.onnx, got {some}"
            )
            raise BundleError(path, f"manifest.json: chunked.{field}: {reason}", EXPORT_AGAIN)
