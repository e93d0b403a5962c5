"""A bundle at first sight: its verdict, its operators, what it lacks, and the same as data."""

import json
import shlex
from typing import Any

import onnx

from aftexport.bundle.bundle import PARITY, TOKENIZER, Bundle
from aftexport.engines.onnxruntime import operator_paths
from aftexport.errors import BundleError
from aftexport.heads.head import is_numbered
from aftexport.operators.domain import DOMAIN
from aftexport.parity import Comparison
from aftexport.parity.report import Report
from aftexport.system.console import path_title


def stored_report(bundle: Bundle) -> Report:
    """Return the report of the comparison at export, as parity.json holds it.

    Raises:
        BundleError: if the file cannot be read.
    """
    results: list[Comparison] = []
    if PARITY in bundle.files:
        try:
            record = json.loads((bundle.path / PARITY).read_text("utf-8"))
            results = [Comparison.from_dict(case) for case in record["cases"]]
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(
                bundle.path, f"{PARITY} cannot be read ({error})", "Export the model again."
            ) from error
    return Report(bundle.manifest, results, against=bundle.manifest.reference_title)


def operators_sentence(bundle: Bundle, paths: dict[str, str]) -> str:
    """Return the custom operators of a bundle by the way in which they run here."""
    groups: dict[str, list[str]] = {}
    for op_type, count in bundle.manifest.operators.items():
        groups.setdefault(path_title(paths[op_type]), []).append(f"{count} {op_type}")
    parts = [f"{', '.join(names)}, each by a {path}" for path, names in groups.items()]
    model = onnx.load(bundle.model_path, load_external_data=False)
    own = {n.op_type for n in model.graph.node if n.domain not in ("", "ai.onnx", DOMAIN)}
    if not parts:
        parts = ["none of aftexport's" + ", standard ONNX only" * (not own)]
    if own:
        parts.append(f"{', '.join(sorted(own))} of ONNX Runtime, which other runtimes lack")
    return "; ".join(parts)


_EXAMPLES = {1: "A", 2: "A,B", 3: "A,B,C"}


def gaps(bundle: Bundle) -> list[str]:
    """Return what a user may miss in a bundle, with the option that adds it."""
    manifest = bundle.manifest
    found = []
    if TOKENIZER not in bundle.files and manifest.features is None:
        found.append(
            "No tokenizer: requests must send input_ids, not text. Export with --tokenizer FILE."
        )
    for output, head in manifest.heads.items():
        if head.is_named and is_numbered(head.names):
            place, option = "", f"--labels {_EXAMPLES.get(len(head.names), 'A,B,...')}"
            if len(manifest.heads) > 1:
                place, option = f" of {output}", "--heads FILE"
            numbered = " to ".join(dict.fromkeys((head.names[0], head.names[-1])))
            found.append(f"No names{place}: answers say {numbered}. Export with {option}.")
    return found


def next_command(bundle: Bundle) -> str:
    """Return the command that serves a bundle."""
    return f"aftserve {shlex.quote(str(bundle.path))} --port 8000"


def to_dict(bundle: Bundle) -> dict[str, Any]:
    """Return a bundle as JSON-ready values."""
    report, manifest = stored_report(bundle), bundle.manifest
    paths = operator_paths(bundle.model_path)
    return {
        "bundle": str(bundle.path),
        "digest": bundle.digest,
        "verdict": report.verdict,
        "reason": report.reason,
        "worst": report.worst.to_dict() if report.worst else None,
        "operators": {
            name: {"nodes": count, "path": path_title(paths[name])}
            for name, count in manifest.operators.items()
        },
        "gaps": gaps(bundle),
        "serve": next_command(bundle),
        "files": dict(bundle.files),
        "manifest": manifest.model_dump(mode="json"),
    }
