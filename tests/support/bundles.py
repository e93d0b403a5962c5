"""Damaging bundles, and making them look whole again."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def classes(labels: object) -> dict[str, Any]:
    """The entry of a manifest for labels that exclude each other."""
    return {"heads": {"logits": {"task": "single_label_classification", "labels": labels}}}


_NO_ERROR = {"value": 0.0, "low": 0.0, "high": 0.0}
_CALIBRATION: dict[str, Any] = {
    "method": "temperature",
    "scalings": [{"log_temperature": 0.5}],
    "min_tokens": 1,
    "max_tokens": 9,
    "documents": 100,
    "error_before": _NO_ERROR,
    "error_after": _NO_ERROR,
    "bands": [],
}
"""A calibration that fits the head of the tests' bundle."""

SPARSE_MANIFESTS: dict[str, dict[str, Any]] = {
    "source empty": {"source": {}},
    "config empty": {"config": {}},
    "config of another kind": {"config": {"depth": 1}},
    "versions empty": {"versions": {}},
    "calibration without bands": {"calibration": {"logits": _CALIBRATION}},
    "names that look like markup": {
        **classes(["[/]", "[bold]", "[red]c"]), "versions": {"[/b]": "[/]"}
    },
}  # fmt: skip

BAD_MANIFESTS: dict[str, dict[str, Any]] = {
    "schema version earlier": {"schema_version": 3},
    "schema version text": {"schema_version": "4"},
    "files null": {"files": None},
    "files without digests": {"files": {"model.onnx": {"bytes": 1}}},
    "inputs null": {"inputs": None},
    "inputs a word": {"inputs": "input_ids"},
    "inputs others": {"inputs": ["tokens"]},
    "vocabulary text": {"vocab_size": "300"},
    "vocabulary huge": {"vocab_size": 10**12},
    "longest document huge": {"max_tokens": 10**12},
    "opset huge": {"opset": 10**12},
    "operators beyond number": {"operators": {"AftSimple": 10**12}},
    "labels only one": {**classes(["a"]), "evidence_heads": {"logits": [0.0]}},
    "vocabulary negative": {"vocab_size": -1},
    "longest document text": {"max_tokens": "many"},
    "longest document 0": {"max_tokens": 0},
    "labels null": classes(None),
    "labels a word": classes("abc"),
    "labels too few": classes(["a", "b"]),
    "evidence heads of fewer labels": {"evidence_heads": {"logits": [0.0]}},
    "evidence heads of no head": {"evidence_heads": {"other": [0.0, 0.0, 0.0]}},
    "evidence heads none": {"evidence_heads": {}},
    "labels numbers": classes([1, 2, 3]),
    "labels twice": classes(["a", "a", "b"]),
    "labels without a head": {"labels": ["a", "b", "c"]},
    "heads null": {"heads": None},
    "heads without one": {"heads": {}},
    "head without a task": {"heads": {"logits": {"labels": ["a", "b", "c"]}}},
    "task unknown": {"heads": {"logits": {"task": "ordinal", "labels": ["a", "b", "c"]}}},
    "thresholds too few": {
        "heads": {
            "logits": {
                "task": "multi_label_classification",
                "labels": ["a", "b", "c"],
                "thresholds": [0.5],
            }
        }
    },
    "a scale of 0": {
        "heads": {
            "logits": {
                "task": "regression",
                "values": [{"name": "a", "scale": 0.0}, {"name": "b"}, {"name": "c"}],
            }
        }
    },
    "calibration of no head": {"calibration": {}},
    "calibration of another head": {"calibration": {"other": _CALIBRATION}},
    "calibration of another method": {
        "calibration": {"logits": _CALIBRATION | {"method": "platt"}}
    },
    "calibration without scalings": {"calibration": {"logits": _CALIBRATION | {"scalings": []}}},
    "calibration for no length": {"calibration": {"logits": _CALIBRATION | {"min_tokens": 0}}},
    "temperature huge": {
        "calibration": {"logits": _CALIBRATION | {"scalings": [{"log_temperature": 1e3}]}}
    },
    "tolerance not finite": {"tolerance": float("inf")},
    "precision unknown": {"precision": "fp8"},
    "operators null": {"operators": None},
    "operators the model lacks": {"operators": {"AftEverything": 1}},
    "position biases null": {"position_biases": None},
    "position bias without a precision": {"position_biases": [{"node": "a", "row_range": 1.0}]},
    "range of a position bias negative": {
        "position_biases": [{"node": "a", "row_range": -1.0, "precision": "fp16"}]
    },
    "precision of a position bias unknown": {
        "position_biases": [{"node": "a", "row_range": None, "precision": "int4"}]
    },
    "operator version text": {"operator_version": "1"},
    "operator version newer": {"operator_version": 2},
    "source null": {"source": None},
    "config a list": {"config": []},
    "versions null": {"versions": None},
    "unknown entry": {"color": "red"},
    "opset text": {"opset": "20"},
    "chunks with a huge reach": {
        "chunked": {
            "stages": [{"left": 10**12, "right": 0, "causal": True, "keeps": []}],
            "pooled": {},
            "token_bytes": 1,
        }
    },
    "chunks of huge tokens": {"chunked": {"stages": [], "pooled": {}, "token_bytes": 10**12}},
    "an engine without settings": {"engine": {"file": None, "deferred": []}},
    "an engine of lengths that fall": {
        "engine": {
            "settings": {
                "runtime": "tensorrt",
                "min_length": 9,
                "opt_lengths": [5],
                "max_length": 10,
                "max_batch": 1,
                "workspace_mib": None,
                "compute_capabilities": [],
            },
            "file": None,
            "deferred": [],
        }
    },
}


def of_links(whole: Path, kind: str, place: Path) -> Path:
    """Make a bundle whose files, or whose folder, are links as a tool leaves them.

    ``kind`` is ``snapshot`` of the Hugging Face hub, ``volume`` of a Kubernetes ConfigMap,
    ``cache`` of DVC, or a ``folder`` that is one link.
    """
    bundle = place / "model.bundle"
    if kind == "folder":
        bundle.symlink_to(whole, target_is_directory=True)
        return bundle
    bundle.mkdir()
    if kind == "volume":
        shutil.copytree(whole, bundle / "..2026_01_01")
        (bundle / "..data").symlink_to("..2026_01_01", target_is_directory=True)
    for file in sorted(whole.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        target = Path("..data") / file.name
        if kind != "volume":
            folder = "blobs" if kind == "snapshot" else f"cache/{digest[:2]}"
            target = Path("..") / folder / digest[2:]
            (bundle / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, bundle / target)
        (bundle / file.name).symlink_to(target)
    return bundle


LINKS = ("snapshot", "volume", "cache", "folder")


def changed_manifest(folder: Path, changes: Mapping[str, Any]) -> Path:
    path = folder / "manifest.json"
    content = json.loads(path.read_text("utf-8")) | dict(changes)
    path.write_text(json.dumps(content), "utf-8")
    return folder


def resealed(folder: Path) -> Path:
    """Writes sizes and digests of the files as they are now."""
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    }
    return changed_manifest(folder, {"files": files})


def flip(name: str) -> Callable[[Path], object]:
    """Return a function that flips one bit of a file."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return damage


def unlisted(name: str) -> Callable[[Path], object]:
    """Return a function that removes a file from the manifest."""

    def damage(folder: Path) -> None:
        files = json.loads((folder / "manifest.json").read_text("utf-8"))["files"]
        del files[name]
        changed_manifest(folder, {"files": files})

    return damage
